package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// noLocal counts the Service ports with a traffic policy of Local that have endpoints, but
// none on this node.
type noLocal struct {
	// byService counts a Service once in each family, whatever the number of its ports.
	byService bool
	families  []tracker.Family
	desc      *prometheus.Desc

	mu    sync.Mutex
	ports map[tracker.Key]lacks
}

// lacks records which traffic of a port finds no local endpoint.
type lacks struct{ internal, external bool }

func newNoLocal(byService bool, families []tracker.Family) *noLocal {
	return &noLocal{byService: byService, families: families, ports: map[tracker.Key]lacks{}, desc: prometheus.NewDesc(
		"kubeproxy_sync_proxy_rules_no_local_endpoints_total", "Services with a traffic policy of Local that have endpoints, but none on this node",
		[]string{familyLabel, "traffic_policy"}, nil)}
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

// collect exports the numbers.
func (n *noLocal) collect(out chan<- prometheus.Metric) {
	for _, f := range n.families {
		internal, external := n.count(f)
		out <- prometheus.MustNewConstMetric(n.desc, prometheus.GaugeValue, internal, f.String(), "internal")
		out <- prometheus.MustNewConstMetric(n.desc, prometheus.GaugeValue, external, f.String(), "external")
	}
}

// count takes time proportional to the number of counted ports.
func (n *noLocal) count(f tracker.Family) (internal, external float64) {
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
