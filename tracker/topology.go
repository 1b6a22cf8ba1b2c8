package tracker

// TopologyMode is the kind of hint that restricted [Selection].Cluster.
type TopologyMode uint8

const (
	// TopologyAllEndpoints means that no hints were used.
	TopologyAllEndpoints TopologyMode = iota
	// TopologySameNode means endpoints hinted for this node (trafficDistribution
	// PreferSameNode, KEP-3015).
	TopologySameNode
	// TopologySameZone means endpoints hinted for this zone (trafficDistribution
	// PreferSameZone and topology aware routing, KEP-2433).
	TopologySameZone
)

// String returns "all", "same node" or "same zone".
func (m TopologyMode) String() string {
	switch m {
	case TopologySameNode:
		return "same node"
	case TopologySameZone:
		return "same zone"
	}
	return "all"
}

// TopologyOptions are options for [Select]. The zero value is kube-proxy's behavior.
type TopologyOptions struct {
	// IgnoreHints makes every node use endpoints on all nodes, whatever their hints.
	IgnoreHints bool
}

// Selection holds the endpoints of a Service port that one node may use. Its slices
// keep the order of the slice passed to [Select] and may share memory with it and
// with each other. They must not be modified.
type Selection struct {
	// Cluster holds the endpoints for traffic under policy Cluster, if UsesCluster.
	Cluster []*Endpoint
	// Local holds the endpoints for traffic under policy Local, if UsesLocal.
	Local []*Endpoint
	// Reachable is the union of Cluster and Local: every endpoint this node may
	// send a new connection to.
	Reachable []*Endpoint
	// UsesCluster and UsesLocal distinguish an unused set from an empty one.
	UsesCluster, UsesLocal bool
	// HasAny reports whether any node has a usable endpoint. If it is false, reject
	// connections. If it is true and the set is empty, drop them: another node may
	// have an endpoint.
	HasAny bool
	// Mode is the kind of hint that restricted Cluster.
	Mode TopologyMode
}
