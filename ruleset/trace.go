package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// Packet is the first packet of a connection, before any address is replaced.
type Packet struct {
	// From is the source address.
	From netip.Addr
	// InInterface is the name of the interface on which the packet arrived, or "" if
	// the node itself sent it.
	InInterface string
	// Protocol is TCP, UDP or SCTP.
	Protocol v1.Protocol
	// To is the destination.
	To netip.AddrPort
	// NodeAddresses holds all of the node's own addresses, on every interface.
	NodeAddresses []netip.Addr
}

// Action is what happens to a [Packet].
type Action uint8

// The actions.
const (
	// ActionPass: the packet continues unchanged. It is not for a Service.
	ActionPass Action = iota + 1
	// ActionForward: the packet is sent to one of [Verdict].Endpoints.
	ActionForward
	// ActionReject: the packet is refused (ICMP port unreachable). A connected UDP
	// socket gets ECONNREFUSED. See also [Verdict].MayFailSend.
	ActionReject
	// ActionDrop: the packet is dropped without a reply.
	ActionDrop
)

// String returns "pass", "forward", "reject" or "drop".
func (a Action) String() string {
	switch a {
	case ActionPass:
		return "pass"
	case ActionForward:
		return "forward"
	case ActionReject:
		return "reject"
	case ActionDrop:
		return "drop"
	}
	return "unknown action"
}

// Verdict is what must happen to a [Packet].
type Verdict struct {
	// Action is what happens to the packet, never 0.
	Action Action
	// Rule is a sentence for people that names the rule that decided.
	Rule string
	// Port and Frontend are the destination of the packet, nil if it is not for a
	// Service.
	Port     *Port
	Frontend *Frontend
	// Endpoints holds, under ActionForward, the possible endpoints, each with a probability proportional to its
	// weight.
	Endpoints []*tracker.Endpoint
	// Affinity is the time for which the client must be sent to the same endpoint again while that is one of
	// Endpoints, or 0.
	Affinity time.Duration
	// Hash, if not [tracker.HashNone], is the part of the connection that determines the endpoint, unless a client
	// with affinity is remembered.
	Hash tracker.Hash
	// MayFailSend is true, under ActionReject and ActionDrop, if a socket on the node may get EPERM when it sends the
	// packet. The kernel returns EPERM for a packet that rules stop on its way out, as they must at addresses that
	// are not the node's own. Like kube-proxy, backends also stop packets to cluster IPs that are the node's own, and
	// from sources that are not allowed, on their way out.
	MayFailSend bool

	masquerade bool
	from       netip.Addr
	// here holds the node's own addresses, if the packet came from another machine.
	here []netip.Addr
}

// MasqueradeTo reports whether the node replaces the packet's source address by its
// own if it sends the packet to ep.
func (v Verdict) MasqueradeTo(ep *tracker.Endpoint) bool {
	if v.Action != ActionForward {
		return false
	}
	// A packet that arrives for the node itself is not sent on, and the reply starts
	// here.
	if slices.ContainsFunc(v.here, func(a netip.Addr) bool { return canonical(a) == canonical(ep.Addr.Addr()) }) {
		return false
	}
	// Hairpin: an endpoint that gets its own packet would reply to itself directly, and drop the reply because it
	// does not come from the Service.
	hairpin := canonical(ep.Addr.Addr()) == v.from
	return v.masquerade || hairpin
}

// Trace returns what must happen to a packet. It is the specification of a backend, to be read from top to bottom:
// the first rule that applies decides. It uses an index (see [Engine.Snapshot]).
func (s *Snapshot) Trace(p Packet) Verdict {
	p.From = canonical(p.From)
	p.To = netip.AddrPortFrom(canonical(p.To.Addr()), p.To.Port())
	toNode := slices.ContainsFunc(p.NodeAddresses, func(a netip.Addr) bool { return canonical(a) == p.To.Addr() })

	v := s.trace(p, toNode)
	if v.Port == nil {
		v.Rule += s.missing(p, toNode)
	} else if out := v.Port.LeftOut; out != nil && len(v.Endpoints) != 0 && out.Endpoints != 0 {
		v.Rule += fmt.Sprintf(", but not to all of them (%s)", out.Text)
	}
	return v
}

// missing returns why a packet's destination is no frontend, if that is because of the Budget.
func (s *Snapshot) missing(p Packet, toNode bool) string {
	svc, f := s.LookupLeftOut(p.To, p.Protocol)
	if toNode && f == nil {
		at := netip.IPv4Unspecified()
		if p.To.Addr().Is6() {
			at = netip.IPv6Unspecified()
		}
		svc, f = s.LookupLeftOut(netip.AddrPortFrom(at, p.To.Port()), p.Protocol)
	}
	if f == nil {
		return ""
	}
	return fmt.Sprintf("; the budget leaves out this %s of %s (%s)", f.Kind, svc.Key, svc.LeftOut.Text)
}

// trace is Trace for canonical addresses. toNode reports whether the packet's destination is one
// of the node's own addresses.
func (s *Snapshot) trace(p Packet, toNode bool) Verdict {
	fromNode := p.InInterface == ""

	// 0. Only the node reaches its loopback addresses. The kernel drops a packet to one that arrived on an interface,
	// or delivers it to the node if the sysctl route_localnet is set.
	if !fromNode && p.To.Addr().IsLoopback() {
		return Verdict{Action: ActionPass, Rule: fmt.Sprintf(
			"%s is a loopback address, where packets that arrived on an interface are for no Service", p.To.Addr())}
	}

	// 1. A Service has this address and port.
	svc, f := s.Lookup(p.To, p.Protocol)
	if f != nil && f.Kind != KindNodePort {
		return s.traceFrontend(p, toNode, svc, f)
	}

	// 2. The address is one of the node's own that serve NodePorts, and the port is a NodePort.
	ports := s.Node.NodePorts(tracker.FamilyOf(p.To.Addr()))
	if toNode && (ports.Allows(p.To.Addr()) || ports.AllowsLoopback(p.To.Addr())) {
		at := nodePortKey(tracker.FamilyOf(p.To.Addr()), p.To.Port(), p.Protocol)
		if svc, f := s.lookup(at); f != nil {
			return s.traceFrontend(p, toNode, svc, f)
		}
	}

	// All other packets to the node itself are not for a Service.
	if toNode {
		return Verdict{Action: ActionPass, Rule: fmt.Sprintf(
			"%s is the node's own address, and %s %d is not the port of a Service there", p.To.Addr(), p.Protocol, p.To.Port())}
	}

	// 3. A cluster IP is not a host: no other host could reply on a closed port, and
	// the packet would leave by the default route.
	s.index()
	if svc := s.clusterIPs[p.To.Addr()]; svc != nil {
		return Verdict{Action: ActionReject, MayFailSend: fromNode, Rule: fmt.Sprintf(
			"%s %d is a closed port of a cluster IP (of %s)", p.Protocol, p.To.Port(), svc.Key.NamespacedName)}
	}

	// 4. No Service has this address of the Service CIDRs yet: drop the packet, so that a client with newer
	// information tries again.
	if containsAddr(s.Node.ServiceCIDRs, p.To.Addr()) {
		return Verdict{Action: ActionDrop, MayFailSend: fromNode, Rule: fmt.Sprintf(
			"%s is in a Service CIDR, but is no Service's cluster IP", p.To.Addr())}
	}

	// 5. All other packets are not for a Service.
	return Verdict{Action: ActionPass, Rule: fmt.Sprintf("%s is no Service's address", p.To.Addr())}
}

// traceFrontend returns what must happen to a packet for frontend f of svc. toNode
// reports whether its destination is one of the node's own addresses.
func (s *Snapshot) traceFrontend(p Packet, toNode bool, svc *Port, f *Frontend) Verdict {
	v := Verdict{Port: svc, Frontend: f, from: p.From}
	if p.InInterface != "" {
		v.here = p.NodeAddresses
	}
	name := fmt.Sprintf("%s of %s", f.Kind, svc.Key)
	fromNode := p.InInterface == ""

	// 1. A source that is not allowed gets no information, not even that there is no
	// endpoint.
	if !f.Admits(p.From) {
		v.Action, v.MayFailSend = ActionDrop, fromNode
		v.Rule = fmt.Sprintf("%s is not among the source ranges of the %s", p.From, name)
		if out := svc.LeftOut; out != nil && out.Sources != 0 {
			v.Rule = fmt.Sprintf("%s is not among the first %d source ranges of the %s (%s)", p.From, len(f.Sources), name, out.Text)
		}
		return v
	}

	// 2. Find the origin. The source address or the interface identifies a pod; the node's own packets arrive on no
	// interface.
	fromPod := s.Node.LocalTraffic.Recognizes(p.From, p.InInterface)

	// 3. Under externalTrafficPolicy Local, pods and the node itself may use every
	// endpoint; others only the endpoints on this node.
	internal, whom := fromPod || fromNode, ""
	if internal && f.ShortCircuit() {
		whom = ", used from this node or one of its pods"
	}
	target := f.TargetFor(internal)
	mayFailSend := fromNode && (!toNode || f.Kind == KindClusterIP)
	switch target {
	case TargetCluster, TargetLocal:
		v.Action = ActionForward
		v.Endpoints = svc.Pool(target)
		v.Affinity = svc.Spec.Affinity
		v.Hash = svc.Hash()
	case TargetReject:
		v.Action, v.MayFailSend = ActionReject, mayFailSend
		v.Rule = fmt.Sprintf("%s%s has no endpoints on any node", name, whom)
		return v
	case TargetDrop:
		v.Action, v.MayFailSend = ActionDrop, mayFailSend
		v.Rule = fmt.Sprintf("%s%s has endpoints, but none this node may use", name, whom)
		return v
	}

	// 4. Replace the source by the node's unless the reply is known to come back
	// through this node.
	v.masquerade = f.Masquerade.Applies(fromPod, fromNode)
	v.Rule = fmt.Sprintf("%s%s goes to its %s", name, whom, target)
	if target == TargetLocal && f.Kind != KindClusterIP && svc.Spec.PreferLocal && !svc.Spec.ExternalLocal {
		v.Rule += ", which the Service prefers to those of other nodes"
	}
	return v
}
