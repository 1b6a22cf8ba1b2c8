package metrics

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

const (
	familyLabel = "ip_family"
	tableLabel  = "table"
)

// Config is the configuration of a Set. Mode and Families are required.
type Config struct {
	// Mode is the proxy mode: nftables, iptables, ipvs, userspace or kernelspace. Some metrics depend on it.
	Mode string
	// Families holds the served address families.
	Families []tracker.Family
}

// Set holds an agent's metrics. Its methods are safe for concurrent use.
type Set struct {
	cfg      Config
	registry *prometheus.Registry

	syncDuration, fullDuration, partialDuration *prometheus.HistogramVec
	latency, conntrackDuration                  *prometheus.HistogramVec
	lastSync, lastQueued, apiContact            *prometheus.GaugeVec
	rules, rulesWritten, otherRules             *prometheus.GaugeVec
	endpointsPending, servicesPending           prometheus.Gauge
	configInvalid                               prometheus.Gauge
	endpointChanges, serviceChanges, overBudget prometheus.Counter
	leftOut, conntrackDeleted, healthz, livez   *prometheus.CounterVec
	// failures, partialFailures and cleanupFailures are of syncs.
	failures, partialFailures, cleanupFailures *prometheus.CounterVec
	loadBalancerFailures                       map[string]*prometheus.CounterVec

	mu sync.Mutex
	// pending holds the Services that changed since the last sync began.
	pending map[types.NamespacedName]struct{}

	noLocal noLocal
	slis    slis
}

// NewSet returns a Set with all metrics at 0.
func NewSet(c Config) *Set {
	s := &Set{
		cfg: c, registry: prometheus.NewRegistry(), pending: map[types.NamespacedName]struct{}{}, slis: newSLIs(),
	}
	// A metric of other modes is not in the registry.
	all, of := s.registry, func(modes ...string) *prometheus.Registry {
		if slices.Contains(modes, c.Mode) {
			return s.registry
		}
		return prometheus.NewRegistry()
	}
	durations := prometheus.ExponentialBuckets(0.001, 2, 15)
	s.syncDuration = histogram(all, "sync_proxy_rules_duration_seconds", "Duration of a sync of the rules", durations)
	s.fullDuration = histogram(of("nftables", "iptables"), "sync_full_proxy_rules_duration_seconds", "Duration of a sync of all rules", durations)
	s.partialDuration = histogram(of("nftables", "iptables"), "sync_partial_proxy_rules_duration_seconds", "Duration of a sync of changed rules", durations)
	s.latency = histogram(all, "network_programming_duration_seconds", "Time from the cause of a change of endpoints until the change was in effect", latencyBuckets())
	s.conntrackDuration = histogram(all, "conntrack_reconciler_sync_duration_seconds", "Duration of a clean-up of stale UDP flows", durations)

	s.lastSync = gauge(all, "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "Time when the rules were last in effect", familyLabel)
	s.lastQueued = gauge(all, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "Time when a sync was last requested", familyLabel)
	s.endpointsPending = gauge(all, "kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Changes of EndpointSlices since the last sync began").WithLabelValues()
	s.servicesPending = gauge(all, "kubeproxy_sync_proxy_rules_service_changes_pending", "Services that changed since the last sync began").WithLabelValues()
	s.rules = gauge(of("iptables"), "kubeproxy_sync_proxy_rules_iptables_total", "Rules in the table", familyLabel, tableLabel)
	s.rulesWritten = gauge(of("iptables"), "kubeproxy_sync_proxy_rules_iptables_last", "Rules that the last sync wrote", familyLabel, tableLabel)
	s.otherRules = gauge(all, "proxier_other_proxy_rules", "1 while rules of another proxy are in the network namespace, whose owner runs (in-use) or has ended (left)", "proxy", "mode", "state")
	s.configInvalid = gauge(all, "proxier_configuration_file_invalid", "1 while the configuration file is invalid and the previous content is in effect").WithLabelValues()
	s.apiContact = gauge(all, "proxier_api_last_contact_timestamp_seconds", "Time when the API server last answered about a resource: the objects are as new as that", "resource")

	s.noLocal = noLocal{
		GaugeVec:  gauge(all, "kubeproxy_sync_proxy_rules_no_local_endpoints_total", "Services with a traffic policy of Local that have endpoints, but none on this node", familyLabel, "traffic_policy"),
		byService: c.Mode == "ipvs", // kube-proxy counts ports in the other modes
		ports:     map[lacking]int{},
	}

	s.endpointChanges = counter(all, "kubeproxy_sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices that were received").WithLabelValues()
	s.serviceChanges = counter(all, "kubeproxy_sync_proxy_rules_service_changes_total", "Changes of Services that were received, for each address family").WithLabelValues()
	s.overBudget = counter(all, "proxier_service_over_budget_total", "Service ports that are incomplete because they exceed the budget, each time that they change").WithLabelValues()
	s.leftOut = counter(all, "proxier_left_out_total", "Services, EndpointSlices and parts of them that are left out, each time that the object is received", "kind", "reason")
	s.conntrackDeleted = counter(all, "kubeproxy_conntrack_reconciler_deleted_entries_total", "Stale UDP flows that were deleted", familyLabel)
	s.healthz = counter(all, "kubeproxy_proxy_healthz_total", "Answers of /healthz, by status code", "code")
	s.livez = counter(all, "kubeproxy_proxy_livez_total", "Answers of /livez, by status code", "code")
	name := "iptables_restore"
	if c.Mode == "nftables" {
		name = "nftables_sync"
	}
	s.failures = counter(of("nftables", "iptables", "ipvs"), "kubeproxy_sync_proxy_rules_"+name+"_failures_total", "Syncs that failed", familyLabel)
	s.partialFailures = counter(of("iptables"), "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total", "Failed syncs of changed rules", familyLabel)
	s.cleanupFailures = counter(of("nftables"), "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total", "Failed removals of objects that are no longer needed", familyLabel)
	s.loadBalancerFailures = map[string]*prometheus.CounterVec{}
	for call, name := range map[string]string{"create": "create", "modify": "update", "delete": "delete"} {
		s.loadBalancerFailures[call] = counter(of("kernelspace"), "kubeproxy_sync_proxy_rules_winkernel_lb_"+name+"_failures_total", "Failed calls to "+call+" a load balancer", familyLabel, "lb_type", "error")
	}
	s.eachFamily(func(f string) {
		s.lastSync.WithLabelValues(f)
		s.lastQueued.WithLabelValues(f)
		s.conntrackDuration.WithLabelValues(f)
		s.noLocal.WithLabelValues(f, "internal")
		s.noLocal.WithLabelValues(f, "external")
		for _, v := range []*prometheus.CounterVec{s.conntrackDeleted, s.failures, s.partialFailures, s.cleanupFailures} {
			v.WithLabelValues(f)
		}
	})
	return s
}

// latencyBuckets returns kube-proxy's buckets for network_programming_duration_seconds.
func latencyBuckets() []float64 {
	out := []float64{0.25, 0.5}
	out = append(out, prometheus.LinearBuckets(1, 1, 59)...)
	out = append(out, prometheus.LinearBuckets(60, 5, 12)...)
	return append(out, prometheus.LinearBuckets(120, 30, 7)...)
}

func histogram(to *prometheus.Registry, name, help string, buckets []float64) *prometheus.HistogramVec {
	return promauto.With(to).NewHistogramVec(prometheus.HistogramOpts{Namespace: "kubeproxy", Name: name, Help: help, Buckets: buckets}, []string{familyLabel})
}

func gauge(to *prometheus.Registry, name, help string, labels ...string) *prometheus.GaugeVec {
	return promauto.With(to).NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
}

func counter(to *prometheus.Registry, name, help string, labels ...string) *prometheus.CounterVec {
	return promauto.With(to).NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func (s *Set) eachFamily(f func(family string)) {
	for _, family := range s.cfg.Families {
		f(family.String())
	}
}

// Registry returns the registry of this Set, without the metrics of the process.
func (s *Set) Registry() *prometheus.Registry { return s.registry }

// Handler serves the metrics of the Set, and of the process, which k8s.io/component-base has in its global registry.
func (s *Set) Handler() http.Handler {
	return promhttp.HandlerFor(prometheus.Gatherers{s.registry, legacyregistry.DefaultGatherer}, promhttp.HandlerOpts{})
}

// ReceiveService counts a received Service, or its deletion, once for each served family,
// whatever the families of the Service are. It calls update once, which passes the Service to the tracker and reports whether its ports changed. A concurrent
// [Set.Starting] waits, so the sync that a change triggers finds the change counted.
func (s *Set) ReceiveService(name types.NamespacedName, update func() (changed bool)) {
	s.serviceChanges.Add(float64(len(s.cfg.Families)))
	s.mu.Lock()
	defer s.mu.Unlock()
	if update() {
		s.pending[name] = struct{}{}
		s.servicesPending.Set(float64(len(s.pending)))
	}
}

// ReceiveSlice counts a received EndpointSlice, or its deletion, and calls update as
// [Set.ReceiveService] does. It does not count slices of an addressType that is not served.
// An empty addressType means that the type is unknown.
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

// Answered counts an answer of a health check. It fits [health.ProxyConfig].
func (s *Set) Answered(c health.Check, code int) {
	v := s.healthz
	if c == health.Livez {
		v = s.livez
	}
	v.WithLabelValues(strconv.Itoa(code)).Inc()
	s.slis.observe(rulesCheck, c, code)
}

// Rules stores the number of rules of an iptables table, and the number that the last sync
// wrote to the table. In other modes there is no such metric.
func (s *Set) Rules(f tracker.Family, table string, total, written int) {
	s.rules.WithLabelValues(f.String(), table).Set(float64(total))
	s.rulesWritten.WithLabelValues(f.String(), table).Set(float64(written))
}

// Queued stores the time of the last request for a sync. It fits [runner.Hooks].
func (s *Set) Queued(at time.Time) {
	s.eachFamily(func(f string) { s.lastQueued.WithLabelValues(f).Set(float64(at.UnixNano()) / 1e9) })
}

// Hooks returns hooks for the [runner.Runner] that syncs the rules, which call Queued and Starting. A run
// while synced returns false takes no change, and is not counted; tracker.Tracker.Synced fits.
func (s *Set) Hooks(synced func() bool) *runner.Hooks {
	return &runner.Hooks{
		Queued: s.Queued,
		SyncStart: func(runner.RunInfo) {
			if synced() {
				s.Starting()
			}
		},
	}
}

// Starting records the start of a sync, which takes all pending changes.
func (s *Set) Starting() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.pending)
	s.servicesPending.Set(0)
	s.endpointsPending.Set(0)
}

// Wrap returns a backend that applies deltas with b and counts its failures by Applied. It has the
// limits of b ([ruleset.Limiter]) and returns b's errors.
func (s *Set) Wrap(b ruleset.Backend) ruleset.Backend { return &counted{b, s} }

type counted struct {
	ruleset.Backend
	set *Set
}

func (c *counted) Limits(f tracker.Family) ruleset.Limits { return ruleset.LimitsOf(c.Backend, f) }

func (c *counted) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := c.Backend.Apply(ctx, d)
	c.set.Applied(d, err)
	return err
}

// Applied counts err, the result of a backend's Apply of d, if it is a failure.
// [ruleset.ErrNeedFull] alone is not a failure: it requests the full state.
func (s *Set) Applied(d *ruleset.Delta, err error) {
	if err == nil || err == ruleset.ErrNeedFull || errors.Is(err, context.Canceled) { //nolint:errorlint // a wrapped one has a cause, which counts
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
		s.failures.WithLabelValues(f.String()).Inc()
		if !d.Full {
			s.partialFailures.WithLabelValues(f.String()).Inc()
		}
	}
}

// Synced records the time and duration of a sync. It fits [ruleset.Cursor.OnSync] of the rules' cursor.
func (s *Set) Synced(i ruleset.SyncInfo) {
	s.eachFamily(func(f string) {
		if i.Err == nil {
			s.lastSync.WithLabelValues(f).SetToCurrentTime()
		}
		if !i.Applied {
			return
		}
		took := i.Took.Seconds()
		s.syncDuration.WithLabelValues(f).Observe(took)
		if i.Full {
			s.fullDuration.WithLabelValues(f).Observe(took)
		} else {
			s.partialDuration.WithLabelValues(f).Observe(took)
		}
	})
}

// CleanupFailed counts a failed removal of an object that is no longer needed.
func (s *Set) CleanupFailed() {
	s.eachFamily(func(f string) { s.cleanupFailures.WithLabelValues(f).Inc() })
}

// LoadBalancerFailed counts a failed call to create, modify or delete a load balancer.
// purpose is the kind of its frontend, such as "clusterip", and reason is the kind of the
// error, such as "other". Other modes than kernelspace have no such metric.
func (s *Set) LoadBalancerFailed(call string, f tracker.Family, purpose, reason string) {
	s.loadBalancerFailures[call].WithLabelValues(f.String(), purpose, reason).Inc()
}

// OtherRules stores the state of the rules of another proxy in one of its modes. The state is
// "in-use", "left", or "" without rules, which has no series.
func (s *Set) OtherRules(proxy, mode, state string) {
	s.otherRules.DeletePartialMatch(prometheus.Labels{"proxy": proxy, "mode": mode})
	if state != "" {
		s.otherRules.WithLabelValues(proxy, mode, state).Set(1)
	}
}

// Contact records an answer of the API server about a resource, such as "services". It fits
// Contact of informers.Config.
func (s *Set) Contact(resource string) {
	s.apiContact.WithLabelValues(resource).SetToCurrentTime()
}

// ConfigInvalid stores whether the configuration file is invalid, so that its previous content is
// in effect.
func (s *Set) ConfigInvalid(invalid bool) {
	s.configInvalid.Set(0)
	if invalid {
		s.configInvalid.Set(1)
	}
}

// Flushed records a flush of connection tracking. It fits FlushedFamily of [conntrack.Hooks].
func (s *Set) Flushed(f tracker.Family, i conntrack.FlushInfo) {
	s.conntrackDuration.WithLabelValues(f.String()).Observe(i.Duration.Seconds())
	s.conntrackDeleted.WithLabelValues(f.String()).Add(float64(i.Deleted))
}

// Apply implements [ruleset.Backend]. It records a delta that is in effect: its cursor must
// be synced after the cursor of the rules. Apply never fails. Calls must not be concurrent; those of a Cursor are not.
func (s *Set) Apply(_ context.Context, d *ruleset.Delta) error {
	s.noLocal.apply(d)
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
	for _, t := range d.Triggers {
		for _, f := range s.cfg.Families {
			if known := families[t.Service]; known != nil && !known[f] {
				continue
			}
			for _, at := range t.Times {
				s.latency.WithLabelValues(f.String()).Observe(max(time.Since(at).Seconds(), 0))
			}
		}
	}
	return nil
}

// OverBudget counts a Service port over budget. It fits [ruleset.Config].
func (s *Set) OverBudget(tracker.Key) { s.overBudget.Inc() }

// LeftOut counts the omissions of an object. It fits OnLeftOut of [tracker.Config].
func (s *Set) LeftOut(object v1.ObjectReference, left []tracker.LeftOut) {
	for _, l := range left {
		s.leftOut.WithLabelValues(object.Kind, string(l.Reason)).Inc()
	}
}
