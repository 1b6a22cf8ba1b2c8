package model

import (
	"fmt"
	"maps"
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

// keptRanges holds the sets of ranges of concatenations that stay in place when a table is
// rewritten: new elements of a new set would be missing for a moment after the transaction.
type keptRanges struct {
	sets map[layout.Set]bool
	// elements holds the elements that no Service has taken over, with their comments.
	elements map[layout.Element]string
	// numbers holds the numbers of ranges that no Service has taken over, by key.
	numbers map[layout.Octets]uint32
}

// KeepConcat makes a set of ranges of concatenations start with the elements that it has in the
// kernel, which have comments. It reports false if this package cannot have written them.
func (t *Table) KeepConcat(s layout.Set, elements map[layout.Element]string) bool {
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
	if t.kept.sets == nil {
		t.kept = keptRanges{map[layout.Set]bool{}, map[layout.Element]string{}, map[layout.Octets]uint32{}}
	}
	t.kept.sets[s] = true
	t.count[s] = len(elements)
	maps.Copy(t.kept.elements, elements)
	if s == layout.ServiceRanges {
		t.kept.numbers, t.portRanges.kept = numbers, taken
	}
	return true
}

// keptNumber takes over the number that a frontend had in the table that is rewritten, or returns 0.
func (t *Table) keptNumber(s *ruleset.Port, f *ruleset.Frontend) uint32 {
	_, _, key := keyOf(s, f)
	n := t.kept.numbers[key]
	if n != 0 {
		delete(t.kept.numbers, key)
		t.undo.later(func() { t.kept.numbers[key] = n })
	}
	return n
}

// takeKept takes over an element of the table that is rewritten, and reports whether there is
// one.
func (t *Table) takeKept(e *layout.Element, comment string) bool {
	had, ok := t.kept.elements[*e]
	if !ok || had != layout.Printable(comment) {
		return false
	}
	taken := *e
	delete(t.kept.elements, taken)
	t.undo.later(func() { t.kept.elements[taken] = had })
	return true
}

// releaseKept deletes the kept elements that no Service has taken over.
func (t *Table) releaseKept(tx *Tx) {
	for e := range t.kept.elements {
		tx.remove(t.Family, &e)
	}
	for _, n := range t.kept.numbers {
		t.portRanges.give(n)
	}
	t.kept = keptRanges{}
}

// hasRange reports whether a frontend of s has a range of ports.
func hasRange(s *ruleset.Port) bool {
	return s.Spec.IsRange() && slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.IsRange() })
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

// allocateRanges takes a number for each range of ports of s, which replaces old by now. If s is the
// first Service that has a range, it creates the sets and chains for ranges.
func (t *Table) allocateRanges(old, now *service, s *ruleset.Port, tx *Tx) error {
	if !hasRange(s) {
		return nil
	}
	t.useRanges(tx)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if !f.IsRange() {
			continue
		}
		if f.Shifted() && !now.shifted {
			if now.shift[0], now.shift[1], now.shifted = layout.ShiftedBy(f.Port, f.LastPort, f.TargetPort); !now.shifted {
				return fmt.Errorf("%w: ports %s to %d and higher ones", ErrShift, f.Ports(), f.TargetPort)
			}
		}
		n := old.rangeNumber(f.Addr)
		if n == 0 {
			n = t.keptNumber(s, f)
		}
		if n == 0 {
			var ok bool
			if n, ok = t.portRanges.take(); !ok {
				return ErrTooManyPools
			}
			t.undo.later(func() { t.portRanges.give(n) })
		}
		now.ranges = append(now.ranges, portRange{f.Addr, n})
	}
	return nil
}

// freeRanges gives back the numbers of the ranges that a Service lost, and counts ranges.
func (t *Table) freeRanges(old, now *service) {
	t.rangeCount += len(now.ranges) - len(old.ranges)
	for _, r := range old.ranges {
		if now.rangeNumber(r.addr) == 0 {
			t.portRanges.give(r.number)
		}
	}
}

// useRanges creates the sets and chains for ranges of ports, unless they exist, and makes packets
// meet them.
func (t *Table) useRanges(tx *Tx) {
	if t.rangesUsed {
		return
	}
	if !t.hasRangeSets {
		t.hasRangeSets = true
		t.undo.later(func() { t.hasRangeSets = false })
		for s := layout.FirstOfRanges; s <= layout.LastOfRanges; s++ {
			if t.kept.sets[s] {
				continue
			}
			tx.Object(Object{Kind: NewSet, Family: t.Family, Set: s, Size: t.size[s]})
		}
		t.chain(layout.ChainRanges, Object{Kind: RangeChains}, tx)
	}
	t.rangesUsed = true
	t.undo.later(func() { t.rangesUsed = false })
	tx.Object(Object{Kind: UseRanges, Family: t.Family})
	t.rewritten = true
}

// collectRanges makes packets skip the chains for ranges of ports if no frontend has one. The sets
// and chains stay, without elements, until the next full delta.
func (t *Table) collectRanges(tx *Tx) {
	if t.rangesUsed && t.rangeCount == 0 {
		t.rangesUsed, t.rewritten = false, true
		tx.Object(Object{Kind: UnuseRanges, Family: t.Family})
	}
}

// UsesRanges reports whether packets meet the chains for ranges of ports.
func (t *Table) UsesRanges() bool { return t.rangesUsed }

// Rewritten reports whether the rules of the chains that lead to ranges of ports were replaced
// since the last call.
func (t *Table) Rewritten() bool {
	was := t.rewritten
	t.rewritten = false
	return was
}

// shiftElements appends the elements by which the ports of a Service's range are shifted in its
// pools. [layout.ShiftedBy] has found them.
func (s *service) shiftElements(list []layout.Element) []layout.Element {
	if !s.shifted {
		return list
	}
	for _, p := range s.pools {
		if p == nil {
			continue
		}
		key := word(p.number)
		if p.sticky {
			key = word(p.number << layout.StickyShift)
		}
		list = append(list,
			layout.Element{Set: layout.ShiftFrom, Key: key, Data: layout.PortData(s.shift[0])},
			layout.Element{Set: layout.ShiftTo, Key: key, Data: layout.PortData(s.shift[1])})
	}
	return list
}

// rangeElements appends the elements of a frontend with a range of ports, which has a number.
func rangeElements(list []layout.Element, s *ruleset.Port, f *ruleset.Frontend, keys dispatchKeys, number uint32) []layout.Element {
	key := word(layout.RangeKey(number))
	list = append(list, layout.RangeElement(f.Addr, s.Key.Protocol, f.Port, f.LastPort, number),
		layout.Element{Set: layout.RangeKeys, Key: key, Data: word(keys.any)})
	if keys.internal != 0 {
		list = append(list, layout.Element{Set: layout.InternalRangeKeys, Key: key, Data: word(keys.internal)})
	}
	for _, r := range merged(f.Sources, s.Key.Family) {
		list = append(list, layout.RangeSource(r.First, r.Last, f.Addr, s.Key.Protocol, f.Port, f.LastPort))
	}
	if f.Kind == ruleset.KindClusterIP {
		list = append(list, layout.Element{Set: layout.ClusterIPs, Key: ip(f.Addr)})
	}
	return list
}
