//go:build linux

package ipvs

import (
	"context"
	"net/netip"
	"slices"
)

// bind adds an item's addresses to the dummy device.
func (u *update) bind(it *item) error {
	for _, a := range it.plan.bind {
		if slices.Contains(it.state.bound, a) {
			continue
		}
		if err := u.bindOne(a); err != nil {
			return err
		}
		u.s.bound.take(a)
		it.state.bound = append(it.state.bound, a)
	}
	return nil
}

// bindOne adds an address to the dummy device unless it is there.
func (u *update) bindOne(a netip.Addr) error {
	if u.s.bound.has(a) {
		return nil
	}
	if err := u.b.device.bind(a); err != nil {
		return err
	}
	if a.Is6() {
		u.s.notLocalYet = append(u.s.notLocalYet, a)
	}
	return nil
}

// waitLocal waits until the kernel treats bound addresses as local, including addresses
// that an interrupted update bound.
func (u *update) waitLocal(ctx context.Context) error {
	u.s.notLocalYet = slices.DeleteFunc(u.s.notLocalYet, func(a netip.Addr) bool { return !u.s.bound.has(a) })
	if err := u.b.device.waitLocal(ctx, u.s.notLocalYet); err != nil {
		return err
	}
	u.s.notLocalYet = nil
	return nil
}

// abandon ends an item's ownership of addresses that are no longer in its plan.
func (u *update) abandon(it *item) error {
	for _, a := range missing(it.state.bound, it.plan.bind) {
		u.s.bound.drop(a)
		u.s.abandoned = append(u.s.abandoned, a)
		it.state.bound = slices.DeleteFunc(it.state.bound, func(x netip.Addr) bool { return x == a })
	}
	return nil
}

// unbind removes abandoned addresses without another owner from the dummy device.
func (u *update) unbind(context.Context) error {
	for len(u.s.abandoned) > 0 {
		a := u.s.abandoned[0]
		if u.s.bound.has(a) && u.s.bound[a].owners <= 0 {
			if err := u.b.device.unbind(a); err != nil {
				return err
			}
			delete(u.s.bound, a)
		}
		u.s.abandoned = u.s.abandoned[1:]
	}
	u.s.abandoned = nil
	return nil
}
