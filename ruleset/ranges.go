package ruleset

import (
	"cmp"
	"net/netip"
	"slices"
)

// PortRanges states which ranges of ports a data plane serves: see [Frontend].LastPort. It
// serves those of lower values, too.
type PortRanges uint8

const (
	// PortRangesNone: frontends have single ports.
	PortRangesNone PortRanges = iota
	// PortRangesKept: endpoints see the port that the client used.
	PortRangesKept
	// PortRangesShifted: endpoints may see ports that are higher or lower by a constant.
	PortRangesShifted
)

// String returns "none", "kept" or "shifted".
func (r PortRanges) String() string {
	switch r {
	case PortRangesNone:
		return "none"
	case PortRangesKept:
		return "kept"
	case PortRangesShifted:
		return "shifted"
	}
	return "unknown"
}

// ranges returns what a data plane needs in order to serve f.
func (f *Frontend) ranges() PortRanges {
	switch {
	case !f.IsRange():
		return PortRangesNone
	case f.Shifted():
		return PortRangesShifted
	}
	return PortRangesKept
}

// ranges returns what a data plane needs in order to serve all frontends of s.
func (s *Port) ranges() PortRanges {
	var f Frontend
	f.at(KindClusterIP, netip.Addr{}, s.Spec)
	return f.ranges()
}

// withoutRanges returns s without the frontends that have several ports, or nil if it has none.
func (s *Port) withoutRanges() *Port {
	if !s.hasRange() {
		return nil
	}
	c := *s
	c.Frontends = slices.DeleteFunc(slices.Clone(s.Frontends), func(f Frontend) bool { return f.IsRange() })
	return &c
}

// isRange reports whether the key is that of a range.
func (k l4Key) isRange() bool { return k.last != 0 }

// anyPort returns the address and protocol of k.
func (k l4Key) anyPort() l4Key {
	k.port, k.last = 0, 0
	return k
}

// portIndex finds frontends by address, port and protocol. The zero value is empty.
type portIndex struct {
	single map[l4Key]found
	// ranges holds the ranges of each address and protocol, in the order of their ports.
	ranges map[l4Key][]found
}

// add adds a frontend. sort must be called after the last one.
func (x *portIndex) add(s *Port, f *Frontend) {
	at := l4KeyOf(s, f)
	if at.isRange() {
		if x.ranges == nil {
			x.ranges = map[l4Key][]found{}
		}
		x.ranges[at.anyPort()] = append(x.ranges[at.anyPort()], found{s, f})
		return
	}
	if x.single == nil {
		x.single = map[l4Key]found{}
	}
	x.single[at] = found{s, f}
}

func (x *portIndex) sort() {
	for _, all := range x.ranges {
		slices.SortFunc(all, func(a, b found) int { return cmp.Compare(a.frontend.Port, b.frontend.Port) })
	}
}

// inRange returns the range at a key with a single port.
func (x *portIndex) inRange(at l4Key) found {
	if len(x.ranges) == 0 {
		return found{}
	}
	all := x.ranges[at.anyPort()]
	i, ok := slices.BinarySearchFunc(all, at.port, func(a found, port uint16) int { return cmp.Compare(a.frontend.Port, port) })
	if !ok {
		i--
	}
	if i < 0 || !all[i].frontend.Matches(at.port) {
		return found{}
	}
	return all[i]
}

// rangeSet holds the contenders for ranges at one address and protocol.
type rangeSet struct {
	// contenders holds each range that a Service asks for, with the kind of the address.
	contenders map[rangeOf]Kind
	// owned holds the ranges that their Services own, in the order of their ports.
	owned []ranked
}

// ranked is a range that a contender owns.
type ranked struct {
	contender
	at l4Key
}

// find returns the index of the first owned range that ends at or after a port.
func (r *rangeSet) find(port uint16) int {
	i, _ := slices.BinarySearchFunc(r.owned, port, func(o ranked, port uint16) int { return cmp.Compare(o.at.last, port) })
	return i
}

// overlapping returns the first owned range with a port of at, which may be a single port.
func (r *rangeSet) overlapping(at l4Key) (ranked, bool) {
	if r == nil {
		return ranked{}, false
	}
	if i := r.find(at.port); i < len(r.owned) && r.owned[i].at.port <= max(at.port, at.last) {
		return r.owned[i], true
	}
	return ranked{}, false
}

// addRange adds a contender for a range. The next assignRanges decides who owns it.
func (c *ownership) addRange(at l4Key, n contender) {
	r := c.ranges[at.anyPort()]
	if r == nil {
		r = &rangeSet{contenders: map[rangeOf]Kind{}}
		c.ranges[at.anyPort()] = r
	}
	r.contenders[rangeOf{at, n.id}] = n.kind
	c.disputed[at.anyPort()] = true
}

// removeRange removes a contender for a range.
func (c *ownership) removeRange(at l4Key, id uint32) {
	delete(c.ranges[at.anyPort()].contenders, rangeOf{at, id})
	c.disputed[at.anyPort()] = true
}

// assignRanges decides who owns the ranges at the addresses whose contenders changed, and calls
// changed with the IDs of the Services that may have lost or gained a frontend. It costs
// O(n log n) for each such address with n contenders, however many of them changed.
func (c *ownership) assignRanges(changed func(id uint32)) {
	for at := range c.disputed {
		r := c.ranges[at]
		before := r.owned
		for _, o := range before {
			delete(c.owner, o.at)
		}
		order := make([]ranked, 0, len(r.contenders))
		for k, kind := range r.contenders {
			order = append(order, ranked{contender{k.id, kind}, k.at})
		}
		slices.SortFunc(order, func(a, b ranked) int {
			return cmp.Or(c.compare(a.contender, b.contender), cmp.Compare(a.at.port, b.at.port))
		})
		r.owned = nil
		for _, o := range order {
			if _, taken := r.overlapping(o.at); !taken {
				r.owned = slices.Insert(r.owned, r.find(o.at.port), o)
				c.owner[o.at] = o.contender
			}
		}
		if !slices.Equal(before, r.owned) {
			had := make(map[ranked]bool, len(before))
			for _, o := range before {
				had[o] = true
			}
			for _, o := range r.owned {
				if !had[o] {
					changed(o.id)
				}
				delete(had, o)
			}
			for o := range had {
				changed(o.id)
			}
			// Single ports at external IPs yield to some ranges.
			for id := range c.externals[at] {
				changed(id)
			}
		}
		if len(r.contenders) == 0 {
			delete(c.ranges, at)
		}
	}
	clear(c.disputed)
	if len(c.ranges) == 0 {
		c.ranges, c.externals, c.disputed = nil, nil, nil
	}
}

// winner returns the Service that owns the frontend of a loser, and reports whether the loser
// owns it itself.
func (c *ownership) winner(at l4Key, kind Kind, id uint32) (winner uint32, owns bool) {
	switch {
	case at.isRange():
		r, _ := c.ranges[at.anyPort()].overlapping(at)
		return r.id, r.id == id && r.at == at
	case c.owner[at].id != id:
		return c.owner[at].id, false
	}
	if len(c.ranges) != 0 && kind == KindExternalIP {
		if r, ok := c.ranges[at.anyPort()].overlapping(at); ok && r.kind.rank() < kind.rank() {
			return r.id, false
		}
	}
	return id, true
}

// noteExternal records that a Service has a single port at an external IP.
func (c *ownership) noteExternal(at l4Key, id uint32) {
	ids := c.externals[at.anyPort()]
	if ids == nil {
		ids = map[uint32]struct{}{}
		c.externals[at.anyPort()] = ids
	}
	ids[id] = struct{}{}
}

// forgetExternal reverts noteExternal.
func (c *ownership) forgetExternal(at l4Key, id uint32) {
	ids := c.externals[at.anyPort()]
	if delete(ids, id); len(ids) == 0 {
		delete(c.externals, at.anyPort())
	}
}
