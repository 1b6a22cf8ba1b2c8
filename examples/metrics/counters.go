package metrics

import "github.com/prometheus/client_golang/prometheus"

// Counted is something of which rules of iptables count the packets.
type Counted uint8

// What is counted.
const (
	// InvalidDropped is packets that are dropped as connection tracking takes them for
	// invalid.
	InvalidDropped Counted = iota + 1
	// LocalhostNodePorts is first packets of connections to NodePorts at loopback
	// addresses.
	LocalhostNodePorts
)

// counters exports what rules of iptables have counted, in objects that the kernel
// keeps: it is read when it is asked for. Those that there are not, or that cannot be
// read, are left out.
type counters struct {
	read  func() (map[Counted]uint64, error)
	descs map[Counted]*prometheus.Desc
}

// WatchCounters has the numbers of packets exported that read returns, each time anew.
// It is to be called once at most.
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
		return // an error here would take all other metrics along
	}
	for what, n := range packets {
		if d := c.descs[what]; d != nil {
			out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n))
		}
	}
}
