package ruleset

import (
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// Port is the compiled rule of one port of a Service in one family: everything that a backend needs to forward the
// port's packets. A published Port never changes and may be read from any goroutine.
type Port struct {
	// ID is a small positive number that stays with Key while the Service has the port. No two Ports of an [Engine]
	// share an ID. An ID is reused only after every attached backend has acknowledged the removal of its last owner.
	ID uint32
	// Key is Spec.Key.
	Key tracker.Key
	// Spec is the port as the Service declares it.
	Spec *tracker.ServicePort
	// Selection holds the selected endpoints: Selection.Cluster and Selection.Local
	// are the two pools of a [Frontend].
	Selection tracker.Selection
	// Endpoints holds every known endpoint of the port, including those outside the pools, such as a terminating one
	// that still serves its connections. It is shared with the tracker.
	Endpoints []*tracker.Endpoint
	// Frontends holds the addresses of the port: the cluster IP first, then
	// external IPs, load-balancer IPs and the NodePort. No two have the same address
	// and port.
	Frontends []Frontend
	// LeftOut is what the Engine's [Budget] and the backend's [Limits] leave out of the port, or nil. A difference in
	// it alone is no change.
	LeftOut *LeftOut

	// uniform reports whether all of Endpoints have the same weight. It is false in a Port that was not made by
	// Compile.
	uniform bool
}

// Pool returns the endpoints of target t: nil for others than [TargetCluster] and [TargetLocal].
func (s *Port) Pool(t Target) []*tracker.Endpoint {
	switch t {
	case TargetCluster:
		return s.Selection.Cluster
	case TargetLocal:
		return s.Selection.Local
	}
	return nil
}

// HasPool reports whether the pool of target t exists, that is, whether some traffic may use it. A pool that exists
// may be empty. HasPool returns false for other targets than [TargetCluster] and [TargetLocal], and for a nil Port.
func (s *Port) HasPool(t Target) bool {
	switch {
	case s == nil:
		return false
	case t == TargetCluster:
		return s.Selection.UsesCluster
	}
	return t == TargetLocal && s.Selection.UsesLocal
}

// Frontend is one address and port of a Service, and what happens to new connections there. The protocol is the
// Service's Key.Protocol.
//
// A connection that Sources does not admit is dropped. Otherwise Internal applies to connections from this node's
// pods and the node itself, and Target to all others. Masquerade determines whether the source address is replaced.
// It is always replaced if the chosen endpoint is the source of the connection (hairpin).
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
	// Internal is the target of connections from this node's pods ([Node].LocalTraffic) and from the node itself. It
	// differs from Target only under externalTrafficPolicy Local: such connections may use every endpoint.
	Internal Target
	// Masquerade determines which connections get a new source address.
	Masquerade Masquerade
}

// ShortCircuit reports whether the frontend handles connections from this node's pods and from the node itself
// differently from others.
func (f *Frontend) ShortCircuit() bool { return f.Masquerade == MasqueradeNode }

// TargetFor returns Internal for connections from this node's pods or the node itself (internal), and otherwise
// Target.
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
	KindClusterIP Kind = iota + 1
	KindExternalIP
	KindLoadBalancerIP
	KindNodePort
	// kindHealthCheck is the kind of a health-check node port, which is no frontend.
	kindHealthCheck
)

// String returns "cluster IP", "external IP", "load-balancer IP" or "node port".
func (k Kind) String() string {
	switch k {
	case KindClusterIP:
		return "cluster IP"
	case KindExternalIP:
		return "external IP"
	case KindLoadBalancerIP:
		return "load-balancer IP"
	case KindNodePort:
		return "node port"
	}
	return "unknown kind"
}

// Target is what happens to a connection.
type Target uint8

const (
	// TargetCluster sends the connection to one of [tracker.Selection].Cluster, which is
	// not empty.
	TargetCluster Target = iota + 1
	// TargetLocal sends the connection to one of [tracker.Selection].Local, which is not
	// empty.
	TargetLocal
	// TargetReject refuses the connection (ICMP port unreachable): no node has an endpoint.
	TargetReject
	// TargetDrop drops the connection silently: only other nodes have endpoints that the traffic policy allows, and a
	// load balancer should try another node.
	TargetDrop
)

// String returns "cluster endpoints", "local endpoints", "reject" or "drop".
func (t Target) String() string {
	switch t {
	case TargetCluster:
		return "cluster endpoints"
	case TargetLocal:
		return "local endpoints"
	case TargetReject:
		return "reject"
	case TargetDrop:
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
	// MasqueradeNotPods replaces sources that [Node].LocalTraffic does not recognize:
	// for cluster IPs used from other machines or by the node itself.
	MasqueradeNotPods
	// MasqueradeNode replaces only the source of connections from the node itself,
	// unless [Node].LocalTraffic recognizes it as a pod: for external traffic under a
	// policy of Local.
	MasqueradeNode
)

// Applies reports whether the source of a connection is replaced. fromPod reports whether [Node].LocalTraffic
// recognizes it as a local pod's, and fromNode whether the node itself opens it.
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
