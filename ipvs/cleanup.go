//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Cleanup removes everything that a [Backend] with the same configuration has left,
// and nothing else: virtual servers that an element in one of the sets or their mark
// tells, the dummy device, the iptables rules and chains, and the sets. It does the
// same for kube-proxy's ipvs mode but for chains that its iptables mode has, too, and
// sets that those use. Kernel parameters stay as they are. That there is
// nothing is no error, nor is a system without IPVS or ipset.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	b := &Backend{config: c}
	defer b.close()
	if err := b.cleanup(ctx); err != nil {
		return fmt.Errorf("ipvs: clean up: %w", err)
	}
	return nil
}

func (b *Backend) cleanup(ctx context.Context) error {
	var errs []error
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	err := b.open()
	if errors.Is(err, errNoFamily) {
		// Rules and sets may be there all the same.
		err = b.ns.Do(b.openOthers)
	}
	if err != nil {
		return err
	}
	// Without addresses no packet comes by any more.
	note(b.device.remove())
	for _, f := range b.config.Families {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		note(b.cleanupVirtuals(f))
		note(b.cleanupRules(ctx, f))
		for id := range setCount {
			note(b.sets.destroy(id, f))
		}
	}
	return errors.Join(errs...)
}

func (b *Backend) cleanupVirtuals(f tracker.Family) error {
	if b.kernel == nil {
		return nil
	}
	s := newState(f)
	for id := range setCount {
		err := b.sets.list(id, f, func(e entry, mark uint32) { s.entries.found(e, mark) })
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	var gone []virtualKey
	err := b.kernel.virtuals(f, func(k virtualKey, _ virtual) {
		if s.recognised(b.config, k) {
			gone = append(gone, k)
		}
	})
	if err != nil {
		return err
	}
	for _, k := range gone {
		if err := b.kernel.delVirtual(k); err != nil {
			return err
		}
	}
	return nil
}

func (b *Backend) cleanupRules(ctx context.Context, f tracker.Family) error {
	tool, err := findTool(ctx, b.config, f, b.ns)
	if errors.Is(err, exec.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	have, err := saved(ctx, tool)
	if err != nil {
		return err
	}
	tables := rules{family: f, mark: b.config.mark(), marks: b.config.Marks, node: &ruleset.Node{}}.tables()
	if input := removeAll(tables, have); input != "" {
		return tool.Restore(ctx, []byte(input))
	}
	return nil
}
