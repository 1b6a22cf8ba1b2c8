package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// collector is a [prometheus.Collector] that does not describe its metrics in advance.
type collector func(chan<- prometheus.Metric)

func (collector) Describe(chan<- *prometheus.Desc)       {}
func (c collector) Collect(out chan<- prometheus.Metric) { c(out) }

// WatchCounters exports the packet counters that read returns, by the names of kube-proxy's
// accounting objects, as iptables.Backend.Counters does. Each scrape calls read. Missing counters, and counters that
// cannot be read, are left out. WatchCounters must be called at most once.
func (s *Set) WatchCounters(read func() (map[string]uint64, error)) {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("kubeproxy_iptables_"+name, help, nil, nil)
	}
	descs := map[string]*prometheus.Desc{
		"ct_state_invalid_dropped_pkts": desc("ct_state_invalid_dropped_packets_total", "Packets that were dropped because connection tracking took them for invalid"),
		"localhost_nps_accepted_pkts":   desc("localhost_nodeports_accepted_packets_total", "Connections to NodePorts at loopback addresses, by their first packets"),
	}
	s.registry.MustRegister(collector(func(out chan<- prometheus.Metric) {
		packets, err := read()
		if err != nil {
			return // an error here would suppress all other metrics
		}
		for what, n := range packets {
			if d := descs[what]; d != nil {
				out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n))
			}
		}
	}))
}

// CountResets adds counters for vanished endpoints whose connections package reset ended,
// for the node's own sockets that it destroyed, and for addresses of Services whose
// connections it left alone because of the limit. It returns the functions that add to
// them, for the hooks Ended and Limited of package reset. CountResets must be called at most once.
func (s *Set) CountResets() (ended func(endpoints, sockets int), limited func(n int)) {
	endpointsEnded := counter(s.registry, "proxier_vanished_endpoints_total", "Endpoints that were gone without having terminated, and whose TCP connections were ended").WithLabelValues()
	destroyed := counter(s.registry, "proxier_vanished_endpoints_destroyed_sockets_total", "Sockets of the node's processes that were destroyed because their endpoint was gone").WithLabelValues()
	gaveWay := counter(s.registry, "proxier_vanished_endpoints_limited_total", "Addresses of Services whose connections to an endpoint that was gone were left alone because there were too many").WithLabelValues()
	ended = func(endpoints, sockets int) {
		endpointsEnded.Add(float64(endpoints))
		destroyed.Add(float64(sockets))
	}
	return ended, func(n int) { gaveWay.Add(float64(n)) }
}

// WatchLocalhostNodePorts adds the metrics of a data plane in userspace that serves NodePorts at loopback addresses, in
// the families that are served there. listeners returns the current number of listening sockets in a
// family; it must be safe for concurrent use. WatchLocalhostNodePorts must be called at most
// once. It returns functions, which are safe for concurrent use: failed counts a failure to listen, and rejected a
// connection or datagram, of TCP or UDP, that could not be forwarded.
func (s *Set) WatchLocalhostNodePorts(families []tracker.Family, listeners func(tracker.Family) int) (failed func(tracker.Family), rejected func(tracker.Family, v1.Protocol)) {
	failures := counter(s.registry, "kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total", "Failures to listen for a NodePort at a loopback address", familyLabel)
	rejects := counter(s.registry, "kubeproxy_nftables_localhost_nodeport_rejected_packets_total", "TCP connections and UDP datagrams to NodePorts at loopback addresses that were accepted but could not be forwarded", familyLabel, "protocol")
	for _, f := range families {
		promauto.With(s.registry).NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: "kubeproxy", Name: "nftables_localhost_nodeport_listeners",
			Help:        "Sockets that listen for NodePorts at loopback addresses",
			ConstLabels: prometheus.Labels{familyLabel: f.String()},
		}, func() float64 { return float64(listeners(f)) })
		failures.WithLabelValues(f.String())
		for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			rejects.WithLabelValues(f.String(), string(p))
		}
	}
	return func(f tracker.Family) { failures.WithLabelValues(f.String()).Inc() },
		func(f tracker.Family, p v1.Protocol) { rejects.WithLabelValues(f.String(), string(p)).Inc() }
}
