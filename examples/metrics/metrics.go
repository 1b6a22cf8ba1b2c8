package metrics

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/ruleset"
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

	syncDuration, latency, conntrackDuration *prometheus.HistogramVec
	lastSync, lastQueued, noLocal            *prometheus.GaugeVec
	endpointsPending, servicesPending        prometheus.Gauge
	endpointChanges, serviceChanges          prometheus.Counter
	conntrackDeleted, syncFailures           *prometheus.CounterVec
	healthz, livez                           *prometheus.CounterVec
	// Metrics of some modes only, nil in the others.
	fullDuration, partialDuration    *prometheus.HistogramVec
	partialFailures, cleanupFailures *prometheus.CounterVec
	rules, rulesWritten              *prometheus.GaugeVec

	mu sync.Mutex
	// pending is the Services that changed since the last sync began.
	pending map[types.NamespacedName]struct{}

	noEndpoint *noLocal
	slis       slis
}

// NewSet returns a Set with everything at 0.
func NewSet(c Config) *Set {
	if c.Now == nil {
		c.Now = time.Now
	}
	s := &Set{
		cfg: c, registry: prometheus.NewRegistry(), pending: map[types.NamespacedName]struct{}{},
		// kube-proxy counts Services in this mode and their ports in the others.
		noEndpoint: newNoLocal(c.Mode == "ipvs"), slis: newSLIs(),
	}

	durations := prometheus.ExponentialBuckets(0.001, 2, 15)
	s.syncDuration = s.histogram("sync_proxy_rules_duration_seconds", "How long a sync of the rules took", durations)
	s.latency = s.histogram("network_programming_duration_seconds", "Time from when a change of endpoints was caused to when it was in effect", latencyBuckets())
	s.conntrackDuration = s.histogram("conntrack_reconciler_sync_duration_seconds", "How long a clean-up of stale UDP flows took", durations)

	s.lastSync = s.gauge("sync_proxy_rules_last_timestamp_seconds", "When the rules were last in agreement", familyLabel)
	s.lastQueued = s.gauge("sync_proxy_rules_last_queued_timestamp_seconds", "When a sync was last asked for", familyLabel)
	s.endpointsPending = s.gauge("sync_proxy_rules_endpoint_changes_pending", "Changes of EndpointSlices since the last sync began").WithLabelValues()
	s.servicesPending = s.gauge("sync_proxy_rules_service_changes_pending", "Services that changed since the last sync began").WithLabelValues()
	s.noLocal = s.gauge("sync_proxy_rules_no_local_endpoints_total", "Services with a traffic policy of Local that have endpoints, but none on this node", familyLabel, policyLabel)
	s.endpointChanges = s.counter("sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices that were received").WithLabelValues()
	s.serviceChanges = s.counter("sync_proxy_rules_service_changes_total", "Changes of Services that were received").WithLabelValues()
	s.conntrackDeleted = s.counter("conntrack_reconciler_deleted_entries_total", "Stale UDP flows that were deleted", familyLabel)
	s.healthz = s.counter("proxy_healthz_total", "Answers of /healthz, by status code", "code")
	s.livez = s.counter("proxy_livez_total", "Answers of /livez, by status code", "code")
	switch c.Mode {
	case "nftables":
		s.syncFailures = s.counter("sync_proxy_rules_nftables_sync_failures_total", "Syncs that failed", familyLabel)
		s.cleanupFailures = s.counter("sync_proxy_rules_nftables_cleanup_failures_total", "Removals of what is no longer needed that failed", familyLabel)
	default:
		s.syncFailures = s.counter("sync_proxy_rules_iptables_restore_failures_total", "Syncs that failed", familyLabel)
	}
	if c.Mode == "iptables" {
		s.partialFailures = s.counter("sync_proxy_rules_iptables_partial_restore_failures_total", "Syncs of changed rules only that failed", familyLabel)
		s.rules = s.gauge("sync_proxy_rules_iptables_total", "Rules that there are", familyLabel, tableLabel)
		s.rulesWritten = s.gauge("sync_proxy_rules_iptables_last", "Rules that the last sync wrote", familyLabel, tableLabel)
	}
	if c.Mode != "ipvs" {
		s.fullDuration = s.histogram("sync_full_proxy_rules_duration_seconds", "How long a sync of all rules took", durations)
		s.partialDuration = s.histogram("sync_partial_proxy_rules_duration_seconds", "How long a sync of changed rules only took", durations)
	}
	s.eachFamily(func(f string) {
		s.lastSync.WithLabelValues(f)
		s.lastQueued.WithLabelValues(f)
		for _, v := range []*prometheus.CounterVec{s.conntrackDeleted, s.syncFailures, s.partialFailures, s.cleanupFailures} {
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

// Registry returns the registry of this Set, without the metrics of the process.
func (s *Set) Registry() *prometheus.Registry { return s.registry }

// Handler serves the metrics of the Set and those of the process.
func (s *Set) Handler() http.Handler {
	return promhttp.HandlerFor(prometheus.Gatherers{s.registry, processGatherer()}, promhttp.HandlerOpts{})
}

// ReceiveService counts a Service that is received, or its deletion. It calls update
// once, which hands the Service in and reports whether that changed its ports. No
// [Set.Starting] comes between the two: the sync that a change triggers finds it counted.
func (s *Set) ReceiveService(name types.NamespacedName, update func() (changed bool)) {
	s.serviceChanges.Inc()
	s.mu.Lock()
	defer s.mu.Unlock()
	if update() {
		s.pending[name] = struct{}{}
		s.servicesPending.Set(float64(len(s.pending)))
	}
}

// ReceiveSlice counts an EndpointSlice that is received, or its deletion, and calls
// update as [Set.ReceiveService] does. Slices with an addressType that is not served are
// not counted; "" means that it is not known.
func (s *Set) ReceiveSlice(addressType string, update func() (changed bool)) {
	served := addressType == ""
	s.eachFamily(func(f string) { served = served || f == addressType })
	if served {
		s.endpointChanges.Inc()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if update() && served {
		s.endpointsPending.Inc()
	}
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

// Starting notes that a sync begins, which takes all changes that are pending.
func (s *Set) Starting() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.pending)
	s.servicesPending.Set(0)
	s.endpointsPending.Set(0)
}

// Applied counts err, the result of having a backend apply d, if it is a failure:
// [ruleset.ErrNeedFull] itself only asks for the full state.
func (s *Set) Applied(d *ruleset.Delta, err error) {
	if err == nil || err == ruleset.ErrNeedFull || errors.Is(err, context.Canceled) {
		return
	}
	partial := (*ruleset.PartialError)(nil)
	some := !errors.Is(err, ruleset.ErrNeedFull) && errors.As(err, &partial)
	failed := map[tracker.Family]bool{}
	if some {
		for key := range partial.Failed {
			failed[key.Family] = true
		}
	}
	for _, f := range s.cfg.Families {
		if some && !failed[f] {
			continue
		}
		s.syncFailures.WithLabelValues(f.String()).Inc()
		if s.partialFailures != nil && !d.Full {
			s.partialFailures.WithLabelValues(f.String()).Inc()
		}
	}
}

// Synced fits [ruleset.Cursor.OnSync], of the cursor of the rules.
func (s *Set) Synced(i ruleset.SyncInfo) {
	s.eachFamily(func(f string) {
		if !i.Applied {
			if i.Err == nil {
				s.lastSync.WithLabelValues(f).Set(seconds(s.cfg.Now()))
			}
			return
		}
		took := i.Took.Seconds()
		s.syncDuration.WithLabelValues(f).Observe(took)
		switch {
		case s.fullDuration == nil:
		case i.Full:
			s.fullDuration.WithLabelValues(f).Observe(took)
		default:
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
