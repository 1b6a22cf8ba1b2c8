//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Cleanup removes everything that a [Backend] with the same configuration has left, and
// nothing else: virtual servers that their mark or an element in one of the sets
// identifies, the dummy device, the iptables rules and chains, and the sets. It also
// removes the same objects of kube-proxy's ipvs mode, except chains that kube-proxy's
// iptables mode has, too, and sets that these chains use. Kernel parameters keep their
// values. The error joins the errors of all steps. Cleanup returns nil if there is nothing
// to remove, also on a system without IPVS or ipset.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	b := newBackend(c)
	defer b.close()
	if err := b.cleanup(ctx); err != nil {
		return fmt.Errorf("ipvs: cannot clean up: %w", err)
	}
	return nil
}

func (b *Backend) cleanup(ctx context.Context) error {
	// Rules and sets can exist without IPVS.
	if err := b.open(); err != nil && !errors.Is(err, errNoFamily) {
		return err
	}
	// Without addresses no packet reaches the other objects.
	errs := []error{b.device.remove()}
	for _, f := range b.config.Families {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, b.cleanupVirtuals(f), b.cleanupRules(ctx, f))
		for id := range setCount {
			errs = append(errs, b.sets.destroy(id, f))
		}
	}
	return errors.Join(errs...)
}

// cleanupVirtuals deletes the virtual servers of one family.
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

// cleanupRules deletes the iptables rules of one family.
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

// ownChain is a chain that kube-proxy does not have in any mode.
const ownChain = "KUBE-IPVS-SERVICES"

// Owned reports whether a [Backend] has programmed the network namespace, in any family of
// the configuration. If not, rules and sets of the same names are kube-proxy's, which
// [Cleanup] would remove, too. The error wraps [ruleset.ErrConfig] if c is invalid. Other
// errors come from iptables-save.
func Owned(ctx context.Context, c Config) (owned bool, err error) {
	if c, err = c.withDefaults(); err != nil {
		return false, err
	}
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return false, fmt.Errorf("ipvs: %w", err)
	}
	defer ns.Close()
	for _, f := range c.Families {
		tool, err := findTool(ctx, c, f, ns)
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		var have string
		if err == nil {
			have, err = saved(ctx, tool)
		}
		if err != nil {
			return false, fmt.Errorf("ipvs: %w", err)
		}
		owned = owned || strings.Contains(have, "\n:"+ownChain+" ")
	}
	return owned, nil
}
