package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// The functions in this file do what the rules in the kernel do. They read the sets and chains of a
// table alone.

// number reads a number in the machine's byte order, 0 if data is not one.
func number(data []byte) uint32 {
	if len(data) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(data)
}

// word returns the key that consists of a number.
func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// found returns an element of a set.
func (t *memoryTable) found(s layout.Set, key []byte) (kernel.Element, bool) {
	e, ok := t.elements(s)[string(key)]
	return e, ok
}

// chain returns a chain, the zero value if it is missing.
func (t *memoryTable) chain(name string) memoryChain {
	if c := t.chains[name]; c != nil {
		return *c
	}
	return memoryChain{}
}

// usesRanges reports whether packets meet the chains for ranges of ports.
func (t *memoryTable) usesRanges() bool {
	return slices.ContainsFunc(t.chain(layout.ChainServices).rules, func(r memoryRule) bool { return slices.Contains(r.to, layout.ChainRanges) })
}

// inRange reports whether an interval set holds an address.
func (t *memoryTable) inRange(s layout.Set, a netip.Addr) bool {
	var bounds []model.Bound
	for _, e := range t.elements(s) {
		at, _ := netip.AddrFromSlice(e.Key)
		bounds = append(bounds, model.Bound{Addr: at, End: e.IntervalEnd})
	}
	return slices.ContainsFunc(model.RangesOf(bounds), func(r model.Range) bool { return !a.Less(r.First) && !r.Last.Less(a) })
}

// rangeAt returns the element of a set of ranges that has the key.
func (t *memoryTable) rangeAt(s layout.Set, key layout.Octets) (kernel.Element, bool) {
	for _, e := range t.elements(s) {
		if within(s, key.Bytes(), e.Key, e.KeyEnd) {
			return e, true
		}
	}
	return kernel.Element{}, false
}

// overlaps reports whether a set of ranges has a key of an element. Linux accepts an element around
// another one; no Backend may add one.
func (t *memoryTable) overlaps(s layout.Set, e kernel.Element) bool {
	for _, o := range t.elements(s) {
		if within(s, o.Key, e.Key, e.KeyEnd) || within(s, o.KeyEnd, e.Key, e.KeyEnd) || within(s, e.Key, o.Key, o.KeyEnd) {
			return true
		}
	}
	return false
}

// within reports whether each field of a key is between those of first and last. Only the source
// and the port are ranges, so it is sufficient to compare two parts.
func within(s layout.Set, key, first, last []byte) bool {
	n := len(first) - 4
	if s == layout.RangeSources {
		n = (len(first) - layout.PortOffset) / 2
	}
	between := func(from, to int) bool {
		k := key[from:to]
		return bytes.Compare(first[from:to], k) <= 0 && bytes.Compare(k, last[from:to]) <= 0
	}
	return between(0, n) && between(n, len(first)-4) && between(len(first)-4, len(first))
}

// pool returns the endpoints of the buckets of a dispatch key's pool, and the sticky handler, if it
// has one.
func (t *memoryTable) pool(key uint32) (buckets []netip.AddrPort, sticky *layout.StickyHandler) {
	pool := key & layout.PoolMask
	e, ok := t.found(layout.StickyPools, word(pool))
	if !ok {
		for _, s := range []layout.Set{layout.Endpoints, layout.UDPEndpoints, layout.SCTPEndpoints} {
			for data := range t.buckets(s, pool) {
				a, _ := layout.ParseAddrPort(data)
				buckets = append(buckets, a)
			}
		}
		return buckets, nil
	}
	stickyKey := number(e.Data)
	chain, _ := t.found(layout.StickyHandlers, word(stickyKey&layout.MaxMember))
	h := t.chain(chain.Chain).sticky
	members := t.elements(layout.StickyEndpoints)
	for member := range t.buckets(layout.StickyBuckets, stickyKey&layout.StickyMask) {
		a, _ := layout.ParseAddrPort(members[string(member)].Data)
		buckets = append(buckets, a)
	}
	return buckets, &h
}

// buckets yields the data of a pool's buckets in a set, up to the first one that is missing.
func (t *memoryTable) buckets(s layout.Set, pool uint32) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		elements := t.elements(s)
		var key [8]byte
		binary.NativeEndian.PutUint32(key[:], pool)
		for bucket := uint32(0); ; bucket++ {
			binary.NativeEndian.PutUint32(key[4:], bucket)
			if e, ok := elements[string(key[:])]; !ok || !yield(e.Data) {
				return
			}
		}
	}
}

// resolve describes the handling of a dispatch key without its numbers.
func (t *memoryTable) resolve(handlers layout.Set, key uint32) string {
	chain, _ := t.found(handlers, word(key&layout.HandlerMask))
	buckets, sticky := t.pool(key)
	name := chain.Chain
	if sticky != nil {
		name += " " + sticky.Chain()
	}
	if !strings.Contains(name, "-by-") { // with a hash, the order of buckets matters
		slices.SortFunc(buckets, netip.AddrPort.Compare)
	}
	return fmt.Sprintf("%s %v", name, buckets)
}

// handlePacket returns what the rules do with a packet. elsewhere holds the addresses of other nodes'
// endpoints.
func (m *memory) handlePacket(p ruleset.Packet, elsewhere map[netip.Addr]bool) conformance.Outcome {
	m.mu.Lock()
	defer m.mu.Unlock()
	to := p.To.Addr().Unmap()
	if m.poolsAt != m.generation || m.pools == nil {
		m.pools, m.poolsAt = map[poolKey]memoryPool{}, m.generation
	}
	tables := m.hooked(tracker.FamilyOf(to))
	for _, t := range tables {
		if out, ok := t.translate(p, elsewhere, m.pools); ok {
			return out
		}
	}
	for _, t := range tables {
		switch _, refused := t.found(layout.ClusterIPs, to.AsSlice()); {
		case slices.Contains(p.NodeAddresses, to):
		case refused:
			return conformance.Outcome{Action: ruleset.ActionReject}
		case t.inRange(layout.ServiceCIDRs, to):
			return conformance.Outcome{Action: ruleset.ActionDrop}
		}
	}
	return conformance.Outcome{}
}

// translate returns what a table's NAT chains do with a packet, unless it is for no Service.
func (t *memoryTable) translate(p ruleset.Packet, elsewhere map[netip.Addr]bool, pools map[poolKey]memoryPool) (conformance.Outcome, bool) {
	to := netip.AddrPortFrom(p.To.Addr().Unmap(), p.To.Port())
	_, internal, key := layout.FrontendKey(false, to.Addr(), p.Protocol, to.Port())
	e, ok := t.found(layout.ServiceIPs, key.Bytes())
	if !ok && slices.Contains(p.NodeAddresses, to.Addr()) && t.inRange(layout.NodePortIPs, to.Addr()) {
		_, internal, key = layout.FrontendKey(true, to.Addr(), p.Protocol, to.Port())
		e, ok = t.found(layout.NodePorts, key.Bytes())
	}
	at := key.Bytes()
	if !ok && t.usesRanges() {
		if e, ok = t.rangeAt(layout.ServiceRanges, layout.Octets{}.Addr(to.Addr()).Proto(p.Protocol).Port(to.Port())); ok {
			internal, at = layout.InternalRangeKeys, e.Data
			e, ok = t.found(layout.RangeKeys, at)
		}
	}
	if !ok {
		return conformance.Outcome{}, false
	}
	w := passage{t, p, elsewhere, pools}
	return w.dispatch(layout.Handlers, number(e.Data), internal, at, false), true
}

// passage is a packet's way through a table.
type passage struct {
	*memoryTable
	ruleset.Packet
	elsewhere map[netip.Addr]bool
	pools     map[poolKey]memoryPool
}

// dispatch follows a dispatch key. internal is the map with another one for internal traffic.
func (t passage) dispatch(handlers layout.Set, dispatchKey uint32, internal layout.Set, key []byte, masquerade bool) conformance.Outcome {
	p := t.Packet
	from := p.From.Unmap()
	chain, ok := t.found(handlers, word(dispatchKey&layout.HandlerMask))
	if !ok {
		return conformance.Outcome{}
	}
	h := t.chain(chain.Chain).handler
	if h.Firewall {
		if !t.admits(from, p, h.Range) {
			return conformance.Outcome{Action: ruleset.ActionDrop}
		}
	}
	fromPod := t.local.Recognizes(from, p.InInterface)
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
			return t.dispatch(layout.InternalHandlers, number(e.Data), internal, key, !fromPod)
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
	at := poolKey{t.memoryTable, dispatchKey}
	if _, ok := t.pools[at]; !ok {
		buckets, sticky := t.pool(dispatchKey)
		t.pools[at] = memoryPool{buckets, sticky}
	}
	buckets, sticky := t.pools[at].buckets, t.pools[at].sticky
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
		port := t.shifted(dispatchKey, p.To.Port())
		buckets = slices.Clone(buckets)
		for i, a := range buckets {
			buckets[i] = netip.AddrPortFrom(a.Addr(), port)
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
		_, hairpin := t.found(layout.Hairpin, append(from.AsSlice(), a.Addr().AsSlice()...))
		// Connections of other nodes' endpoints to themselves do not start here.
		hairpin = hairpin || a.Addr() == from && t.elsewhere[from]
		out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: a, Weight: weight, Masquerade: masquerade || hairpin})
	}
	return out
}

// shifted returns the port that the kernel makes of the port of a range.
func (t *memoryTable) shifted(key uint32, port uint16) uint16 {
	pool := word(key & layout.PoolMask)
	if e, ok := t.found(layout.StickyPools, pool); ok {
		pool = word(number(e.Data) & layout.StickyMask)
	}
	from, ok := t.found(layout.ShiftFrom, pool)
	if !ok {
		return port
	}
	to, _ := t.found(layout.ShiftTo, pool)
	return layout.Shifted(binary.BigEndian.Uint16(from.Data), binary.BigEndian.Uint16(to.Data), port)
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
func (t *memoryTable) admits(from netip.Addr, p ruleset.Packet, ranges bool) bool {
	if ranges {
		_, ok := t.rangeAt(layout.RangeSources, layout.Octets{}.Addr(from).Addr(p.To.Addr().Unmap()).Proto(p.Protocol).Port(p.To.Port()))
		return ok
	}
	for _, r := range t.chain(layout.ChainFirewallCheck).rules {
		bits := r.bits
		if bits == 0 {
			continue
		}
		prefix, _ := from.Prefix(bits)
		key := layout.Octets{}.Addr(prefix.Addr()).Addr(p.To.Addr().Unmap()).Proto(p.Protocol).Port(p.To.Port())
		if _, ok := t.found(layout.Allowed(bits), key.Bytes()); ok {
			return true
		}
	}
	return false
}
