package socketlb

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf/link"
)

// Cleanup detaches the programs and deletes the files of a [Backend] with the same
// configuration. It changes nothing else, and does nothing if no such files exist.
// Translated connections continue. The error wraps [ruleset.ErrConfig], or is the kernel's
// or ctx's error.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.withDefaults(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range files(&c) {
		path := filepath.Join(c.Dir, name)
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			// Another process may have the link open. Detach fails if the cgroup was
			// removed.
			_ = l.Detach()
			l.Close()
		}
		errs = append(errs, os.Remove(path))
	}
	if err := os.Remove(c.Dir); !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("socketlb: cannot clean up: %w", err)
	}
	return nil
}

// Owned reports whether files exist that [Cleanup] with the same configuration would delete.
// The error wraps [ruleset.ErrConfig], or is ctx's error.
func Owned(ctx context.Context, c Config) (bool, error) {
	c, err := c.withDefaults(ctx)
	return err == nil && len(files(&c)) != 0, err
}
