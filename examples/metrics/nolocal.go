package metrics

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// noLocal counts the Service ports with a traffic policy of Local that have endpoints, but
// none on this node.
type noLocal struct {
	// byService counts a Service once in each family, whatever the number of its ports.
	byService bool

	mu    sync.Mutex
	ports map[tracker.Key]lacks
}

// lacks records which traffic of a port finds no local endpoint.
type lacks struct{ internal, external bool }

func newNoLocal(byService bool) *noLocal {
	return &noLocal{byService: byService, ports: map[tracker.Key]lacks{}}
}

func lacksOf(s *ruleset.Port) lacks {
	if s == nil || !s.Selection.HasAny || len(s.Selection.Local) != 0 {
		return lacks{}
	}
	return lacks{
		internal: s.Spec.InternalLocal,
		external: s.Spec.ExternalLocal && s.Spec.ExternallyAccessible(),
	}
}

// apply takes time proportional to the number of changes.
func (n *noLocal) apply(d *ruleset.Delta) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.Full {
		clear(n.ports)
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		if l := lacksOf(c.New); l != (lacks{}) {
			n.ports[c.Key] = l
		} else {
			delete(n.ports, c.Key)
		}
	}
}

// count takes time proportional to the number of counted ports.
func (n *noLocal) count(f tracker.Family) (internal, external int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	services := map[types.NamespacedName]lacks{}
	for key, l := range n.ports {
		if key.Family != f {
			continue
		}
		if n.byService {
			seen := services[key.NamespacedName]
			services[key.NamespacedName] = lacks{seen.internal || l.internal, seen.external || l.external}
			l = lacks{l.internal && !seen.internal, l.external && !seen.external}
		}
		if l.internal {
			internal++
		}
		if l.external {
			external++
		}
	}
	return internal, external
}
