package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"syscall"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// upsertInternal adds and changes an item's virtual server of internal traffic.
func (u *update) upsertInternal(it *item) error {
	return u.upsert(it, func(k virtualKey) bool { return k.mark != 0 })
}

// upsertVirtuals adds and changes an item's other virtual servers. Internal traffic has its
// own by now if it needs one.
func (u *update) upsertVirtuals(it *item) error {
	return u.upsert(it, func(k virtualKey) bool { return k.mark == 0 })
}

// upsert adds and changes an item's virtual servers of a kind. It adds real servers and
// removes none.
func (u *update) upsert(it *item, kind func(virtualKey) bool) error {
	for i := range it.plan.virtuals {
		p := &it.plan.virtuals[i]
		if !kind(p.key) {
			continue
		}
		u.s.servers.Claim(it.owner, p.key)
		v := u.s.virtuals[p.key]
		switch {
		case v == nil:
			if err := u.b.kernel.addVirtual(p.key, p.virtual); err != nil {
				return err
			}
			v = &virtualState{virtual: p.virtual, reals: make(map[netip.AddrPort]uint16, len(p.pool))}
			u.s.virtuals[p.key] = v
			u.s.servers.Installed(p.key)
		case v.virtual != p.virtual:
			if err := u.b.kernel.setVirtual(p.key, p.virtual); err != nil {
				v.unsure()
				return err
			}
			v.virtual = p.virtual
		}
		v.service, v.proto = it.key, p.proto
		if err := u.upsertReals(it, p, v); err != nil {
			return err
		}
		v.filled = it.key
	}
	return nil
}

// upsertReals adds and changes the real servers that a virtual server needs. It skips those
// that the kernel refuses.
func (u *update) upsertReals(it *item, p *plannedVirtual, v *virtualState) error {
	if err := u.reread(p.key, v); err != nil {
		return err
	}
	for i, ep := range p.pool {
		if err := u.serve(p.key, v, ep.Addr, p.weight(i)); !it.refuses(err) {
			return err
		}
	}
	return nil
}

// quiesceReals begins to drain the real servers that an item's virtual servers no longer
// need.
func (u *update) quiesceReals(it *item) error {
	return u.quiesceOf(it, func(virtualKey) bool { return true })
}

// quiesceInternal does that for the virtual server of internal traffic. An earlier process may
// have given its packet mark to another Service port, and the next step lets elements lead
// to it.
func (u *update) quiesceInternal(it *item) error {
	return u.quiesceOf(it, func(k virtualKey) bool { return k.mark != 0 })
}

func (u *update) quiesceOf(it *item, kind func(virtualKey) bool) error {
	for i := range it.plan.virtuals {
		p := &it.plan.virtuals[i]
		v := u.s.virtuals[p.key]
		if !kind(p.key) || len(v.reals) == len(p.pool) && len(it.refused) == 0 {
			continue
		}
		if u.held[p.key] {
			// The retry of both Service ports drains them.
			return errors.New("a frontend that moved to a Service port that failed still needs the real servers")
		}
		keep := make(map[netip.AddrPort]bool, len(p.pool))
		for _, ep := range p.pool {
			keep[ep.Addr] = true
		}
		if err := u.quiesceGone(p.key, v, keep); err != nil {
			return err
		}
	}
	return nil
}

// quiesceFailed begins to drain the real servers of failed items whose endpoints are gone. It leaves
// those of a frontend that another Service port had before, and those of an item that has endpoints
// of which none serves yet: the virtual server would refuse connections.
func (u *update) quiesceFailed(context.Context) error {
	for _, it := range u.items {
		if u.failed[it.key] == nil {
			continue
		}
		known := map[netip.AddrPort]bool{}
		if it.service != nil {
			for _, ep := range it.service.Endpoints {
				known[ep.Addr] = true
			}
		}
		for k := range u.s.servers.Items(it.owner) {
			v := u.s.virtuals[k]
			if v == nil || u.held[k] {
				continue
			}
			mine, unknown, serves := v.filled == it.key, v.filled == tracker.Key{}, v.serves(known)
			if !mine && !(unknown && serves) || !serves && len(known) != 0 {
				continue
			}
			if err := u.quiesceGone(k, v, known); errors.Is(err, ruleset.ErrNeedFull) {
				return err
			} else if err != nil {
				u.failed[it.key] = errors.Join(u.failed[it.key], err)
			}
		}
	}
	return nil
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

// quiesceGone begins to drain the real servers that are not known.
func (u *update) quiesceGone(k virtualKey, v *virtualState, known map[netip.AddrPort]bool) error {
	if err := u.reread(k, v); err != nil {
		return err
	}
	for at := range v.reals {
		if known[at] {
			continue
		}
		if err := u.quiesce(k, v, at); err != nil {
			return err
		}
	}
	return nil
}

// unsure records that a write failed, which may have taken effect.
func (v *virtualState) unsure() { v.virtual, v.unread = virtual{}, true }

// reread reads the real servers of a virtual server after a write that failed.
func (u *update) reread(k virtualKey, v *virtualState) error {
	if !v.unread {
		return nil
	}
	reals := map[netip.AddrPort]uint16{}
	err := u.b.kernel.reals(k, func(r real) {
		reals[r.at] = r.weight
		if r.weight == 0 {
			u.s.startDrain(k, r.at, u.now)
		}
	})
	if err != nil {
		return err
	}
	for at := range v.reals {
		if _, ok := reals[at]; !ok {
			u.s.endDrain(k, at)
		}
	}
	v.reals, v.unread = reals, false
	return nil
}

// refuses reports whether the item can continue after err. It can if err is nil, or the
// kernel's refusal of an address, which refuses records.
func (it *item) refuses(err error) bool {
	if err == nil {
		return true
	}
	if !errors.Is(err, syscall.EINVAL) {
		return false
	}
	it.note(err)
	return true
}

// note records the kernel's refusal of a part of an item.
func (it *item) note(err error) {
	const most = 10 // a Service may have thousands of endpoints
	if len(it.refused) < most {
		it.refused = append(it.refused, err)
	}
}

// dropVirtuals removes an item's virtual servers that are no longer in its plan, unless
// another Service port needs them now.
func (u *update) dropVirtuals(it *item) error {
	for k := range u.s.servers.Items(it.owner) {
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
	if u.b.config.Marks.contains(k.mark) {
		u.s.marks.Unreserve(u.b.config.Marks.number(k.mark))
	}
	u.release(k)
	return nil
}
