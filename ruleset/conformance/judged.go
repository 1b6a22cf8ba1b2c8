package conformance

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// judges reports whether the backend has the features that the verdict on a packet
// depends on, apart from those that decide about whole worlds.
func (s skips) judges(all *ruleset.Snapshot, v ruleset.Verdict, p ruleset.Packet) bool {
	internal := p.InInterface == "" || all.Node.LocalTraffic.Recognizes(p.From, p.InInterface)
	switch {
	case !s.does(UDP) && p.Protocol == udp:
		return false
	case v.Port == nil:
		return true
	case v.Action == ruleset.ActionPass && !s.does(OtherPorts) && othersServe(all, v.Frontend):
		return false
	case !s.does(PassExternal) && v.Frontend.Target == ruleset.TargetPass && (internal || v.Action == ruleset.ActionDrop):
		return false
	case !s.does(ShortCircuit) && internal && v.Frontend.ShortCircuit():
		return false
	case !s.does(PreferLocal) && v.Port.Spec.PreferLocal && !v.Port.Spec.ExternalLocal && v.Frontend.Kind != ruleset.KindClusterIP:
		return false
	case !s.does(EndpointPorts) && !v.Frontend.IsRange() && differentPorts(v.Port.Selection.Reachable):
		return false
	}
	return true
}

// mayRefuse reports whether a packet that must be dropped may be refused, because the backend
// lacks Drop. Sources that a frontend does not admit must still be dropped.
func (s skips) mayRefuse(v ruleset.Verdict, p ruleset.Packet) bool {
	return !s.does(Drop) && v.Port != nil && v.Action == ruleset.ActionDrop && v.Frontend.Admits(p.From)
}

// othersServe reports whether the address of a frontend that lets packets pass has another
// frontend that does not.
func othersServe(all *ruleset.Snapshot, f *ruleset.Frontend) bool {
	return slices.ContainsFunc(all.Ports, func(s *ruleset.Port) bool {
		return slices.ContainsFunc(s.Frontends, func(o ruleset.Frontend) bool {
			return o.Addr == f.Addr && o.Target != ruleset.TargetPass
		})
	})
}

// addressesOf returns the addresses and ports that may get a packet, each once. Two endpoints of
// a range of ports may have the same.
func addressesOf(v ruleset.Verdict) map[netip.AddrPort]bool {
	out := map[netip.AddrPort]bool{}
	for _, ep := range v.Endpoints {
		out[v.AddrOf(ep)] = true
	}
	return out
}

// differentPorts reports whether not all endpoints have the same port.
func differentPorts(eps []*tracker.Endpoint) bool {
	return slices.ContainsFunc(eps, func(e *tracker.Endpoint) bool { return e.Addr.Port() != eps[0].Addr.Port() })
}
