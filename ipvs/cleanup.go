package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Cleanup removes everything that a [Backend] with the same configuration has left, and nothing else: virtual servers
// that their signature or an element in one of the sets identifies, the dummy device, the iptables rules and chains,
// and the sets. It also removes the same objects of kube-proxy's ipvs mode, except chains that kube-proxy's iptables
// mode has, too, and sets that these chains use. Kernel parameters keep their values. The error joins the errors of
// all steps. Cleanup returns nil if there is nothing to remove, even without IPVS or ipset.
func Cleanup(ctx context.Context, c Config) error {
	b, err := openBackend(ctx, c, toClean)
	if err != nil {
		return err
	}
	defer b.kernel.close()
	if err := b.cleanup(ctx); err != nil {
		return fmt.Errorf("ipvs: cannot clean up: %w", err)
	}
	return nil
}

// CleanupRules removes only the iptables rules and chains that [Cleanup] would remove: those in another flavor of
// iptables than that of a [Backend] that runs, which share its sets. The error wraps [ruleset.ErrConfig] if c is
// invalid. Otherwise it joins the errors of iptables-save and iptables-restore. It is nil if these programs are
// missing.
func CleanupRules(ctx context.Context, c Config) error {
	b, err := openBackend(ctx, c, toReadRules)
	if err != nil {
		return err
	}
	defer b.kernel.close()
	var errs []error
	for _, f := range b.config.Families {
		if err := b.cleanupRules(ctx, f); err != nil {
			errs = append(errs, fmt.Errorf("ipvs: cannot clean up the rules of %v: %w", f, err))
		}
	}
	return errors.Join(errs...)
}

func (b *Backend) cleanup(ctx context.Context) error {
	// Without addresses no packet reaches the other objects.
	errs := []error{b.kernel.removeDevice()}
	if err := b.kernel.restoreMarks(false); !errors.Is(err, errors.ErrUnsupported) {
		errs = append(errs, err)
	}
	for _, f := range b.config.Families {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, b.cleanupVirtuals(f), b.cleanupRules(ctx, f))
		for id := range setCount {
			errs = append(errs, b.kernel.destroySet(id, f))
		}
	}
	return errors.Join(errs...)
}

func (b *Backend) cleanupVirtuals(f tracker.Family) error {
	s := newState(f)
	for id := range setCount {
		err := b.kernel.listSet(id, f, s.hasEntry)
		if err != nil && !errors.Is(err, syscall.ENOENT) {
			return err
		}
	}
	var gone []virtualKey
	err := b.kernel.virtuals(f, func(k virtualKey, v virtual) {
		if s.recognized(b.config, k, v) {
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
	have, err := b.kernel.savedRules(ctx, f)
	if errors.Is(err, exec.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	tables := b.config.rules(f, &ruleset.Node{}).tables()
	if input := removeAll(tables, have); input != "" {
		return b.kernel.restoreRules(ctx, f, input)
	}
	return nil
}

// ownChain is a chain that kube-proxy does not have in any mode.
const ownChain = "KUBE-IPVS-SERVICES"

// Owned reports whether a [Backend] has programmed the network namespace, in any family of the configuration. If not,
// rules and sets of the same names are kube-proxy's, which [Cleanup] would remove, too. The error wraps
// [ruleset.ErrConfig] if c is invalid, or comes from iptables-save.
func Owned(ctx context.Context, c Config) (owned bool, err error) {
	b, err := openBackend(ctx, c, toReadRules)
	if err != nil {
		return false, err
	}
	defer b.kernel.close()
	for _, f := range b.config.Families {
		have, err := b.kernel.savedRules(ctx, f)
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("ipvs: %w", err)
		}
		_, has := have["nat"][ownChain]
		owned = owned || has
	}
	return owned, nil
}
