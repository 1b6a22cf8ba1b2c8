package ipvs

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"syscall"
)

func (k virtualKey) internal() bool { return k.mark != 0 }

func (k virtualKey) external() bool { return k.mark == 0 }

// upsert returns a function that adds and changes an item's virtual servers of a kind.
func (u *update) upsert(kind func(virtualKey) bool) func(*item) error {
	return func(it *item) error {
		for i := range it.plan.virtuals {
			p := &it.plan.virtuals[i]
			if !kind(p.key) {
				continue
			}
			if err := it.fail(u.upsertVirtual(it, p)); err != nil {
				return err
			}
		}
		return nil
	}
}

// upsertVirtual adds or changes a virtual server. It adds real servers and removes none. It skips
// those that the kernel refuses.
func (u *update) upsertVirtual(it *item, p *plannedVirtual) error {
	v := u.s.virtuals[p.key]
	if v == nil && p.rejected {
		return nil
	}
	u.s.servers.Claim(it.owner, p.key)
	if v == nil {
		if err := u.b.kernel.addVirtual(p.key, p.virtual); err != nil {
			return err
		}
		v = &virtualState{virtual: p.virtual, reals: make(map[netip.AddrPort]uint16, len(p.pool))}
		u.s.virtuals[p.key] = v
		u.s.servers.Installed(p.key)
	}
	v.service, v.proto, v.rejected = it.key, p.proto, p.rejected
	if v.virtual != p.virtual {
		if err := u.b.kernel.setVirtual(p.key, p.virtual); err != nil {
			v.unsure()
			return err
		}
		v.virtual = p.virtual
	}
	if err := u.reread(p.key, v); err != nil {
		return err
	}
	if err := u.forward(p.key, v, p.forwarding); err != nil {
		return err
	}
	for i, ep := range p.pool {
		err := u.serve(p.key, v, ep.Addr, p.weight(i))
		switch {
		case errors.Is(err, syscall.EINVAL):
			it.note(err)
		case err != nil:
			return err
		}
	}
	return nil
}

// forward sets how packets of new connections reach the real servers. Open connections keep theirs.
func (u *update) forward(k virtualKey, v *virtualState, how Forwarding) error {
	if v.forwarding == how {
		return nil
	}
	for _, at := range slices.SortedFunc(maps.Keys(v.reals), netip.AddrPort.Compare) {
		if err := u.b.kernel.setReal(k, real{at: at, weight: v.reals[at], forwarding: how}); err != nil {
			v.unsure()
			return err
		}
	}
	v.forwarding = how
	return nil
}

// quiesceReals returns a function that begins to drain the real servers that an item's virtual servers of a kind no
// longer need. If the item failed, it drains only real servers whose endpoints are gone, and none while no other
// serves.
func (u *update) quiesceReals(kind func(virtualKey) bool) func(*item) error {
	return func(it *item) error {
		for i := range it.plan.virtuals {
			p := &it.plan.virtuals[i]
			v := u.s.virtuals[p.key]
			if v == nil || !kind(p.key) || len(v.reals) == len(p.pool) && len(it.errs) == 0 {
				continue
			}
			endpoints := p.pool
			if it.failed {
				endpoints = it.service.Endpoints
			}
			keep := make(map[netip.AddrPort]bool, len(endpoints))
			for _, ep := range endpoints {
				keep[ep.Addr] = true
			}
			if err := u.reread(p.key, v); err != nil {
				return err
			}
			if it.failed && len(keep) != 0 && !v.serves(keep) {
				continue
			}
			var gone []netip.AddrPort
			for at := range v.reals {
				if !keep[at] {
					gone = append(gone, at)
				}
			}
			slices.SortFunc(gone, netip.AddrPort.Compare)
			for _, at := range gone {
				if err := u.quiesce(p.key, v, at); err != nil {
					return err
				}
			}
		}
		return nil
	}
}

// serves reports whether one of the real servers gets new connections.
func (v *virtualState) serves(servers map[netip.AddrPort]bool) bool {
	for at, weight := range v.reals {
		if weight != 0 && servers[at] {
			return true
		}
	}
	return false
}

// unsure records that a write failed, which may have taken effect.
func (v *virtualState) unsure() { v.virtual, v.unread = virtual{}, true }

// reread reads the real servers of a virtual server after a write that failed.
func (u *update) reread(k virtualKey, v *virtualState) error {
	if !v.unread {
		return nil
	}
	now := virtualState{reals: map[netip.AddrPort]uint16{}}
	err := u.b.kernel.reals(k, func(r real) {
		now.found(r)
		if r.weight == 0 {
			u.s.startDrain(k, r.at, u.now)
		}
	})
	if err != nil {
		return err
	}
	for at := range v.reals {
		if _, ok := now.reals[at]; !ok {
			u.s.endDrain(k, at)
		}
	}
	v.reals, v.forwarding, v.unread = now.reals, now.forwarding, false
	return nil
}

// dropVirtuals removes an item's virtual servers that are no longer in its plan, unless another Service port needs
// them now, and those of rejected frontends without anything to drain.
func (u *update) dropVirtuals(it *item) error {
	for _, k := range slices.SortedFunc(u.s.servers.Items(it.owner), virtualKey.compare) {
		if v := u.s.virtuals[k]; v != nil && v.rejected && (len(v.reals) == 0 || !u.b.config.drainRule(v.proto).counts) {
			if err := u.deleteVirtual(k); err != nil {
				return err
			}
		}
		planned := slices.ContainsFunc(it.plan.virtuals, func(p plannedVirtual) bool { return p.key == k })
		if planned || !u.s.servers.Release(it.owner, k) {
			continue
		}
		if err := u.retire(k); err != nil {
			u.s.servers.Claim(it.owner, k)
			return err
		}
	}
	return nil
}

// deleteVirtual deletes a virtual server, and releases the objects that it kept while it
// drained.
func (u *update) deleteVirtual(k virtualKey) error {
	if err := u.b.kernel.delVirtual(k); err != nil {
		if v := u.s.virtuals[k]; v != nil {
			v.unsure()
		}
		return err
	}
	delete(u.s.virtuals, k)
	delete(u.s.drainingReals, k)
	u.s.servers.Removed(k)
	if namesServer(k.mark) {
		u.s.marks.Unreserve(k.mark - markDrop)
	}
	u.release(k)
	return nil
}
