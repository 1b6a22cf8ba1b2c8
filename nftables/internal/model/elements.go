package model

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// The functions in this file compute the elements that a Service needs in the table's
// sets from the Service and the numbers that the table allocated for it. They do no I/O
// and change nothing.

// dispatchKeys holds the dispatch keys of one frontend. internal is for internal traffic under
// externalTrafficPolicy Local, and 0 otherwise. any is for other traffic.
type dispatchKeys struct{ any, internal uint32 }

// keyOf returns the maps that hold the dispatch keys of a Service's frontend, and its key in them.
func keyOf(s *ruleset.Port, f *ruleset.Frontend) (all, internal layout.Set, key layout.Octets) {
	return layout.FrontendKey(f.Kind == ruleset.KindNodePort, f.Addr, s.Key.Protocol, f.Port)
}

// frontendElements appends the elements of a Service's frontends to list. as is the Service as
// programmed.
func frontendElements(list []layout.Element, s *ruleset.Port, as *service) []layout.Element {
	for i := range s.Frontends {
		f, keys := &s.Frontends[i], as.keys[i]
		if f.IsRange() {
			list = rangeElements(list, s, f, keys, as.rangeNumber(f.Addr))
			continue
		}
		all, internal, key := keyOf(s, f)
		list = append(list, layout.Element{Set: all, Named: true, Key: key, Data: word(keys.any)})
		if keys.internal != 0 {
			list = append(list, layout.Element{Set: internal, Named: true, Key: key, Data: word(keys.internal)})
		}
		for _, source := range f.Sources {
			from := ip(source.Masked().Addr()).Addr(f.Addr).Proto(s.Key.Protocol).Port(f.Port)
			list = append(list, layout.Element{Set: layout.Allowed(source.Bits()), Named: true, Key: from})
		}
		if f.Kind == ruleset.KindClusterIP {
			list = append(list, layout.Element{Set: layout.ClusterIPs, Key: ip(f.Addr)})
		}
	}
	return as.shiftElements(list)
}

// word and ip return a key or data that begins with a number or an address.
func word(v uint32) layout.Octets   { return layout.Octets{}.Word(v) }
func ip(a netip.Addr) layout.Octets { return layout.Octets{}.Addr(a) }

// hairpinElement returns the element that masquerades an endpoint's connections to itself.
func hairpinElement(a netip.Addr) layout.Element {
	return layout.Element{Set: layout.Hairpin, Key: ip(a).Addr(a)}
}

// emptyBucket returns the element of a pool's bucket without its data.
func emptyBucket(p *pool, bucket int) layout.Element {
	if p.sticky {
		return layout.Element{Set: layout.StickyBuckets, Key: word(p.number << layout.StickyShift).Word(uint32(bucket))}
	}
	return layout.Element{Set: layout.EndpointsOf(p.protocol), Key: word(p.number).Word(uint32(bucket))}
}

// bucketElement returns the element of a pool's bucket with the endpoint at addr.
func bucketElement(p *pool, bucket int, addr netip.AddrPort) layout.Element {
	e := emptyBucket(p, bucket)
	if p.sticky {
		e.Data = word(p.number<<layout.StickyShift | uint32(p.member(bucket)))
	} else {
		e.Data = ip(addr.Addr()).Port(addr.Port())
	}
	return e
}

// memberElement returns the element of a numbered endpoint of a sticky pool.
func memberElement(p *pool, number uint16, addr netip.AddrPort) layout.Element {
	return layout.Element{
		Set: layout.StickyEndpoints, Key: word(p.number<<layout.StickyShift | uint32(number)),
		Data: ip(addr.Addr()).Port(addr.Port()),
	}
}

// stickyPoolElement returns the element that leads from a sticky pool to its handler.
func stickyPoolElement(p *pool) layout.Element {
	return layout.Element{Set: layout.StickyPools, Key: word(p.number), Data: word(layout.StickyKey(p.handler.number, p.number))}
}

// diff calls remove with each element that only before has, and then add with each element that
// only after has. It is fast if the lists are equal, as those of a Service's frontends mostly
// are.
func diff(before, after []layout.Element, remove, add func(*layout.Element)) {
	for len(before) > 0 && len(after) > 0 && before[0] == after[0] {
		before, after = before[1:], after[1:]
	}
	missing(before, after, remove)
	missing(after, before, add)
}

// missing calls fn with the elements of list that are missing from other.
func missing(list, other []layout.Element, fn func(*layout.Element)) {
	has := func(e *layout.Element) bool { return slices.Contains(other, *e) }
	if len(list)*len(other) > 256 {
		index := make(map[layout.Element]bool, len(other))
		for i := range other {
			index[other[i]] = true
		}
		has = func(e *layout.Element) bool { return index[*e] }
	}
	for i := range list {
		if e := &list[i]; !has(e) {
			fn(e)
		}
	}
}
