package conformance

import (
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// judges reports whether the backend has the features that the verdict on a packet to a
// Service depends on, apart from those that decide about whole worlds.
func (s skips) judges(n *ruleset.Node, v ruleset.Verdict, p ruleset.Packet) bool {
	internal := p.InInterface == "" || n.LocalTraffic.Recognises(p.From, p.InInterface)
	switch {
	case !s.does(ShortCircuit) && internal && v.Frontend.ShortCircuit():
		return false
	case !s.does(EndpointPorts) && differentPorts(v.Service.Selection.Reachable):
		return false
	}
	return true
}

// differentPorts reports whether not all endpoints have the same port.
func differentPorts(eps []*tracker.Endpoint) bool {
	return slices.ContainsFunc(eps, func(e *tracker.Endpoint) bool { return e.Addr.Port() != eps[0].Addr.Port() })
}
