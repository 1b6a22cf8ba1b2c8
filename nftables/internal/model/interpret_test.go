package model

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// The functions in this file do what the rules in the kernel do. They read the fake kernel's sets
// and chains alone.

func number(o layout.Octets) uint32 { return binary.NativeEndian.Uint32(o.Bytes()) }

// found returns an element of a set.
func (t *fakeTable) found(s layout.Set, key layout.Octets) (fakeElement, bool) {
	set := t.sets[s]
	if set == nil {
		return fakeElement{}, false
	}
	e, ok := set.elements[key]
	return e, ok
}

// inRange reports whether an interval set holds an address.
func (t *fakeTable) inRange(s layout.Set, a netip.Addr) bool {
	for first, e := range t.sets[s].elements {
		end := e.data
		if !a.Less(first.IP()) && (end.Len() == 0 || a.Less(end.IP())) {
			return true
		}
	}
	return false
}

// rangeAt returns the data of the element of a set of ranges that has the key.
func (t *fakeTable) rangeAt(s layout.Set, key layout.Octets) (layout.Octets, bool) {
	for first, e := range t.elements(s) {
		if last, data := (&layout.Element{Set: s, Key: first, Data: e.data}).End(); within(s, key, first, last) {
			return data, true
		}
	}
	return layout.Octets{}, false
}

// overlaps reports whether a set of ranges has a key of an element.
func (t *fakeTable) overlaps(e *layout.Element) bool {
	last, _ := e.End()
	for first, other := range t.elements(e.Set) {
		end, _ := (&layout.Element{Set: e.Set, Key: first, Data: other.data}).End()
		if within(e.Set, first, e.Key, last) || within(e.Set, end, e.Key, last) || within(e.Set, e.Key, first, end) {
			return true
		}
	}
	return false
}

// within reports whether each field of a key is between those of first and last. Only the source
// and the port are ranges, so it is sufficient to compare two parts.
func within(s layout.Set, key, first, last layout.Octets) bool {
	n := first.Len() - 4
	if s == layout.RangeSources {
		n = (first.Len() - layout.PortOffset) / 2
	}
	between := func(from, to int) bool {
		k := key.Bytes()[from:to]
		return bytes.Compare(first.Bytes()[from:to], k) <= 0 && bytes.Compare(k, last.Bytes()[from:to]) <= 0
	}
	return between(0, n) && between(n, first.Len()-4) && between(first.Len()-4, first.Len())
}

// pool returns the endpoints of the buckets of a dispatch key's pool, and the sticky handler, if it
// has one.
func (t *fakeTable) pool(key uint32) (buckets []netip.AddrPort, sticky *layout.StickyHandler) {
	pool := key & layout.PoolMask
	if e, ok := t.found(layout.StickyPools, word(pool)); ok {
		stickyKey := number(e.data)
		chain, _ := t.found(layout.StickyHandlers, word(stickyKey&layout.MaxMember))
		h := t.chains[chain.text].Sticky
		for bucket := uint32(0); ; bucket++ {
			member, ok := t.found(layout.StickyBuckets, word(stickyKey&layout.StickyMask).Word(bucket))
			if !ok {
				return buckets, &h
			}
			e, _ := t.found(layout.StickyEndpoints, member.data)
			a, _ := layout.ParseAddrPort(e.data.Bytes())
			buckets = append(buckets, a)
		}
	}
	for bucket := uint32(0); ; bucket++ {
		e, ok := t.found(layout.Endpoints, word(pool).Word(bucket))
		if !ok {
			return buckets, nil
		}
		a, _ := layout.ParseAddrPort(e.data.Bytes())
		buckets = append(buckets, a)
	}
}

// resolve describes the handling of a dispatch key without its numbers.
func (t *fakeTable) resolve(handlers layout.Set, key uint32) string {
	chain, _ := t.found(handlers, word(key&layout.HandlerMask))
	buckets, sticky := t.pool(key)
	name := chain.text
	if sticky != nil {
		name += " " + sticky.Chain()
	}
	if !strings.Contains(name, "-by-") { // with a hash, the order of buckets matters
		slices.SortFunc(buckets, netip.AddrPort.Compare)
	}
	return fmt.Sprintf("%s %v", name, buckets)
}

// handle returns what the rules do with a packet.
func (k *fakeKernel) handle(p ruleset.Packet) conformance.Outcome {
	to := netip.AddrPortFrom(p.To.Addr().Unmap(), p.To.Port())
	t := k.tables[tracker.FamilyOf(to.Addr())]
	if t == nil || !t.hooked {
		return conformance.Outcome{}
	}
	toNode := slices.Contains(p.NodeAddresses, to.Addr())
	_, internal, key := layout.FrontendKey(false, to.Addr(), p.Protocol, to.Port())
	e, ok := t.found(layout.ServiceIPs, key)
	if !ok && toNode && t.inRange(layout.NodePortIPs, to.Addr()) {
		_, internal, key = layout.FrontendKey(true, to.Addr(), p.Protocol, to.Port())
		e, ok = t.found(layout.NodePorts, key)
	}
	if !ok && t.usesRanges {
		if key, ok = t.rangeAt(layout.ServiceRanges, layout.Octets{}.Addr(to.Addr()).Proto(p.Protocol).Port(to.Port())); ok {
			internal = layout.InternalRangeKeys
			e, ok = t.found(layout.RangeKeys, key)
		}
	}
	if ok {
		return k.dispatch(t, p, layout.Handlers, number(e.data), internal, key, false)
	}
	switch _, refused := t.found(layout.ClusterIPs, ip(to.Addr())); {
	case toNode:
	case refused:
		return conformance.Outcome{Action: ruleset.ActionReject}
	case t.inRange(layout.ServiceCIDRs, to.Addr()):
		return conformance.Outcome{Action: ruleset.ActionDrop}
	}
	return conformance.Outcome{}
}

// dispatch follows a dispatch key. internal is the map with another one for internal traffic.
func (k *fakeKernel) dispatch(t *fakeTable, p ruleset.Packet, handlers layout.Set, dispatchKey uint32, internal layout.Set, key layout.Octets, masquerade bool) conformance.Outcome {
	from := p.From.Unmap()
	chain, ok := t.found(handlers, word(dispatchKey&layout.HandlerMask))
	if !ok {
		return conformance.Outcome{}
	}
	h := t.chains[chain.text].Handler
	if h.Firewall {
		if !t.admits(from, p, h.Range) {
			return conformance.Outcome{Action: ruleset.ActionDrop}
		}
	}
	fromPod := k.local.Recognizes(from, p.InInterface)
	fromNode := slices.Contains(p.NodeAddresses, from)
	switch h.Handling {
	case layout.HandleReject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	case layout.HandleDrop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	case layout.HandleInternal, layout.HandleInternalOrDrop, layout.HandleInternalOrPass:
		if fromPod || fromNode {
			e, ok := t.found(internal, key)
			if !ok {
				return conformance.Outcome{}
			}
			return k.dispatch(t, p, layout.InternalHandlers, number(e.data), internal, key, !fromPod)
		}
		switch h.Handling {
		case layout.HandleInternalOrDrop:
			return conformance.Outcome{Action: ruleset.ActionDrop}
		case layout.HandleInternalOrPass:
			return conformance.Outcome{}
		}
	case layout.HandleAlways:
		masquerade = true
	case layout.HandleNotPods:
		masquerade = masquerade || !fromPod
	}
	buckets, sticky := t.pool(dispatchKey)
	out := conformance.Outcome{Action: ruleset.ActionForward, Hash: h.Hash}
	size := h.Buckets
	if sticky != nil {
		out.Affinity, out.Hash, size = sticky.Timeout(), sticky.Hash, sticky.Buckets
	}
	if len(buckets) > size || len(buckets) <= layout.BucketsBelow(size) || out.Hash != tracker.HashNone && len(buckets) != size {
		// A draw could find no bucket, or never draws the last one.
		out.Endpoints = append(out.Endpoints, conformance.Choice{})
	}
	if h.Range {
		for i, a := range buckets {
			buckets[i] = netip.AddrPortFrom(a.Addr(), t.shifted(dispatchKey, p.To.Port()))
		}
	}
	weights := map[netip.AddrPort]int{}
	for _, a := range buckets {
		weights[a]++
	}
	if out.Hash != tracker.HashNone {
		simplify(weights, len(buckets))
	}
	for a, weight := range weights {
		_, hairpin := t.found(layout.Hairpin, ip(from).Addr(a.Addr()))
		// Connections of other nodes' endpoints to themselves do not start here.
		hairpin = hairpin || a.Addr() == from && k.elsewhere[from]
		out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: a, Weight: weight, Masquerade: masquerade || hairpin})
	}
	return out
}

// shifted returns the port that the kernel makes of the port of a range.
func (t *fakeTable) shifted(key uint32, port uint16) uint16 {
	pool := word(key & layout.PoolMask)
	if e, ok := t.found(layout.StickyPools, pool); ok {
		pool = word(number(e.data) & layout.StickyMask)
	}
	from, ok := t.found(layout.ShiftFrom, pool)
	if !ok {
		return port
	}
	to, _ := t.found(layout.ShiftTo, pool)
	return layout.Shifted(binary.BigEndian.Uint16(from.data.Bytes()), binary.BigEndian.Uint16(to.data.Bytes()), port)
}

// simplify replaces the numbers of buckets of a Maglev table, in which a share differs by a bucket or
// two, by the smallest numbers with the same ratio.
func simplify(weights map[netip.AddrPort]int, size int) {
	for total := 1; total < size/4; total++ {
		fits := true
		for _, n := range weights {
			off := n*total%size + 2*total
			fits = fits && n*total+2*total >= size && off%size <= 4*total
		}
		if fits {
			for a, n := range weights {
				weights[a] = (n*total + size/2) / size
			}
			return
		}
	}
}

// admits reports whether a source is allowed at the packet's destination.
func (t *fakeTable) admits(from netip.Addr, p ruleset.Packet, ranges bool) bool {
	if ranges {
		_, ok := t.rangeAt(layout.RangeSources, ip(from).Addr(p.To.Addr().Unmap()).Proto(p.Protocol).Port(p.To.Port()))
		return ok
	}
	for bits := range t.sources {
		prefix, _ := from.Prefix(bits)
		key := ip(prefix.Addr()).Addr(p.To.Addr().Unmap()).Proto(p.Protocol).Port(p.To.Port())
		if _, ok := t.found(layout.Allowed(bits), key); ok {
			return true
		}
	}
	return false
}
