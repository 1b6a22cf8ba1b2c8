package ipvs

import (
	"context"
	"net/netip"
	"slices"
)

// bind adds an item's addresses to the dummy device, except those whose virtual servers could not
// be added.
func (u *update) bind(it *item) error {
	for _, a := range it.plan.bind {
		served := func(p plannedVirtual) bool { return p.key.at.Addr() == a && u.s.virtuals[p.key] != nil }
		if it.failed && !slices.ContainsFunc(it.plan.virtuals, served) {
			continue
		}
		if err := it.fail(u.claimAddress(it.owner, a)); err != nil {
			return err
		}
	}
	return nil
}

func (u *update) claimAddress(o owner, a netip.Addr) error {
	if !u.s.bound.Claim(o, a) {
		return nil
	}
	if err := u.b.kernel.bind(a); err != nil {
		return err
	}
	u.s.bound.Installed(a)
	if a.Is6() {
		u.s.notLocalYet = append(u.s.notLocalYet, a)
	}
	return nil
}

// waitLocal waits until the kernel treats bound addresses as local.
func (u *update) waitLocal(ctx context.Context) error {
	u.s.notLocalYet = slices.DeleteFunc(u.s.notLocalYet, func(a netip.Addr) bool { return !u.s.bound.Has(a) })
	if err := u.b.kernel.waitLocal(ctx, u.s.notLocalYet); err != nil {
		return err
	}
	u.s.notLocalYet = nil
	return nil
}

// abandon ends an item's claims to addresses that are no longer in its plan.
func (u *update) abandon(it *item) error {
	for a := range u.s.bound.Items(it.owner) {
		if !slices.Contains(it.plan.bind, a) {
			u.s.bound.Release(it.owner, a)
		}
	}
	return nil
}

func (u *update) unbind(context.Context) error {
	for _, a := range slices.SortedFunc(u.s.bound.Unused(), netip.Addr.Compare) {
		if err := u.b.kernel.unbind(a); err != nil {
			return err
		}
		u.s.bound.Removed(a)
	}
	return nil
}
