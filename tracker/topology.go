package tracker

// TopologyMode says which hints, if any, narrowed [Selection.Cluster].
type TopologyMode uint8

const (
	// AllEndpoints: no hints were used.
	AllEndpoints TopologyMode = iota
	// SameNode: endpoints hinted for this node (trafficDistribution
	// PreferSameNode, KEP-3015).
	SameNode
	// SameZone: endpoints hinted for this zone (trafficDistribution
	// PreferSameZone and topology aware routing, KEP-2433).
	SameZone
)

// String returns "all", "same node" or "same zone".
func (m TopologyMode) String() string {
	switch m {
	case SameNode:
		return "same node"
	case SameZone:
		return "same zone"
	}
	return "all"
}

// TopologyOptions changes how [Select] works. The zero value is kube-proxy's
// behaviour.
type TopologyOptions struct {
	// IgnoreHints makes every node use every endpoint.
	IgnoreHints bool
}

// Selection is what one node may use of a Service port's endpoints. Its slices
// may share memory with each other and with the slice given to [Select], keep
// its order, and must not be written to.
type Selection struct {
	// Cluster serves traffic under a policy of Cluster, if UsesCluster.
	Cluster []*Endpoint
	// Local serves traffic under a policy of Local, if UsesLocal.
	Local []*Endpoint
	// Reachable is the union of Cluster and Local: every endpoint this node may
	// send a new connection to.
	Reachable []*Endpoint
	// UsesCluster and UsesLocal tell an unused set from an empty one.
	UsesCluster, UsesLocal bool
	// HasAny reports whether any node could serve the port: false means refuse the
	// connection, true with an empty set means drop it, because another node may
	// have an endpoint where this one has none.
	HasAny bool
	// Mode is the topology that narrowed Cluster.
	Mode TopologyMode
}
