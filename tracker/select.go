package tracker

import "slices"

// Select returns the endpoints of a Service port that a node may use. It is a pure
// function of its arguments and works for any node. It allocates only if it leaves
// out endpoints.
//
// Traffic under policy Cluster uses the ready endpoints. If every ready endpoint has
// node hints and at least one of them names the node, it uses those that name the
// node. Otherwise the same applies to zone hints and the node's zone. If no endpoint
// is ready, it uses the serving terminating endpoints on all nodes (KEP-1669).
//
// Traffic under policy Local uses the node's ready endpoints, whatever their hints.
// If there are none, it uses the node's serving terminating endpoints. As in
// kube-proxy, the two policies fall back independently.
//
// Select ignores [Endpoint.Weight]. p and the endpoints must not be nil.
func Select(p *ServicePort, eps []*Endpoint, node NodeInfo) Selection {
	s := Selection{UsesCluster: p.UsesClusterEndpoints(), UsesLocal: p.UsesLocalEndpoints()}
	if len(eps) == 0 {
		return s
	}

	var ready, serving, localReady, localServing int
	nodeHints, zoneHints := true, true // every ready endpoint so far has hints
	var hintedNode, hintedZone int     // endpoints hinted for this node or zone
	for _, e := range eps {
		switch {
		case e.Ready:
			ready++
			if e.IsLocal(node.Name) {
				localReady++
			}
			nodeHints = nodeHints && len(e.ForNodes) > 0
			if nodeHints && hinted(e.ForNodes, node.Name) {
				hintedNode++
			}
			zoneHints = zoneHints && len(e.ForZones) > 0
			if zoneHints && hinted(e.ForZones, node.Zone) {
				hintedZone++
			}
		case e.Serving && e.Terminating:
			serving++
			if e.IsLocal(node.Name) {
				localServing++
			}
		}
	}
	s.HasAny = ready > 0 || serving > 0

	var cluster, local kind
	clusterCount, localCount := 0, 0
	if s.UsesCluster {
		switch {
		case ready == 0:
			cluster, clusterCount = servingOnes, serving
		case nodeHints && hintedNode > 0:
			cluster, clusterCount = nodeOnes, hintedNode
		case zoneHints && hintedZone > 0:
			cluster, clusterCount = zoneOnes, hintedZone
		default:
			cluster, clusterCount = readyOnes, ready
		}
	}
	if s.UsesLocal {
		local, localCount = localReadyOnes, localReady
		if localReady == 0 {
			local, localCount = localServingOnes, localServing
		}
	}
	s.Cluster = pick(eps, clusterCount, func(e *Endpoint) bool { return cluster.has(e, &node) })
	s.Local = pick(eps, localCount, func(e *Endpoint) bool { return local.has(e, &node) })
	switch {
	case clusterCount == 0:
		s.Reachable = s.Local
	case localCount == 0:
		s.Reachable = s.Cluster
	default:
		either := func(e *Endpoint) bool { return cluster.has(e, &node) || local.has(e, &node) }
		n := 0
		for _, e := range eps {
			if either(e) {
				n++
			}
		}
		switch n {
		case clusterCount:
			s.Reachable = s.Cluster
		case localCount:
			s.Reachable = s.Local
		default:
			s.Reachable = pick(eps, n, either)
		}
	}
	return s
}

type kind uint8

const (
	none kind = iota
	readyOnes
	nodeOnes
	zoneOnes
	servingOnes
	localReadyOnes
	localServingOnes
)

func (k kind) has(e *Endpoint, node *NodeInfo) bool {
	switch k {
	case readyOnes:
		return e.Ready
	case nodeOnes:
		return e.Ready && hinted(e.ForNodes, node.Name)
	case zoneOnes:
		return e.Ready && hinted(e.ForZones, node.Zone)
	case servingOnes:
		return !e.Ready && e.Serving && e.Terminating
	case localReadyOnes:
		return e.Ready && e.IsLocal(node.Name)
	case localServingOnes:
		return !e.Ready && e.Serving && e.Terminating && e.IsLocal(node.Name)
	}
	return false
}

func hinted(hints []string, name string) bool {
	return name != "" && slices.Contains(hints, name)
}

func pick(eps []*Endpoint, n int, wanted func(*Endpoint) bool) []*Endpoint {
	switch n {
	case 0:
		return nil
	case len(eps):
		return eps
	}
	out := make([]*Endpoint, 0, n)
	for _, e := range eps {
		if wanted(e) {
			out = append(out, e)
		}
	}
	return out
}

// Selection holds the endpoints of a Service port that one node may use. Its slices keep the order of the slice
// passed to [Select] and may share memory with it and with each other. They must not be modified.
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
	// HasAny reports whether any node has a usable endpoint. If it is false, reject connections. If it is true and
	// the set is empty, drop them: another node may have an endpoint.
	HasAny bool
}
