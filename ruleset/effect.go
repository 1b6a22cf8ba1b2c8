package ruleset

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/tracker"
)

// effect is an index by address of what a backend has acknowledged. Its maps are built on first use and updated with
// each acknowledgement.
type effect struct {
	// frontends maps each frontend to the ID of the Service that is acknowledged with it.
	frontends map[l4Key]uint32
	// endpoints maps each endpoint to the ID of a Service with it. shared maps it to
	// the IDs of further such Services.
	endpoints map[l4Key]uint32
	shared    map[l4Key][]uint32
}

// Port returns the acknowledged version of a Service port, or nil. It costs a look-up among the Service's ports.
func (c *Cursor) Port(k tracker.Key) *Port {
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	return c.acked(e.find(k))
}

// Lookup returns the acknowledged Service at an address, port and protocol, and its frontend, like [Snapshot.Lookup].
// The first call builds an index of all frontends, some 50 bytes each, which each acknowledgement updates.
func (c *Cursor) Lookup(to netip.AddrPort, p v1.Protocol) (*Port, *Frontend) {
	if !to.IsValid() {
		return nil, nil
	}
	at := l4KeyAt(canonical(to.Addr()), to.Port(), p)
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	if c.detached {
		return nil, nil
	}
	x := c.index()
	id, ok := x.frontends[at]
	if !ok {
		return nil, nil
	}
	s := c.states[id].acked
	for i := range s.Frontends {
		if l4KeyOf(s, &s.Frontends[i]) == at {
			return s, &s.Frontends[i]
		}
	}
	return nil, nil
}

func (c *Cursor) index() *effect {
	x := &c.effect
	if x.frontends == nil {
		x.frontends = make(map[l4Key]uint32, len(c.states))
		for id := range c.states {
			x.setFrontends(uint32(id), nil, c.states[id].acked)
		}
	}
	return x
}

// holder returns the ID last acknowledged with a frontend, or 0.
func (x *effect) holder(at l4Key) uint32 {
	return x.frontends[at]
}

// LookupEndpoint returns the acknowledged Services that have an endpoint at an address, port and protocol, whatever
// its conditions, sorted by key, or nil. The first call builds an index of all endpoints, some 50 bytes each.
func (c *Cursor) LookupEndpoint(at netip.AddrPort, p v1.Protocol) []*Port {
	if !at.IsValid() {
		return nil
	}
	k := l4KeyAt(canonical(at.Addr()), at.Port(), p)
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	if c.detached {
		return nil
	}
	x := &c.effect
	if x.endpoints == nil {
		x.endpoints, x.shared = make(map[l4Key]uint32, c.engine.endpoints), map[l4Key][]uint32{}
		for id := range c.states {
			x.setEndpoints(uint32(id), nil, c.states[id].acked)
		}
	}
	id, ok := x.endpoints[k]
	if !ok {
		return nil
	}
	more := x.shared[k]
	out := append(make([]*Port, 0, 1+len(more)), c.states[id].acked)
	for _, id := range more {
		out = append(out, c.states[id].acked)
	}
	slices.SortFunc(out, func(a, b *Port) int { return a.Key.Compare(b.Key) })
	return out
}

func (c *Cursor) acked(id uint32) *Port {
	if int(id) < len(c.states) {
		return c.states[id].acked
	}
	return nil
}

// set records that the backend acknowledged now for an ID in place of old.
func (x *effect) set(id uint32, old, now *Port) {
	if x.frontends != nil {
		x.setFrontends(id, old, now)
	}
	if x.endpoints != nil {
		x.setEndpoints(id, old, now)
	}
}

// setFrontends may be called for the Services that exchange frontends in any order.
func (x *effect) setFrontends(id uint32, old, now *Port) {
	for i := 0; old != nil && i < len(old.Frontends); i++ {
		if at := l4KeyOf(old, &old.Frontends[i]); x.frontends[at] == id {
			delete(x.frontends, at)
		}
	}
	for i := 0; now != nil && i < len(now.Frontends); i++ {
		x.frontends[l4KeyOf(now, &now.Frontends[i])] = id
	}
}

func (x *effect) setEndpoints(id uint32, old, now *Port) {
	var before, after []*tracker.Endpoint
	var proto v1.Protocol
	if old != nil {
		before, proto = old.Endpoints, old.Key.Protocol
	}
	if now != nil {
		after, proto = now.Endpoints, now.Key.Protocol
	}
	at := func(ep *tracker.Endpoint) l4Key {
		return l4KeyAt(canonical(ep.Addr.Addr()), ep.Addr.Port(), proto)
	}
	before, after = listdiff.Trim(before, after)
	had, has := findEndpoints(before), findEndpoints(after)
	for _, ep := range before {
		if !has.has(ep.Addr) {
			x.removeEndpoint(at(ep), id)
		}
	}
	for _, ep := range after {
		if !had.has(ep.Addr) {
			x.addEndpoint(at(ep), id)
		}
	}
}

func (x *effect) addEndpoint(at l4Key, id uint32) {
	first, ok := x.endpoints[at]
	switch {
	case !ok:
		x.endpoints[at] = id
	case first != id && !slices.Contains(x.shared[at], id):
		x.shared[at] = append(x.shared[at], id)
	}
}

func (x *effect) removeEndpoint(at l4Key, id uint32) {
	more := x.shared[at]
	if first, ok := x.endpoints[at]; ok && first == id {
		if len(more) == 0 {
			delete(x.endpoints, at)
			return
		}
		x.endpoints[at] = more[0]
		more = slices.Delete(more, 0, 1)
	} else if i := slices.Index(more, id); i >= 0 {
		more = slices.Delete(more, i, i+1)
	}
	if len(more) == 0 {
		delete(x.shared, at)
	} else {
		x.shared[at] = more
	}
}
