package tracker

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/listdiff"
)

// Recompute makes the next Take call [Config.OnServiceEndpoint] again for the endpoints on the named
// nodes, and reports whether there are any. It is for hooks whose result depends on the endpoint's
// Node, for example a weight by the Node's labels or capacity. The caller first stores the new facts
// where the hook reads them, and then calls Recompute, without holding a lock that the hook takes.
//
// The node of an endpoint is the Node field that the hook gets. The name "" stands for
// endpoints without a node.
//
// Take calls the hook once for each of these endpoints, however many calls of Recompute came before,
// and returns a Service only if a result differs. Its cost is proportional to the endpoints of the
// Services that have endpoints on these nodes. The first call visits all endpoints: it creates an index
// of about 60 bytes for each pair of a node and a Service with endpoints on it.
//
// Recompute does not call OnService and OnEndpoint, whose API objects the tracker does not keep. If
// their results depend on a Node, the caller sets the Services or slices again.
func (t *Tracker) Recompute(nodes ...string) (changed bool) {
	return t.change(func() bool {
		t.indexNodes()
		for _, n := range nodes {
			changed = t.markStale(n) || changed
		}
		return changed
	})
}

// RecomputeAll is [Tracker.Recompute] for all endpoints. It is for hooks that depend on the Node of
// the proxy itself.
func (t *Tracker) RecomputeAll() (changed bool) {
	return t.change(func() bool {
		t.indexNodes()
		for n := range t.onNode {
			changed = t.markStale(n) || changed
		}
		return changed
	})
}

// markStale marks the results of the hook for endpoints on the node as stale. It reports
// whether there are any.
func (t *Tracker) markStale(node string) bool {
	if len(t.onNode[node]) == 0 {
		return false
	}
	if t.stale == nil {
		t.stale = map[string]struct{}{}
	}
	t.stale[node] = struct{}{}
	return true
}

// indexNodes fills t.onNode, if it is nil, from the results of the hook.
func (t *Tracker) indexNodes() {
	if t.onNode != nil {
		return
	}
	t.onNode = map[string]map[types.NamespacedName]int{}
	for name, ports := range t.completed {
		for _, p := range ports {
			t.move(name, nil, p.in)
		}
	}
}

// move records in t.onNode that one port of a Service has the endpoints now instead of was.
func (t *Tracker) move(service types.NamespacedName, was, now []*Endpoint) {
	if t.onNode == nil {
		return
	}
	was, now = listdiff.Trim(was, now)
	for _, e := range now {
		if t.onNode[e.Node] == nil {
			t.onNode[e.Node] = map[types.NamespacedName]int{}
		}
		t.onNode[e.Node][service]++
	}
	for _, e := range was {
		on := t.onNode[e.Node]
		if on[service]--; on[service] == 0 {
			delete(on, service)
		}
		if len(on) == 0 {
			delete(t.onNode, e.Node)
		}
	}
}

// staleServices returns the Services with endpoints for which the hook must be called again.
func (t *Tracker) staleServices() map[types.NamespacedName]struct{} {
	var out map[types.NamespacedName]struct{}
	for n := range t.stale {
		for service := range t.onNode[n] {
			if out == nil {
				out = map[types.NamespacedName]struct{}{}
			}
			out[service] = struct{}{}
		}
	}
	return out
}
