package objects

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
)

// Ranges holds the addresses to which the node's network leads.
type Ranges struct {
	// Connected holds the networks of the node's interfaces.
	Connected []netip.Prefix
	// Routed holds the destinations of the main routing table without the default routes.
	Routed []netip.Prefix
}

// maxInUse is the number of ranges in use in one Service CIDR. If there are more, nothing in the
// Service CIDR is dropped, because each range adds rules.
const maxInUse = 32

// usedRange is a range of addresses that hosts or pods use.
type usedRange struct {
	netip.Prefix
	by string
}

// The values of usedRange.by that are treated specially.
const (
	byAPIServer = "the API server"
	byRoute     = "a route"
)

// overlap is a Service CIDR and a range in use.
type overlap struct{ cidr, used netip.Prefix }

// RefreshServiceCIDRs reads again which addresses are in use.
func (w *World) RefreshServiceCIDRs() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.setServiceCIDRs()
}

// setServiceCIDRs hands the ranges of cluster IPs to the engine, and the ranges in them that are in
// use: packets to hosts and pods must not be dropped as packets to unused cluster IPs, even if an
// operator gave them addresses in a Service CIDR. The caller holds w.mu.
func (w *World) setServiceCIDRs() {
	cidrs := slices.Concat(slices.Collect(maps.Values(w.cidrs))...)
	var all, inUse []netip.Prefix
	if len(cidrs) != 0 {
		used := w.usedRanges()
		for _, c := range cidrs {
			if inUse = w.inUse(c, used); len(inUse) > maxInUse {
				inUse = []netip.Prefix{c}
			}
			all = append(all, inUse...)
		}
	}
	w.Engine.SetServiceCIDRs(cidrs, all)
}

// usedRanges returns all ranges in use, wide ones first.
func (w *World) usedRanges() (out []usedRange) {
	add := func(by string, all ...netip.Prefix) {
		for _, p := range all {
			out = append(out, usedRange{p.Masked(), by})
		}
	}
	add("--cluster-cidr", w.Config.DetectLocal.CIDRs...)
	if w.node != nil {
		for _, s := range podCIDRs(w.node) {
			if p, err := netip.ParsePrefix(s); err == nil {
				add("the Node's podCIDRs", p)
			}
		}
	}
	for _, a := range w.Tracker.Node().Addresses {
		add("the Node's addresses", netip.PrefixFrom(a, a.BitLen()))
	}
	for _, a := range w.APIServer {
		add(byAPIServer, netip.PrefixFrom(a.Addr(), a.Addr().BitLen()))
	}
	if w.Ranges != nil {
		if r, err := w.Ranges(); err == nil {
			w.ranges = r
		} else {
			w.Log.Warn("cannot read which addresses the node reaches; what was read last stays in effect", "error", err)
		}
		add("an interface", w.ranges.Connected...)
		add(byRoute, w.ranges.Routed...)
	}
	slices.SortStableFunc(out, func(a, b usedRange) int { return cmp.Compare(a.Bits(), b.Bits()) })
	return out
}

// inUse returns the ranges in use that overlap a Service CIDR, and reports those that are new.
func (w *World) inUse(cidr netip.Prefix, used []usedRange) (out []netip.Prefix) {
	for _, u := range used {
		p := u.Prefix
		switch {
		case !cidr.Overlaps(p), slices.ContainsFunc(out, p.Overlaps): // used has wide ranges first
			continue
		case u.by == byRoute && p.Bits() <= cidr.Bits():
			continue // a route for the Services
		case u.by == byRoute && p.IsSingleIP():
			// Routes to single pods come and go. The rules must not change with each of them.
			p = netip.PrefixFrom(p.Addr(), p.Bits()-8).Masked()
		}
		out = append(out, p)
		if w.reported[overlap{cidr, p}] || u.by == byAPIServer && w.isService(p.Addr()) || len(out) > maxInUse {
			continue
		}
		w.reported[overlap{cidr, p}] = true
		w.Log.Warn("a Service CIDR overlaps addresses in use: packets to its unused cluster IPs among them are not dropped", "serviceCIDR", cidr, "inUse", p, "by", u.by)
		if w.Overlap != nil {
			w.Overlap(fmt.Sprintf("Service CIDR %s overlaps %s (%s): a new Service may take an address that is in use", cidr, p, u.by))
		}
	}
	return out
}

// isService reports whether a, an address of the API server, is that of a Service, or whether that is not
// known yet.
func (w *World) isService(a netip.Addr) bool {
	if !w.Tracker.Synced() {
		return true
	}
	s := w.Engine.Snapshot()
	return slices.ContainsFunc(w.APIServer, func(to netip.AddrPort) bool {
		return to.Addr() == a && s.Trace(ruleset.Packet{From: a, Protocol: v1.ProtocolTCP, To: to}).Port != nil
	})
}
