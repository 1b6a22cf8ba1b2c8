package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-proxier/proxier/iptables"
)

// counters exports what rules of iptables have counted, in objects that the kernel
// keeps: it is read when it is asked for. Those that there are not, or that cannot be
// read, are left out.
type counters struct {
	read  func() ([]iptables.Counter, error)
	descs map[string]*prometheus.Desc
}

// WatchCounters has the counters exported that read returns, each time anew.
func (s *Set) WatchCounters(read func() ([]iptables.Counter, error)) {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("kubeproxy_iptables_"+name, help, nil, nil)
	}
	s.registry.MustRegister(counters{read, map[string]*prometheus.Desc{
		iptables.InvalidDropped:     desc("ct_state_invalid_dropped_packets_total", "Packets that were dropped because connection tracking took them for invalid"),
		iptables.LocalhostNodePorts: desc("localhost_nodeports_accepted_packets_total", "Connections to NodePorts at loopback addresses, by their first packets"),
	}})
}

// Describe implements [prometheus.Collector].
func (c counters) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		out <- d
	}
}

// Collect implements [prometheus.Collector].
func (c counters) Collect(out chan<- prometheus.Metric) {
	list, err := c.read()
	if err != nil {
		return // an error here would take all other metrics along
	}
	for _, n := range list {
		if d := c.descs[n.Name]; d != nil {
			out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n.Packets))
		}
	}
}
