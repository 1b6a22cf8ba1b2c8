//go:build linux

package ipvs

import (
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// upsertVirtuals adds and changes an item's virtual servers with their real servers.
func (u *update) upsertVirtuals(it *item) error {
	for i := range it.plan.virtuals {
		p := &it.plan.virtuals[i]
		v := u.s.virtuals[p.key]
		switch {
		case v == nil:
			if err := u.b.kernel.addVirtual(p.key, p.virtual); err != nil {
				return err
			}
			v = &virtualState{virtual: p.virtual, reals: make(map[netip.AddrPort]uint16, len(p.pool))}
			u.s.virtuals[p.key] = v
		case v.virtual != p.virtual:
			if err := u.b.kernel.setVirtual(p.key, p.virtual); err != nil {
				return err
			}
			v.virtual = p.virtual
		}
		v.owner, v.proto = it.key, p.proto
		if !slices.Contains(it.state.virtuals, p.key) {
			it.state.virtuals = append(it.state.virtuals, p.key)
		}
		if err := u.upsertReals(it, p, v); err != nil {
			return err
		}
	}
	return nil
}

// upsertReals brings the real servers of a virtual server into agreement with its plan. It
// adds before it removes, and skips real servers that the kernel refuses.
func (u *update) upsertReals(it *item, p *plannedVirtual, v *virtualState) error {
	before := len(it.refused)
	for i, ep := range p.pool {
		if err := u.serve(p.key, v, ep.Addr, p.weight(i)); !it.refuses(err) {
			return err
		}
	}
	if len(v.reals) == len(p.pool) && len(it.refused) == before {
		return nil
	}
	keep := make(map[netip.AddrPort]struct{}, len(p.pool))
	for _, ep := range p.pool {
		keep[ep.Addr] = struct{}{}
	}
	for at := range v.reals {
		if _, ok := keep[at]; ok {
			continue
		}
		if err := u.quiesce(p.key, v, at); err != nil {
			return err
		}
	}
	return nil
}

// refuses reports whether the item can continue after err. It can if err is nil, or the
// kernel's refusal of an address, which refuses records.
func (it *item) refuses(err error) bool {
	if err == nil {
		return true
	}
	if !errors.Is(err, unix.EINVAL) {
		return false
	}
	it.refused = append(it.refused, err)
	return true
}

// dropVirtuals removes an item's virtual servers that are no longer in its plan, unless
// another Service port owns them now.
func (u *update) dropVirtuals(it *item) error {
	var keep []virtualKey
	for i := range it.plan.virtuals {
		keep = append(keep, it.plan.virtuals[i].key)
	}
	for _, k := range missing(it.state.virtuals, keep) {
		if v := u.s.virtuals[k]; v != nil && v.owner == it.key {
			if err := u.retire(k, v); err != nil {
				return err
			}
		}
		it.state.virtuals = slices.DeleteFunc(it.state.virtuals, func(x virtualKey) bool { return x == k })
	}
	return nil
}

// deleteVirtual deletes a virtual server, and releases the objects that it kept while it
// drained.
func (u *update) deleteVirtual(k virtualKey) error {
	if err := u.b.kernel.delVirtual(k); err != nil {
		return err
	}
	delete(u.s.virtuals, k)
	delete(u.s.drainingReals, k)
	delete(u.s.marks, k.mark)
	return u.release(k)
}
