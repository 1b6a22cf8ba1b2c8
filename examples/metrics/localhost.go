package metrics

import (
	v1 "k8s.io/api/core/v1"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-proxier/proxier/tracker"
)

// LoopbackMetrics holds the metrics of a data plane in userspace that serves NodePorts at
// loopback addresses. Its methods are safe for concurrent use.
type LoopbackMetrics struct {
	failures, rejected *prometheus.CounterVec
}

// WatchLocalhostNodePorts adds the metrics of NodePorts at loopback addresses, in the families
// that are served there. listeners returns the current number of listening sockets in a
// family; it must be safe for concurrent use. WatchLocalhostNodePorts must be called at most
// once.
func (s *Set) WatchLocalhostNodePorts(families []tracker.Family, listeners func(tracker.Family) int) *LoopbackMetrics {
	l := &LoopbackMetrics{
		failures: s.counter("nftables_localhost_nodeport_listener_creation_failures_total", "Failures to listen for a NodePort at a loopback address", familyLabel),
		rejected: s.counter("nftables_localhost_nodeport_rejected_packets_total", "TCP connections and UDP datagrams to NodePorts at loopback addresses that were accepted but could not be forwarded", familyLabel, "protocol"),
	}
	for _, f := range families {
		s.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: "kubeproxy", Name: "nftables_localhost_nodeport_listeners",
			Help:        "Sockets that listen for NodePorts at loopback addresses",
			ConstLabels: prometheus.Labels{familyLabel: f.String()},
		}, func() float64 { return float64(listeners(f)) }))
		l.failures.WithLabelValues(f.String())
		for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			l.rejected.WithLabelValues(f.String(), string(p))
		}
	}
	return l
}

// Failed counts a failure to listen.
func (l *LoopbackMetrics) Failed(f tracker.Family) { l.failures.WithLabelValues(f.String()).Inc() }

// Rejected counts a connection or datagram that could not be forwarded. The protocol must be
// TCP or UDP.
func (l *LoopbackMetrics) Rejected(f tracker.Family, p v1.Protocol) {
	l.rejected.WithLabelValues(f.String(), string(p)).Inc()
}
