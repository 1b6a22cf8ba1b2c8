package model

import (
	"math/bits"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// room is the department of the sizes of sets.
type room struct {
	// count holds each set's number of elements in the transactions that were sent, and size the
	// largest number.
	count, size [layout.SetCount]int
	// fewSticky is set if the Services of the full delta may need more sticky pools than there are.
	fewSticky bool
}

// nodePortAddresses is the number of node addresses for which the sets of counters have room, for
// each NodePort.
const nodePortAddresses = 16

// newRoom returns sets with sizes for the Services in changes. A full delta fails as a whole if a set
// needs more.
func newRoom(c *common, changes []ruleset.Change, endpoints int) (r room) {
	var need [layout.SetCount]int
	need[layout.Hairpin] = endpoints
	var w wanted
	for i := range changes {
		if ch := &changes[i]; ch.New != nil && ch.Key.Family == c.family {
			c.demand(ch.New, &w, &need)
		}
	}
	if r.fewSticky = need[layout.StickyPools] > int(c.config.Sticky); r.fewSticky {
		// Services without a number of a sticky pool get pools of the other kind.
		for _, p := range [...]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP} {
			need[layout.EndpointsOf(p)] += need[layout.StickyBuckets]
		}
	}
	// Sets of allowed sources have no size. Otherwise each prefix length that a Service may begin to
	// use would need room for very many sources.
	for s := layout.ServiceIPs; s < layout.FirstAllowed; s++ {
		if !s.Interval() {
			r.size[s] = SizeFor(need[s])
		}
	}
	r.size[layout.StickyClients] = c.config.Clients
	r.size[layout.FastPathInterfaces] = 0 // the number of interfaces is not known
	for _, s := range layout.TrafficSets() {
		r.size[s] = SizeFor(need[layout.ServiceIPs] + nodePortAddresses*need[layout.NodePorts])
	}
	return r
}

// keptRoom and keptHairpin are the largest sizes that sets keep. An empty set of size keptRoom takes 6 MB of kernel
// memory (BenchmarkRoom of package nftables). A backend does not read a much larger set of hairpin connections.
const (
	keptRoom    = 1 << 18
	keptHairpin = 1 << 15
)

// KeepSizes makes sets as large as those of the table that this one replaces, up to a bound, so that a Service that
// needs many elements of different sets by turns does not cause a full delta each time. had returns the size of a set
// of that table, or 0.
func (r *room) KeepSizes(had func(layout.Set) int) {
	for s := layout.ServiceIPs; s < layout.FirstAllowed; s++ {
		most := keptRoom
		if s == layout.Hairpin {
			most = keptHairpin
		}
		if r.size[s] != 0 && s != layout.StickyClients {
			r.size[s] = max(r.size[s], min(had(s), most))
		}
	}
}

// demand adds the largest number of elements of each set that the Service needs to need. w is a buffer.
func (c *common) demand(s *ruleset.Port, w *wanted, need *[layout.SetCount]int) {
	w.setVersion(s).addFrontends(inet.Protocol(s.Key.Protocol))
	cluster, local := &w.pools[ruleset.TargetCluster], &w.pools[ruleset.TargetLocal]
	buckets := cluster.size + local.size
	if w.affinity != 0 {
		need[layout.StickyPools] += len(targets)
		need[layout.StickyHandlers] += len(targets)
		need[layout.StickyBuckets] += buckets
		need[layout.StickyEndpoints] += len(cluster.endpoints) + len(local.endpoints)
	} else {
		need[layout.EndpointsOf(w.key.Protocol)] += buckets
	}
	for i := range w.elements {
		need[w.elements[i].Set]++
	}
	// A frontend may get a handler of its own for internal traffic.
	need[layout.InternalIPs], need[layout.InternalNodePorts] = need[layout.ServiceIPs], need[layout.NodePorts]
	for _, ep := range w.reachable {
		if c.mayBeHere(ep) {
			need[layout.Hairpin]++
		}
	}
}

// SizeFor returns the size of a set for n elements. The kernel accepts no more elements than
// the size, and finds elements faster in a set with a size.
func SizeFor(n int) int {
	return max(1<<12, 1<<bits.Len(uint(2*n)))
}

// countElement counts an element that is sent. The model does not count the elements of interval sets and
// remembered clients.
func (r *room) countElement(e *Edit) {
	switch {
	case e.Set.Interval() || e.Set == layout.StickyClients:
	case e.Deletion:
		r.count[e.Set]--
	default:
		r.count[e.Set]++
	}
}

// setCount records that a set has n elements from the start.
func (r *room) setCount(s layout.Set, n int) { r.count[s] = n }

// overflows reports whether a set has more elements than its size.
func (r *room) overflows() bool {
	for s, size := range r.size {
		if size != 0 && r.count[s] > size {
			return true
		}
	}
	return false
}

// Size returns a set's largest number of elements, 0 for any number.
func (r *room) Size(s layout.Set) int { return r.size[s] }

// Count returns a set's number of elements.
func (r *room) Count(s layout.Set) int { return r.count[s] }
