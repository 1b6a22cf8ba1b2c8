package ruleset

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// remaining returns what may stay of s, the Service that a backend has programmed, when the
// backend cannot program now, which replaces it: s without the frontends that now lacks and
// without the endpoints that are not among now.Selection.Reachable. So a backend that must refuse
// a change still stops sending connections to endpoints that are gone, and releases addresses
// that another Service may own now. It keeps s's pools, affinity and policies, and takes the
// allowed sources from now. A frontend whose pool is empty does what the same frontend of now
// does, or rejects if that one has endpoints.
//
// The result shares unchanged slices with s and now. Its ID and Key are those of s. If now is
// nil, there is nothing left and the result is nil.
func (s *Port) remaining(now *Port) *Port {
	if s == nil || now == nil {
		return nil
	}
	out := *s
	out.Endpoints = now.Endpoints
	reachable := make(map[netip.AddrPort]bool, len(now.Selection.Reachable))
	for _, ep := range now.Selection.Reachable {
		reachable[ep.Addr] = true
	}
	keep := func(list []*tracker.Endpoint) []*tracker.Endpoint {
		gone := func(ep *tracker.Endpoint) bool { return !reachable[ep.Addr] }
		if !slices.ContainsFunc(list, gone) {
			return list
		}
		return slices.DeleteFunc(slices.Clone(list), gone)
	}
	out.Selection.Cluster, out.Selection.Local = keep(s.Selection.Cluster), keep(s.Selection.Local)
	out.Selection.Reachable = keep(s.Selection.Reachable)

	target := func(had, wanted Target) Target {
		switch isPool := wanted == TargetCluster || wanted == TargetLocal; {
		case had != TargetCluster && had != TargetLocal || len(out.Pool(had)) != 0:
			return had
		case isPool:
			return TargetReject
		}
		return wanted
	}
	wanted := make(map[l4Key]*Frontend, len(now.Frontends))
	for i := range now.Frontends {
		wanted[l4KeyOf(now, &now.Frontends[i])] = &now.Frontends[i]
	}
	out.Frontends = nil
	for _, f := range s.Frontends {
		w := wanted[l4KeyOf(s, &f)]
		if w == nil {
			continue
		}
		f.Target, f.Internal = target(f.Target, w.Target), target(f.Internal, w.Internal)
		f.Sources = w.Sources
		out.Frontends = append(out.Frontends, f)
	}
	return &out
}
