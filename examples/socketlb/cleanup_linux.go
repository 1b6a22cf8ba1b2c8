package socketlb

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"path/filepath"

	"github.com/cilium/ebpf/link"
)

// Cleanup detaches the programs and deletes the files of a [Backend] with the same
// configuration, and nothing else. It does nothing if there are none. Connections that were
// translated go on. The error is about the configuration or the kernel's.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	var errs []error
	for _, path := range files(&c) {
		if slices.Contains(hookNames, filepath.Base(path)) {
			if l, err := link.LoadPinnedLink(path, nil); err == nil {
				// A process may have the link open. Detach fails if the cgroup is gone.
				_ = l.Detach()
				l.Close()
			}
		}
		errs = append(errs, os.Remove(path))
	}
	if err := os.Remove(c.Dir); !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("socketlb: clean up: %w", err)
	}
	return nil
}

// Owned reports whether there is anything that [Cleanup] with the same configuration would
// delete. Its errors are like those of Cleanup.
func Owned(ctx context.Context, c Config) (bool, error) {
	c, err := c.withDefaults()
	if err != nil {
		return false, err
	}
	return len(files(&c)) != 0, ctx.Err()
}
