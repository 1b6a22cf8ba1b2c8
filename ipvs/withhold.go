package ipvs

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// A Service port does without the elements for which a set has no room, or that could not be added, until the next
// delta with the Service port:
//
//   - Without an element of setLoopBack, an endpoint cannot reach itself through the Service.
//   - Without a source range, its clients are dropped.
//   - Without an element of setShortCircuit, internal traffic is treated like external traffic.
//   - Without an element of setNoLocal, connections are refused and not dropped.
//   - Without an element of setNoEndpoints, the node itself refuses connections, unless a process listens there.
//   - Without any other element, a new frontend that needs it is left out. A frontend that is in the kernel stays,
//     and its endpoints are followed. If it is to be restricted to source ranges and is not yet, it gets no further
//     endpoint.

// lack records an element that could not be added. The item fails unless the set has no room.
func (it *item) lack(e entry, err error) {
	it.note(err)
	if !errors.Is(err, errSetFull) {
		it.failed = true
		if isSource(e) {
			e = restriction(e)
		}
	}
	switch {
	case e.set == setLoopBack || isSource(e) || isInternal(e) || isDrop(e):
	default:
		it.lacks = append(it.lacks, e)
	}
}

// of reports whether a frontend needs an element of its address, or of its address and port.
func (e entry) of(at netip.AddrPort) bool {
	switch sets[e.set].kind {
	case hashIP:
		return e.addr == at.Addr()
	case bitmapPort:
		return e.port == at.Port()
	}
	return e.addr == at.Addr() && e.port == at.Port()
}

// withhold changes the plan of an item that lacks elements, as the comment above says.
func (u *update) withhold(it *item) error {
	if len(it.lacks) == 0 {
		return nil
	}
	p := plan{mark: it.plan.mark}
	var out []netip.AddrPort   // the frontends that are left out
	var stays []netip.AddrPort // the frontends that stay as they are
	for _, v := range it.plan.virtuals {
		at := v.key.at
		lacking := func(e entry) bool { return at.IsValid() && e.of(at) }
		have := u.s.virtuals[v.key]
		switch {
		case !slices.ContainsFunc(it.lacks, lacking):
		case have == nil || !u.s.recognized(u.b.config, v.key, have.virtual):
			out = append(out, at)
			continue
		default:
			stays = append(stays, at)
			if slices.ContainsFunc(it.lacks, func(e entry) bool { return e.set == setLoadBalancerFW && e.of(at) }) {
				if err := u.reread(v.key, have); err != nil {
					return err
				}
				v.keepReals(have)
			}
		}
		p.virtuals = append(p.virtuals, v)
	}
	// An address stays while a frontend has it.
	used := func(a netip.Addr) bool {
		return slices.ContainsFunc(p.virtuals, func(v plannedVirtual) bool { return v.key.at.Addr() == a })
	}
	leaves := func(e entry) bool {
		switch {
		case e.set == setLoopBack || sets[e.set].kind == bitmapPort:
			return false
		case sets[e.set].kind == hashIP:
			return !used(e.addr)
		}
		return slices.ContainsFunc(out, e.of)
	}
	p.entries = slices.DeleteFunc(it.plan.entries, leaves)
	p.internal = slices.DeleteFunc(it.plan.internal, leaves)
	p.bind = slices.DeleteFunc(it.plan.bind, func(a netip.Addr) bool { return !used(a) })
	if len(p.internal) == 0 {
		p.virtuals = slices.DeleteFunc(p.virtuals, func(v plannedVirtual) bool { return v.key.mark != 0 })
	}
	it.plan = p
	u.keepElements(it, stays)
	return nil
}

func (u *update) keepElements(it *item, frontends []netip.AddrPort) {
	p := &it.plan
	for e := range u.s.entries.Items(it.owner) {
		if !isDrop(e) && !isInternal(e) && e.set != setLoopBack && slices.ContainsFunc(frontends, e.of) && !slices.Contains(p.entries, e) {
			p.entries = append(p.entries, e)
		}
	}
	for _, v := range p.virtuals {
		if !slices.Contains(frontends, v.key.at) {
			continue
		}
		// The element by which the virtual server is recognized may be another Service port's.
		if e, ok := u.s.identity(v.key); ok && !slices.Contains(p.entries, e) {
			u.s.entries.Claim(it.owner, e)
			p.entries = append(p.entries, e)
		}
	}
}

// keepReals limits the pool to the real servers that the virtual server has.
func (p *plannedVirtual) keepReals(have *virtualState) {
	var pool []*tracker.Endpoint
	var weights []int
	for i, ep := range p.pool {
		if have.reals[ep.Addr] == 0 {
			continue
		}
		pool = append(pool, ep)
		if p.weights != nil {
			weights = append(weights, p.weights[i])
		}
	}
	p.pool, p.weights = pool, weights
}
