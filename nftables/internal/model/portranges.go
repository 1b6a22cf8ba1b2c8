package model

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// portRange is a frontend with a range of ports: its address and its number. A Service port has
// one range at an address. The range keeps its number if its ends change.
type portRange struct {
	addr   netip.Addr
	number uint32
}

// portRanges is the department of ranges of ports: of their numbers, and of the sets and chains that
// only they need.
type portRanges struct {
	*common
	numbers numbers
	// count counts the frontends with ranges.
	count int
	// used is set if packets meet the sets and chains. rewritten is for Rewritten.
	used      cell[bool]
	rewritten bool
	// kept holds the sets of ranges of concatenations that stay in place when a table is rewritten:
	// new elements of a new set would be missing for a moment after the transaction. keptElements
	// holds the elements that no Service has taken over, with their comments, and keptNumbers the
	// numbers of such ranges, by key.
	kept         [layout.SetCount]bool
	keptElements book[layout.Element, string]
	keptNumbers  book[layout.Octets, uint32]
}

// KeepConcat makes a set of ranges of concatenations start with the elements that it has in the
// kernel, which have comments. It reports false if this package cannot have written them.
func (r *portRanges) KeepConcat(s layout.Set, elements map[layout.Element]string) bool {
	if r.Wanted(layout.ServiceRanges) == 0 {
		return false
	}
	numbers, taken := map[layout.Octets]uint32{}, map[uint32]bool{}
	for e := range elements {
		if s != layout.ServiceRanges {
			break
		}
		n := e.RangeNumber()
		if n == 0 || n > layout.MaxRange || taken[n] {
			return false
		}
		numbers[e.Key], taken[n] = n, true
	}
	r.kept[s] = true
	r.starts(s, len(elements))
	for e, comment := range elements {
		r.keptElements.set(&r.draft, e, comment)
	}
	if s == layout.ServiceRanges {
		r.keptNumbers.now, r.numbers.kept = numbers, taken
	}
	return true
}

// keptNumber takes over the number that a range had in the table that is rewritten, or returns 0.
func (r *portRanges) keptNumber(key layout.Octets) uint32 {
	n := r.keptNumbers.now[key]
	if n != 0 {
		r.keptNumbers.delete(&r.draft, key)
	}
	return n
}

// takeKept takes over an element of the table that is rewritten, and reports whether there is
// one.
func (r *portRanges) takeKept(e *layout.Element, comment string) bool {
	if len(r.keptElements.now) == 0 {
		return false
	}
	had, ok := r.keptElements.now[*e]
	if !ok || had != layout.Printable(comment) {
		return false
	}
	r.keptElements.delete(&r.draft, *e)
	return true
}

// releaseKept deletes the kept elements that no Service has taken over.
func (r *portRanges) releaseKept(tx *Tx) {
	for e := range r.keptElements.now {
		tx.remove(r.Family, &e)
	}
	for _, n := range r.keptNumbers.now {
		r.numbers.give(n)
	}
	r.kept, r.keptElements.now, r.keptNumbers.now = [layout.SetCount]bool{}, nil, nil
}

// rangeNumber returns the number of the Service's range at an address, or 0.
func (s *service) rangeNumber(a netip.Addr) uint32 {
	for _, r := range s.ranges {
		if r.addr == a {
			return r.number
		}
	}
	return 0
}

// wantedRanges holds the ranges of ports that a Service wants, and the result of [layout.ShiftedBy] if it has
// a range that is shifted.
type wantedRanges struct {
	list     []wantedRange
	shifted  bool
	from, to layout.Octets
}

// wantedRange is a frontend with a range of ports. element is the place of its element of service-ranges,
// which those with its dispatch keys follow.
type wantedRange struct {
	addr    netip.Addr
	element int
}

// addRange adds the element of a frontend with a range of ports. It returns the element of the frontend's
// dispatch key, and the set of those for internal traffic.
func (w *wanted) addRange(f *ruleset.Frontend, protocol uint8) (e layout.Element, internal layout.Set) {
	r := &w.ranges
	if f.Shifted() && !r.shifted && w.err == nil {
		from, to, ok := layout.ShiftedBy(f.Port, f.LastPort, f.TargetPort)
		if !ok {
			w.err = fmt.Errorf("%w: ports %s to %d and higher ones", ErrShift, f.Ports(), f.TargetPort)
		}
		r.from, r.to, r.shifted = layout.PortData(from), layout.PortData(to), ok
	}
	r.list = append(r.list, wantedRange{f.Addr, len(w.elements)})
	w.elements = append(w.elements, layout.RangeElement(f.Addr, protocol, f.Port, f.LastPort, 0))
	return layout.Element{Set: layout.RangeKeys}, layout.InternalRangeKeys
}

// addRangeSources adds the allowed sources of a frontend with a range of ports.
func (w *wanted) addRangeSources(f *ruleset.Frontend, protocol uint8) {
	for _, s := range merged(f.Sources) {
		key := layout.SourceKey(s.First, f.Addr, protocol, f.Port)
		w.elements = append(w.elements, layout.Element{Set: layout.RangeSources, Key: key, Data: ip(s.Last).Port(f.LastPort)})
	}
}

// allocate takes a number for each range of ports of w. now replaces old. If w belongs to the first Service
// that has a range, allocate creates the sets and chains for ranges.
func (r *portRanges) allocate(old, now *service, w *wanted, c *chains, tx *Tx) error {
	if len(w.ranges.list) == 0 {
		return nil
	}
	r.use(c, tx)
	for _, want := range w.ranges.list {
		n := old.rangeNumber(want.addr)
		if n == 0 {
			n = r.keptNumber(w.elements[want.element].Key)
		}
		if n == 0 {
			var ok bool
			if n, ok = r.numbers.take(&r.draft); !ok {
				return ErrTooManyPools
			}
		}
		now.ranges = append(now.ranges, portRange{want.addr, n})
	}
	return nil
}

// complete sets the numbers of ranges in the elements of w, and adds those by which the ports of a range are
// shifted in the pools of s.
func (r *portRanges) complete(w *wanted, s *service) {
	for _, want := range w.ranges.list {
		n := s.rangeNumber(want.addr)
		w.elements[want.element].SetRangeNumber(n)
		for i := want.element + 1; i < len(w.elements) && w.elements[i].Set.OfRangeKeys(); i++ {
			w.elements[i].Key = word(layout.RangeKey(n))
		}
	}
	for _, p := range s.pools {
		if p == nil || !w.ranges.shifted {
			continue
		}
		key := word(p.number)
		if p.sticky {
			key = word(p.number << layout.StickyShift)
		}
		w.elements = append(w.elements,
			layout.Element{Set: layout.ShiftFrom, Key: key, Data: w.ranges.from},
			layout.Element{Set: layout.ShiftTo, Key: key, Data: w.ranges.to})
	}
}

// free gives back the numbers of the ranges that a Service lost, and counts ranges.
func (r *portRanges) free(old, now *service) {
	r.count += len(now.ranges) - len(old.ranges)
	for _, lost := range old.ranges {
		if now.rangeNumber(lost.addr) == 0 {
			r.numbers.give(lost.number)
		}
	}
}

// use creates the sets and chains for ranges of ports, unless they exist, and makes packets meet
// them.
func (r *portRanges) use(c *chains, tx *Tx) {
	if r.used.now {
		return
	}
	if !c.hasChain(layout.ChainRanges) {
		for s := layout.FirstOfRanges; s <= layout.LastOfRanges; s++ {
			if !r.kept[s] {
				tx.Object(Object{Kind: NewSet, Family: r.Family, Set: s, Size: r.Size(s)})
			}
		}
		c.chain(layout.ChainRanges, Object{Kind: RangeChains}, tx)
	}
	r.used.set(&r.draft, true)
	tx.Object(Object{Kind: UseRanges, Family: r.Family})
	r.rewritten = true
}

// createAll adds an object of every kind that only ranges of ports have.
func (r *portRanges) createAll(c *chains, tx *Tx) {
	r.use(c, tx)
	for h := layout.HandleNotPods; h <= layout.HandleDrop; h++ {
		of := layout.Handler{Handling: h, Firewall: true, Range: true}
		if h < layout.HandleInternalOrDrop {
			of.Buckets = 1
		}
		c.handler(of, false, tx)
	}
}

// collect makes packets skip the chains for ranges of ports if no frontend has one. The sets and
// chains stay, without elements, until the next full delta.
func (r *portRanges) collect(tx *Tx) {
	if r.used.now && r.count == 0 {
		r.used.now, r.rewritten = false, true
		tx.Object(Object{Kind: UnuseRanges, Family: r.Family})
	}
}

// Rewrites returns the objects that replaced rules of chains of other objects.
func (r *portRanges) Rewrites() []Object {
	if !r.used.now {
		return nil
	}
	return []Object{{Kind: UseRanges, Family: r.Family}}
}

// Rewritten returns a function that reports whether the rules of a chain were replaced since the last call, or
// nil if none were.
func (r *portRanges) Rewritten() func(chain string) bool {
	if !r.rewritten {
		return nil
	}
	r.rewritten = false
	return layout.LeadsToRanges
}

// stickyForms are the forms in which a sticky handler has chains: for single ports, and for ranges of ports.
var stickyForms = [...]struct {
	ranges   bool
	handlers layout.Set
	shared   Kind
}{{false, layout.StickyHandlers, StickyChains}, {true, layout.RangeStickyHandlers, RangeStickyChains}}

// forms returns how many of stickyForms the Service's pools need.
func (s *service) forms() int {
	if len(s.ranges) != 0 {
		return 2
	}
	return 1
}

// formsOf returns how many of stickyForms a version of a Service wants.
func formsOf(s *ruleset.Port) int {
	if s.Spec.IsRange() && slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.IsRange() }) {
		return 2
	}
	return 1
}

// demandRanges adds the largest number of elements that only Services with ranges need.
func (w *wanted) demandRanges(need *[layout.SetCount]int) {
	need[layout.InternalRangeKeys] = need[layout.RangeKeys]
	if len(w.ranges.list) == 0 {
		return
	}
	if w.affinity != 0 {
		need[layout.RangeStickyHandlers] += len(targets)
	}
	need[layout.ShiftFrom] += len(targets)
	need[layout.ShiftTo] += len(targets)
}
