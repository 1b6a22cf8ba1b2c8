package metrics

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

const (
	familyLabel = "ip_family"
	policyLabel = "traffic_policy"
	tableLabel  = "table"
)

// Config is what a Set is made of.
type Config struct {
	// Mode is the proxy mode: some metrics are of one mode alone.
	Mode string
	// Families is the address families that are served.
	Families []tracker.Family
	// Now is the clock. Nil means [time.Now].
	Now func() time.Time
}

// Set is the agent's metrics. Its methods are safe for concurrent use.
type Set struct {
	cfg      Config
	registry *prometheus.Registry

	syncDuration, fullDuration, partialDuration, latency, conntrackDuration *prometheus.HistogramVec
	lastSync, lastQueued, endpointsPending, servicesPending, noLocal        *prometheus.GaugeVec
	endpointChanges, serviceChanges, conntrackDeleted                       *prometheus.CounterVec
	syncFailures, cleanupFailures                                           *prometheus.CounterVec
	rules, rulesWritten                                                     *prometheus.GaugeVec
	healthz, livez                                                          *prometheus.CounterVec

	noEndpoint *noLocal
	slis       slis
}

// NewSet returns a Set with everything at 0.
func NewSet(c Config) *Set {
	if c.Now == nil {
		c.Now = time.Now
	}
	s := &Set{cfg: c, registry: prometheus.NewRegistry(), noEndpoint: newNoLocal(), slis: newSLIs()}
	s.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	durations := prometheus.ExponentialBuckets(0.001, 2, 15)
	s.syncDuration = s.histogram("sync_proxy_rules_duration_seconds", "How long a sync of the rules took", durations)
	s.fullDuration = s.histogram("sync_full_proxy_rules_duration_seconds", "How long a sync of all rules took", durations)
	s.partialDuration = s.histogram("sync_partial_proxy_rules_duration_seconds", "How long a sync of changed rules took", durations)
	s.latency = s.histogram("network_programming_duration_seconds", "Time from when a change of endpoints was caused to when it was in effect", latencyBuckets())
	s.conntrackDuration = s.histogram("conntrack_reconciler_sync_duration_seconds", "How long a clean-up of stale UDP flows took", durations)

	s.lastSync = s.gauge("sync_proxy_rules_last_timestamp_seconds", "When the rules were last in agreement", familyLabel)
	s.lastQueued = s.gauge("sync_proxy_rules_last_queued_timestamp_seconds", "When a sync was last asked for", familyLabel)
	s.endpointsPending = s.gauge("sync_proxy_rules_endpoint_changes_pending", "Changes of endpoints that are not in effect", familyLabel)
	s.servicesPending = s.gauge("sync_proxy_rules_service_changes_pending", "Changes of Services that are not in effect", familyLabel)
	s.noLocal = s.gauge("sync_proxy_rules_no_local_endpoints_total", "Service ports with a traffic policy of Local that have endpoints, but none on this node", familyLabel, policyLabel)
	s.endpointChanges = s.counter("sync_proxy_rules_endpoint_changes_total", "Changes of endpoints", familyLabel)
	s.serviceChanges = s.counter("sync_proxy_rules_service_changes_total", "Changes of Services", familyLabel)
	s.conntrackDeleted = s.counter("conntrack_reconciler_deleted_entries_total", "Stale UDP flows that were deleted", familyLabel)
	s.healthz = s.counter("proxy_healthz_total", "Answers of /healthz, by status code", "code")
	s.livez = s.counter("proxy_livez_total", "Answers of /livez, by status code", "code")
	switch c.Mode {
	case "nftables":
		s.syncFailures = s.counter("sync_proxy_rules_nftables_sync_failures_total", "Syncs that failed", familyLabel)
		s.cleanupFailures = s.counter("sync_proxy_rules_nftables_cleanup_failures_total", "Removals of what is no longer needed that failed", familyLabel)
	case "iptables":
		s.syncFailures = s.counter("sync_proxy_rules_iptables_restore_failures_total", "Syncs that failed", familyLabel)
		s.rules = s.gauge("sync_proxy_rules_iptables_total", "Rules that there are", familyLabel, tableLabel)
		s.rulesWritten = s.gauge("sync_proxy_rules_iptables_last", "Rules that the last sync wrote", familyLabel, tableLabel)
	}
	s.eachFamily(func(f string) {
		for _, v := range []*prometheus.GaugeVec{s.lastSync, s.lastQueued, s.endpointsPending, s.servicesPending} {
			v.WithLabelValues(f)
		}
		for _, v := range []*prometheus.CounterVec{s.endpointChanges, s.serviceChanges, s.conntrackDeleted, s.syncFailures, s.cleanupFailures} {
			if v != nil {
				v.WithLabelValues(f)
			}
		}
		s.noLocal.WithLabelValues(f, "internal")
		s.noLocal.WithLabelValues(f, "external")
	})
	return s
}

// latencyBuckets is kube-proxy's for network_programming_duration_seconds.
func latencyBuckets() []float64 {
	out := []float64{0.25, 0.5}
	out = append(out, prometheus.LinearBuckets(1, 1, 59)...)
	out = append(out, prometheus.LinearBuckets(60, 5, 12)...)
	return append(out, prometheus.LinearBuckets(120, 30, 7)...)
}

func (s *Set) histogram(name, help string, buckets []float64) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kubeproxy", Name: name, Help: help, Buckets: buckets}, []string{familyLabel})
	s.registry.MustRegister(v)
	return v
}

func (s *Set) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "kubeproxy", Name: name, Help: help}, labels)
	s.registry.MustRegister(v)
	return v
}

func (s *Set) counter(name, help string, labels ...string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kubeproxy", Name: name, Help: help}, labels)
	s.registry.MustRegister(v)
	return v
}

func (s *Set) eachFamily(f func(family string)) {
	for _, family := range s.cfg.Families {
		f(family.String())
	}
}

// Registry is where all of it is registered.
func (s *Set) Registry() *prometheus.Registry { return s.registry }

// Handler serves the metrics.
func (s *Set) Handler() http.Handler {
	return promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{EnableOpenMetrics: true})
}

// ServiceChanged says that a Service was handed in, or its deletion, and made a
// difference.
func (s *Set) ServiceChanged() {
	s.eachFamily(func(f string) {
		s.serviceChanges.WithLabelValues(f).Inc()
		s.servicesPending.WithLabelValues(f).Inc()
	})
}

// EndpointsChanged says the same of an EndpointSlice of a family, by its address
// type; "" is every family.
func (s *Set) EndpointsChanged(addressType string) {
	s.eachFamily(func(f string) {
		if addressType == "" || addressType == f {
			s.endpointChanges.WithLabelValues(f).Inc()
			s.endpointsPending.WithLabelValues(f).Inc()
		}
	})
}

// Answered fits [health.ProxyConfig].
func (s *Set) Answered(c health.Check, code int) {
	v := s.healthz
	if c == health.Livez {
		v = s.livez
	}
	v.WithLabelValues(strconv.Itoa(code)).Inc()
	s.slis.observe(rulesCheck, c, code)
}

// Rules notes how many rules a table of iptables has, and how many the last sync
// wrote there. In other modes it does nothing.
func (s *Set) Rules(f tracker.Family, table string, total, written int) {
	if s.rules != nil {
		s.rules.WithLabelValues(f.String(), table).Set(float64(total))
		s.rulesWritten.WithLabelValues(f.String(), table).Set(float64(written))
	}
}

// Queued fits [runner.Trace].
func (s *Set) Queued(at time.Time) {
	s.eachFamily(func(f string) { s.lastQueued.WithLabelValues(f).Set(seconds(at)) })
}

// Starting says that what is pending is being taken by a sync.
func (s *Set) Starting(runner.Info) {
	s.eachFamily(func(f string) {
		s.endpointsPending.WithLabelValues(f).Set(0)
		s.servicesPending.WithLabelValues(f).Set(0)
	})
}

// Synced fits [ruleset.Cursor.OnSync], of the cursor of the rules.
func (s *Set) Synced(i ruleset.SyncInfo) {
	s.eachFamily(func(f string) {
		if i.Err != nil && s.syncFailures != nil {
			s.syncFailures.WithLabelValues(f).Inc()
		}
		if !i.Applied {
			if i.Err == nil {
				s.lastSync.WithLabelValues(f).Set(seconds(s.cfg.Now()))
			}
			return
		}
		took := i.Took.Seconds()
		s.syncDuration.WithLabelValues(f).Observe(took)
		if i.Full {
			s.fullDuration.WithLabelValues(f).Observe(took)
		} else {
			s.partialDuration.WithLabelValues(f).Observe(took)
		}
		if i.Err == nil {
			s.lastSync.WithLabelValues(f).Set(seconds(s.cfg.Now()))
		}
	})
}

// CleanupFailed says that something that is no longer needed could not be removed.
func (s *Set) CleanupFailed() {
	if s.cleanupFailures != nil {
		s.eachFamily(func(f string) { s.cleanupFailures.WithLabelValues(f).Inc() })
	}
}

// Flushed fits FlushedFamily of [conntrack.Trace].
func (s *Set) Flushed(f tracker.Family, i conntrack.Info) {
	s.conntrackDuration.WithLabelValues(f.String()).Observe(i.Duration.Seconds())
	s.conntrackDeleted.WithLabelValues(f.String()).Add(float64(i.Deleted))
}

// Apply takes note of a delta that is in effect, as [ruleset.Backend] says: it is
// for a cursor that is synced after the rules' was. It never fails.
func (s *Set) Apply(_ context.Context, d *ruleset.Delta) error {
	s.noEndpoint.apply(d)
	for _, f := range s.cfg.Families {
		internal, external := s.noEndpoint.count(f)
		s.noLocal.WithLabelValues(f.String(), "internal").Set(float64(internal))
		s.noLocal.WithLabelValues(f.String(), "external").Set(float64(external))
	}
	if len(d.Triggers) == 0 {
		return nil
	}
	families := map[types.NamespacedName]map[tracker.Family]bool{}
	for i := range d.Changes {
		key := d.Changes[i].Key
		if families[key.NamespacedName] == nil {
			families[key.NamespacedName] = map[tracker.Family]bool{}
		}
		families[key.NamespacedName][key.Family] = true
	}
	now := s.cfg.Now()
	for _, t := range d.Triggers {
		for _, f := range s.cfg.Families {
			if known := families[t.Service]; known != nil && !known[f] {
				continue
			}
			for _, at := range t.Times {
				s.latency.WithLabelValues(f.String()).Observe(max(now.Sub(at).Seconds(), 0))
			}
		}
	}
	return nil
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }
