package metrics

import (
	"sync"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// noLocal counts the Service ports that some node has endpoints for, and whose
// traffic policy wants local ones of which there are none.
type noLocal struct {
	mu    sync.Mutex
	ports map[tracker.Key]lacks
}

// lacks is which traffic of a port finds no local endpoint.
type lacks struct{ internal, external bool }

func newNoLocal() *noLocal { return &noLocal{ports: map[tracker.Key]lacks{}} }

func lacksOf(s *ruleset.Service) lacks {
	if s == nil || !s.Selection.HasAny || len(s.Selection.Local) != 0 {
		return lacks{}
	}
	return lacks{
		internal: s.Port.InternalLocal,
		external: s.Port.ExternalLocal && s.Port.ExternallyAccessible(),
	}
}

// apply costs a step for each change.
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

// count costs a step for each port that is counted.
func (n *noLocal) count(f tracker.Family) (internal, external int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for key, l := range n.ports {
		if key.Family != f {
			continue
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
