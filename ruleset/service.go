package ruleset

import (
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// Service is the compiled rule of one Service port in one family. It has everything
// that a backend needs to forward the Service's packets. A published Service never
// changes and may be read from any goroutine.
type Service struct {
	// ID is a small positive number that stays with Key while the Service exists. No
	// two Services of an [Engine] share an ID. An ID is reused only after every
	// attached backend has accepted the removal of its last owner.
	ID uint32
	// Key is Port.Key.
	Key tracker.Key
	// Port is the Service port from which this Service was compiled.
	Port *tracker.ServicePort
	// Selection holds the selected endpoints: Selection.Cluster and Selection.Local
	// are the two pools of a [Frontend].
	Selection tracker.Selection
	// Endpoints holds every known endpoint of the port, whatever its conditions. It
	// includes endpoints outside the pools, such as a terminating one that still
	// serves its connections. It is shared with the tracker.
	Endpoints []*tracker.Endpoint
	// Frontends holds the addresses of the Service: the cluster IP first, then
	// external IPs, load-balancer IPs and the NodePort. No two have the same address
	// and port.
	Frontends []Frontend

	// uniform reports whether all of Endpoints have the same weight. It is a shortcut
	// for Weighted, and false in a Service that was not made by Compile.
	uniform bool
}

// Pool returns the endpoints of target t. It returns nil for [Reject] and [Drop].
func (s *Service) Pool(t Target) []*tracker.Endpoint {
	switch t {
	case ToCluster:
		return s.Selection.Cluster
	case ToLocal:
		return s.Selection.Local
	}
	return nil
}

// Frontend is one address and port of a Service, and what happens to new connections
// there. The protocol is the Service's Key.Protocol.
//
// A connection that Sources does not admit is dropped. Otherwise Internal applies to
// internal connections, which come from one of this node's pods or from the node
// itself, and Target to all others. Masquerade determines whether the source address
// is replaced (masqueraded). It is always replaced if the chosen endpoint is the
// source of the connection (hairpin).
type Frontend struct {
	// Kind is the kind of address, never 0.
	Kind Kind
	// Port is the destination port.
	Port uint16
	// Addr is the destination address. For a NodePort it is the zero Addr, which
	// means the addresses of [Node.NodePorts].
	Addr netip.Addr
	// Sources, if not empty, lists the only allowed sources, masked.
	Sources []netip.Prefix
	// Target is the target of external connections.
	Target Target
	// Internal is the target of connections from one of this node's pods (which
	// [Node].LocalTraffic recognises) or from the node itself. It differs from Target
	// only under externalTrafficPolicy Local: such connections may use every
	// endpoint, as through the cluster IP. See ShortCircuit.
	Internal Target
	// Masquerade determines which connections get a new source address.
	Masquerade Masquerade
}

// ShortCircuit reports whether the frontend handles connections from this node's pods
// and from the node itself differently from others.
func (f *Frontend) ShortCircuit() bool { return f.Masquerade == MasqueradeNode }

// TargetFor returns Internal if internal is true (the connection comes from one of
// this node's pods or the node itself), and Target otherwise.
func (f *Frontend) TargetFor(internal bool) Target {
	if internal {
		return f.Internal
	}
	return f.Target
}

// Admits reports whether Sources allows connections from this address.
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
	// ToCluster sends the connection to one of [tracker.Selection].Cluster, which is
	// not empty.
	ToCluster Target = iota + 1
	// ToLocal sends the connection to one of [tracker.Selection].Local, which is not
	// empty.
	ToLocal
	// Reject refuses the connection (ICMP port unreachable): no node has an endpoint.
	Reject
	// Drop drops the connection silently: other nodes have endpoints, but this node
	// has none that the traffic policy allows, and a load balancer should try another
	// node.
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

// Masquerade determines when the node replaces a connection's source address by its
// own, so that replies come back through this node.
type Masquerade uint8

const (
	// MasqueradeNever keeps every source: for cluster IPs if pod traffic cannot be
	// distinguished from other traffic.
	MasqueradeNever Masquerade = iota
	// MasqueradeAlways replaces every source: for external traffic under a policy of
	// Cluster, and for cluster IPs under [Node].MasqueradeAll.
	MasqueradeAlways
	// MasqueradeNotPods replaces sources that [Node].LocalTraffic does not recognise:
	// for cluster IPs used from other machines or by the node itself.
	MasqueradeNotPods
	// MasqueradeNode replaces only the source of connections from the node itself,
	// unless [Node].LocalTraffic recognises it as a pod: for external traffic under a
	// policy of Local.
	MasqueradeNode
)

// Applies reports whether the source of a connection is replaced. fromPod reports
// whether [Node].LocalTraffic recognises it as a local pod's, and fromNode whether
// the node itself opens it. Both are false for connections from other machines. For
// values other than the constants it returns false.
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
