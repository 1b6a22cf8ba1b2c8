package ruleset

import (
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// Service is the compiled rule for one Service port in one family: everything a
// backend needs to forward its packets, with every question of Service semantics
// answered. It is never changed once handed out.
type Service struct {
	// ID is a small positive number that stays with Key as long as it is live. No
	// two live Services of an [Engine] share one, and one is used again only after
	// every attached backend has accepted that its last owner is gone.
	ID uint32
	// Key is Port.Key.
	Key tracker.Key
	// Port is the Service port this was compiled from.
	Port *tracker.ServicePort
	// Selection is the endpoints: Selection.Cluster and Selection.Local are the
	// two pools a [Frontend] can send to.
	Selection tracker.Selection
	// Endpoints is every known endpoint of the port, whatever its conditions:
	// also those in no pool, such as one that is terminating and still serves the
	// connections it has. It is shared with the tracker.
	Endpoints []*tracker.Endpoint
	// Frontends is where clients reach the Service: the cluster IP first, then
	// external IPs, load-balancer IPs and the NodePort. No two have the same
	// address and port.
	Frontends []Frontend

	// uniform: all of Endpoints have the same weight. It is a shortcut of Weighted,
	// and false in a Service that was made by hand.
	uniform bool
}

// Pool returns the endpoints that t stands for: nil for [Reject] and [Drop].
func (s *Service) Pool(t Target) []*tracker.Endpoint {
	switch t {
	case ToCluster:
		return s.Selection.Cluster
	case ToLocal:
		return s.Selection.Local
	}
	return nil
}

// Frontend is one address and port at which a Service is reached, and what
// happens to a new connection there. The protocol is the Service's Key.Protocol.
//
// A connection that Sources does not admit is dropped. Otherwise it meets Internal if it is
// internal, from one of this node's pods or the node itself, and Target if not. The source
// address is replaced (masqueraded) as Masquerade says and, in every Service, when the
// chosen endpoint is the connection's own source (hairpin).
type Frontend struct {
	// Kind is what sort of address it is, never 0.
	Kind Kind
	// Port is the destination port.
	Port uint16
	// Addr is the destination address; for a NodePort it is the zero Addr and
	// stands for the addresses of [Node.NodePorts].
	Addr netip.Addr
	// Sources, if not empty, is the only sources that may connect, masked.
	Sources []netip.Prefix
	// Target is what a connection meets.
	Target Target
	// Internal is what a connection from one of this node's pods (which
	// [Node.LocalTraffic] recognises) or from the node itself meets. It differs from
	// Target only under externalTrafficPolicy Local, where such a connection
	// "short-circuits": it may use every endpoint, as through the cluster IP. See
	// ShortCircuit.
	Internal Target
	// Masquerade is when the connection's source address is replaced.
	Masquerade Masquerade
}

// ShortCircuit reports whether connections from this node's pods and from the
// node itself are treated otherwise than others.
func (f *Frontend) ShortCircuit() bool { return f.Masquerade == MasqueradeNode }

// TargetFor returns what a connection meets: Internal if it is internal, from one of this
// node's pods or the node itself, and Target otherwise.
func (f *Frontend) TargetFor(internal bool) Target {
	if internal {
		return f.Internal
	}
	return f.Target
}

// Admits reports whether Sources lets a connection from this address in.
func (f *Frontend) Admits(from netip.Addr) bool {
	return len(f.Sources) == 0 || containsAddr(f.Sources, canonical(from))
}

// Kind is the kind of a [Frontend].
type Kind uint8

// The kinds of frontend.
const (
	ClusterIP Kind = iota + 1
	ExternalIP
	LoadBalancerIP
	NodePort
)

// String returns "cluster IP", "external IP", "load-balancer IP" or "node port".
func (k Kind) String() string {
	switch k {
	case ClusterIP:
		return "cluster IP"
	case ExternalIP:
		return "external IP"
	case LoadBalancerIP:
		return "load-balancer IP"
	case NodePort:
		return "node port"
	}
	return "unknown kind"
}

// Target is what happens to a connection.
type Target uint8

const (
	// ToCluster sends it to one of [tracker.Selection.Cluster], which is not empty.
	ToCluster Target = iota + 1
	// ToLocal sends it to one of [tracker.Selection.Local], which is not empty.
	ToLocal
	// Reject refuses it (ICMP port unreachable): no node has an endpoint.
	Reject
	// Drop loses it silently: other nodes have endpoints, this one has none that
	// the traffic policy allows, and a load balancer should try elsewhere.
	Drop
)

// String returns "cluster endpoints", "local endpoints", "reject" or "drop".
func (t Target) String() string {
	switch t {
	case ToCluster:
		return "cluster endpoints"
	case ToLocal:
		return "local endpoints"
	case Reject:
		return "reject"
	case Drop:
		return "drop"
	}
	return "unknown target"
}

// Masquerade is when a connection's source address is replaced by the node's,
// so that replies come back through this node.
type Masquerade uint8

const (
	// MasqueradeNever keeps every source: a cluster IP where pod traffic cannot be
	// told from other traffic.
	MasqueradeNever Masquerade = iota
	// MasqueradeAlways replaces every source: external traffic under a policy of
	// Cluster, and cluster IPs under [Node.MasqueradeAll].
	MasqueradeAlways
	// MasqueradeNotPods replaces sources that [Node.LocalTraffic] does not
	// recognise: a cluster IP used from off the node or by the node itself.
	MasqueradeNotPods
	// MasqueradeNode replaces the source only of connections from the node itself,
	// unless [Node.LocalTraffic] takes it for a pod's: external traffic under a
	// policy of Local.
	MasqueradeNode
)

// Applies reports whether the source of a connection is replaced: one that
// [Node.LocalTraffic] recognises as a local pod's (fromPod), one that the node itself
// opens (fromNode), or one from off the node (neither). Values other than the
// constants replace no source.
func (m Masquerade) Applies(fromPod, fromNode bool) bool {
	switch m {
	case MasqueradeAlways:
		return true
	case MasqueradeNotPods:
		return !fromPod
	case MasqueradeNode:
		return fromNode && !fromPod
	}
	return false
}

// String returns "never", "always", "unless from a local pod" or "if from the
// node".
func (m Masquerade) String() string {
	switch m {
	case MasqueradeNever:
		return "never"
	case MasqueradeAlways:
		return "always"
	case MasqueradeNotPods:
		return "unless from a local pod"
	case MasqueradeNode:
		return "if from the node"
	}
	return "unknown"
}
