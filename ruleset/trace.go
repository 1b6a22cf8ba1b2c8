package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// Packet is the first packet of a connection, as it arrives at the node or
// leaves a process on it, before any address in it is replaced.
type Packet struct {
	// From is the source address.
	From netip.Addr
	// InInterface is the name of the interface it came in by, "" if the node
	// itself sent it.
	InInterface string
	// Protocol is TCP, UDP or SCTP.
	Protocol v1.Protocol
	// To is the destination.
	To netip.AddrPort
	// NodeAddresses is all of the node's own addresses, on every interface: what
	// the kernel calls local.
	NodeAddresses []netip.Addr
}

// Action is what becomes of a [Packet].
type Action uint8

// The actions.
const (
	// ActionPass: it is none of ours, and goes where it would without us.
	ActionPass Action = iota + 1
	// ActionForward: it is sent to one of [Verdict.Endpoints].
	ActionForward
	// ActionReject: it is refused (ICMP port unreachable), which a connected UDP
	// socket gets as ECONNREFUSED. See also [Verdict].MayFailSend.
	ActionReject
	// ActionDrop: it is lost without an answer.
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

// Verdict is what must become of a [Packet].
type Verdict struct {
	// Action is what becomes of it, never 0.
	Action Action
	// Rule says, in a sentence for a reader, which rule decided.
	Rule string
	// Service and Frontend are those the packet was meant for, nil if for none.
	Service  *Service
	Frontend *Frontend
	// Endpoints is, under ActionForward, those of which one gets the packet, each
	// as likely as its weight.
	Endpoints []*tracker.Endpoint
	// Affinity is how long the client must be sent to the same endpoint again, as
	// long as that is one of Endpoints; 0 means that nothing is remembered.
	Affinity time.Duration
	// Hash, if not [tracker.HashNone], is what alone of the connection decides which
	// of Endpoints it is sent to, as long as they stay and nothing is remembered.
	Hash tracker.Hash
	// MayFailSend is true, under ActionReject and ActionDrop, if a socket on the node
	// itself may get EPERM from sending the packet. The kernel returns EPERM for a
	// packet that rules stop on its way out, and a packet that is not for one of the
	// node's own addresses cannot be stopped later. It is also true for cluster IPs
	// that are the node's own, and for sources that are not allowed: kube-proxy stops
	// these packets on their way out, too.
	MayFailSend bool

	masquerade bool
	from       netip.Addr
	// here is the node's own addresses, if the packet came from elsewhere.
	here []netip.Addr
}

// MasqueradeTo reports whether the packet's source address is replaced by the
// node's if it is sent to ep.
func (v Verdict) MasqueradeTo(ep *tracker.Endpoint) bool {
	if v.Action != ActionForward {
		return false
	}
	// What comes in and is for the node itself is never sent on, and the answer
	// starts here.
	if slices.ContainsFunc(v.here, func(a netip.Addr) bool { return canonical(a) == canonical(ep.Addr.Addr()) }) {
		return false
	}
	// Hairpin: an endpoint that gets its own packet back would answer itself
	// directly, and drop the answer that does not come from the Service.
	hairpin := canonical(ep.Addr.Addr()) == v.from
	return v.masquerade || hairpin
}

// Trace says what must become of a packet. It is the specification of a backend,
// to be read from top to bottom: the first rule that applies decides. Backends
// are judged by it; they need not go about it the same way.
//
// It looks a few things up in an index (see [Engine.Snapshot]); the cost does not
// depend on how many Services there are.
func (s *Snapshot) Trace(p Packet) Verdict {
	p.From = canonical(p.From)
	p.To = netip.AddrPortFrom(canonical(p.To.Addr()), p.To.Port())
	toNode := slices.ContainsFunc(p.NodeAddresses, func(a netip.Addr) bool { return canonical(a) == p.To.Addr() })

	fromNode := p.InInterface == ""

	// 1. A Service has the very address and port.
	if svc, f := s.Lookup(p.To, p.Protocol); f != nil && f.Kind != NodePort {
		return s.traceFrontend(p, toNode, svc, f)
	}

	// 2. The address is one of the node's own at which NodePorts answer, and the
	// port is a NodePort. Loopback addresses never are: what is sent from one
	// cannot leave the node.
	if toNode && s.Node.NodePorts(tracker.FamilyOf(p.To.Addr())).Allows(p.To.Addr()) {
		if svc, f := s.nodePort(p); f != nil {
			return s.traceFrontend(p, toNode, svc, f)
		}
	}

	// What the node itself is asked for is the node's own business from here on.
	if toNode {
		return Verdict{Action: ActionPass, Rule: fmt.Sprintf(
			"%s is the node's own address, and %s %d is not the port of a Service there", p.To.Addr(), p.Protocol, p.To.Port())}
	}

	// 3. A cluster IP is not a host: where there is no such port, no other host
	// could answer, and the packet would wander off by the default route.
	if svc := s.clusterIP(p.To.Addr()); svc != nil {
		return Verdict{Action: ActionReject, MayFailSend: fromNode, Rule: fmt.Sprintf(
			"%s %d is a closed port of a cluster IP (of %s)", p.Protocol, p.To.Port(), svc.Key.NamespacedName)}
	}

	// 4. The same goes for an address kept for cluster IPs that no Service has (yet):
	// no answer, so that a client that is ahead of us tries again.
	if containsAddr(s.Node.ServiceCIDRs, p.To.Addr()) {
		return Verdict{Action: ActionDrop, MayFailSend: fromNode, Rule: fmt.Sprintf(
			"%s is in a Service CIDR, but is no Service's cluster IP", p.To.Addr())}
	}

	// 5. Everything else is not for us.
	return Verdict{Action: ActionPass, Rule: fmt.Sprintf("%s is no Service's address", p.To.Addr())}
}

// traceFrontend says what must become of a packet that is for frontend f of svc.
// toNode reports whether its destination is one of the node's own addresses.
func (s *Snapshot) traceFrontend(p Packet, toNode bool, svc *Service, f *Frontend) Verdict {
	v := Verdict{Service: svc, Frontend: f, from: p.From}
	if p.InInterface != "" {
		v.here = p.NodeAddresses
	}
	name := fmt.Sprintf("%s of %s", f.Kind, svc.Key)
	fromNode := p.InInterface == ""

	// 1. A source that may not connect learns nothing, not even that there is no endpoint.
	if !f.Admits(p.From) {
		v.Action, v.MayFailSend = ActionDrop, fromNode
		v.Rule = fmt.Sprintf("%s is not among the source ranges of the %s", p.From, name)
		return v
	}

	// 2. Where did it start? A pod's packet is told by the source address or by
	// the interface, as configured; the node's own comes in by no interface.
	fromPod := s.Node.LocalTraffic.Recognises(p.From, p.InInterface)

	// 3. Under externalTrafficPolicy Local, pods and the node itself may use
	// every endpoint; others only those on this node.
	internal, whom := fromPod || fromNode, ""
	if internal && f.ShortCircuit() {
		whom = ", used from this node or one of its pods"
	}
	target := f.TargetFor(internal)
	mayFailSend := fromNode && (!toNode || f.Kind == ClusterIP)
	switch target {
	case ToCluster, ToLocal:
		v.Action = ActionForward
		v.Endpoints = svc.Pool(target)
		v.Affinity = svc.Port.Affinity
		v.Hash = svc.Hash()
	case Reject:
		v.Action, v.MayFailSend = ActionReject, mayFailSend
		v.Rule = fmt.Sprintf("%s%s has no endpoints on any node", name, whom)
		return v
	case Drop:
		v.Action, v.MayFailSend = ActionDrop, mayFailSend
		v.Rule = fmt.Sprintf("%s%s has endpoints, but none this node may use", name, whom)
		return v
	}

	// 4. Would the answer find its way back through this node? If not, or if
	// the node cannot tell, the source is replaced by the node's.
	v.masquerade = f.Masquerade.Applies(fromPod, fromNode)
	v.Rule = fmt.Sprintf("%s%s goes to its %s", name, whom, target)
	return v
}

// nodePort returns the Service with the packet's port as NodePort, or nil.
func (s *Snapshot) nodePort(p Packet) (*Service, *Frontend) {
	s.index()
	f := s.at[nodePortKey(tracker.FamilyOf(p.To.Addr()), p.To.Port(), p.Protocol)]
	return f.service, f.frontend
}

// clusterIP returns some Service with the cluster IP, or nil.
func (s *Snapshot) clusterIP(a netip.Addr) *Service {
	s.index()
	return s.clusterIPs[a]
}
