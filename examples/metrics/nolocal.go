package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// noLocal counts the Service ports with a traffic policy of Local that have endpoints, but
// none on this node.
type noLocal struct {
	*prometheus.GaugeVec
	// byService counts a Service once in each family, whatever the number of its ports.
	byService bool
	ports     map[lacking]int
}

// lacking is a port, or a Service in a family, whose traffic of a policy finds no local endpoint.
type lacking struct {
	tracker.Key
	policy string
}

// apply takes time proportional to the number of changes.
func (n *noLocal) apply(d *ruleset.Delta) {
	if d.Full {
		for l := range n.ports {
			n.WithLabelValues(l.Family.String(), l.policy).Set(0)
		}
		clear(n.ports)
	}
	for i := range d.Changes {
		if !d.Full {
			n.add(d.Changes[i].Old, -1)
		}
		n.add(d.Changes[i].New, 1)
	}
}

// add adds delta to the counts of a port, which may be nil.
func (n *noLocal) add(p *ruleset.Port, delta int) {
	if p == nil || !p.Selection.HasAny || len(p.Selection.Local) != 0 {
		return
	}
	key := p.Key
	if n.byService {
		key.Port, key.Protocol = "", ""
	}
	if p.Spec.InternalLocal {
		n.count(lacking{key, "internal"}, delta)
	}
	if p.Spec.ExternalLocal && p.Spec.ExternallyAccessible() {
		n.count(lacking{key, "external"}, delta)
	}
}

func (n *noLocal) count(l lacking, delta int) {
	gauge := n.WithLabelValues(l.Family.String(), l.policy)
	switch n.ports[l] += delta; {
	case n.ports[l] == 0:
		delete(n.ports, l)
		gauge.Dec()
	case delta > 0 && n.ports[l] == 1:
		gauge.Inc()
	}
}
