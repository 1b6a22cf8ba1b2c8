package metrics

import "github.com/prometheus/client_golang/prometheus"

// Counted identifies a packet counter of iptables rules.
type Counted uint8

const (
	// InvalidDropped counts packets that are dropped because connection tracking marks them
	// as invalid.
	InvalidDropped Counted = iota + 1
	// LocalhostNodePorts counts the first packets of connections to NodePorts at loopback
	// addresses.
	LocalhostNodePorts
)

// counters exports packet counters of iptables rules, which the kernel holds. Each scrape
// reads them. Missing counters, and counters that cannot be read, are left out.
type counters struct {
	read  func() (map[Counted]uint64, error)
	descs map[Counted]*prometheus.Desc
}

// WatchCounters exports the packet counters that read returns. Each scrape calls read.
// WatchCounters must be called at most once.
func (s *Set) WatchCounters(read func() (map[Counted]uint64, error)) {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("kubeproxy_iptables_"+name, help, nil, nil)
	}
	s.registry.MustRegister(counters{read, map[Counted]*prometheus.Desc{
		InvalidDropped:     desc("ct_state_invalid_dropped_packets_total", "Packets that were dropped because connection tracking took them for invalid"),
		LocalhostNodePorts: desc("localhost_nodeports_accepted_packets_total", "Connections to NodePorts at loopback addresses, by their first packets"),
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
	packets, err := c.read()
	if err != nil {
		return // an error here would suppress all other metrics
	}
	for what, n := range packets {
		if d := c.descs[what]; d != nil {
			out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n))
		}
	}
}
