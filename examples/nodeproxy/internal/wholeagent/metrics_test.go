//go:build linux

package wholeagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// metricFact describes a metric of kube-proxy.
type metricFact struct {
	name, kind, labels string
	modes              string // the first letters of the modes that have it
	buckets            []float64
}

// kubeProxyMetrics returns the metrics of kube-proxy 1.37 on Linux, except those of its feature
// gate for NodePorts at loopback addresses. Names, types and labels come from the Kubernetes
// Metrics Reference, which calls the type of a metric of a collector "custom". All that
// kube-proxy 1.37.2 served in modes nftables and iptables is here.
func kubeProxyMetrics() []metricFact {
	const iptables, nftables, all = "i", "n", "inv" // v is ipvs
	var syncs, latencies []float64
	for n := range 15 {
		syncs = append(syncs, 0.001*math.Pow(2, float64(n)))
	}
	latencies = append(latencies, 0.25, 0.5)
	for _, r := range []struct{ from, to, step float64 }{{1, 59, 1}, {60, 115, 5}, {120, 300, 30}} {
		for b := r.from; b <= r.to; b += r.step {
			latencies = append(latencies, b)
		}
	}
	return []metricFact{
		{"kubeproxy_conntrack_reconciler_deleted_entries_total", "counter", "ip_family", all, nil},
		{"kubeproxy_conntrack_reconciler_sync_duration_seconds", "histogram", "ip_family", all, syncs},
		{"kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "counter", "", iptables, nil},
		{"kubeproxy_iptables_localhost_nodeports_accepted_packets_total", "counter", "", iptables, nil},
		{"kubeproxy_network_programming_duration_seconds", "histogram", "ip_family", all, latencies},
		{"kubeproxy_proxy_healthz_total", "counter", "code", all, nil},
		{"kubeproxy_proxy_livez_total", "counter", "code", all, nil},
		{"kubeproxy_sync_full_proxy_rules_duration_seconds", "histogram", "ip_family", iptables + nftables, syncs},
		{"kubeproxy_sync_partial_proxy_rules_duration_seconds", "histogram", "ip_family", iptables + nftables, syncs},
		{"kubeproxy_sync_proxy_rules_duration_seconds", "histogram", "ip_family", all, syncs},
		{"kubeproxy_sync_proxy_rules_endpoint_changes_pending", "gauge", "", all, nil},
		{"kubeproxy_sync_proxy_rules_endpoint_changes_total", "counter", "", all, nil},
		{"kubeproxy_sync_proxy_rules_iptables_last", "gauge", "ip_family table", iptables, nil},
		{"kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total", "counter", "ip_family", iptables, nil},
		{"kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "counter", "ip_family", iptables + "v", nil},
		{"kubeproxy_sync_proxy_rules_iptables_total", "gauge", "ip_family table", iptables, nil},
		{"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "gauge", "ip_family", all, nil},
		{"kubeproxy_sync_proxy_rules_last_timestamp_seconds", "gauge", "ip_family", all, nil},
		{"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total", "counter", "ip_family", nftables, nil},
		{"kubeproxy_sync_proxy_rules_nftables_sync_failures_total", "counter", "ip_family", nftables, nil},
		{"kubeproxy_sync_proxy_rules_no_local_endpoints_total", "gauge", "ip_family traffic_policy", all, nil},
		{"kubeproxy_sync_proxy_rules_service_changes_pending", "gauge", "", all, nil},
		{"kubeproxy_sync_proxy_rules_service_changes_total", "counter", "", all, nil},
	}
}

// processMetrics returns metrics that every Kubernetes component has, by the same reference.
// Command nodeproxy sets kubernetes_feature_enabled. The metrics rest_client_* exist after a
// client of an API server is created. Some of them appear with their first event.
func processMetrics() []metricFact {
	return []metricFact{
		{"kubernetes_feature_enabled", "gauge", "name stage", "inv", nil},
		{"rest_client_exec_plugin_certificate_rotation_age", "histogram", "", "inv", nil},
		{"rest_client_exec_plugin_ttl_seconds", "gauge", "", "inv", nil},
		{"rest_client_rate_limiter_duration_seconds", "histogram", "host verb", "inv", nil},
		{"rest_client_request_duration_seconds", "histogram", "host verb", "inv", nil},
		{"rest_client_request_size_bytes", "histogram", "host verb", "inv", nil},
		{"rest_client_requests_total", "counter", "code host method", "inv", nil},
		{"rest_client_transport_cache_entries", "gauge", "", "inv", nil},
		{"rest_client_transport_create_calls_total", "counter", "result", "inv", nil},
	}
}

// check compares a served metric with its description.
func (f metricFact) check(t *testing.T, m *dto.MetricFamily) {
	t.Helper()
	if got := strings.ToLower(m.GetType().String()); got != f.kind {
		t.Errorf("%s is a %s, want %s", f.name, got, f.kind)
	}
	for _, series := range m.GetMetric() {
		var labels []string
		for _, l := range series.GetLabel() {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		if got := strings.Join(labels, " "); got != f.labels {
			t.Errorf("%s has labels %q, want %q", f.name, got, f.labels)
		}
		if f.buckets == nil {
			continue
		}
		want := append(slices.Clone(f.buckets), math.Inf(1))
		if !slices.EqualFunc(series.GetHistogram().GetBucket(), want, func(b *dto.Bucket, bound float64) bool {
			return b.GetUpperBound() == bound || math.Abs(b.GetUpperBound()-bound) < 1e-9
		}) {
			t.Errorf("%s has buckets %v, want %v", f.name, series.GetHistogram().GetBucket(), want)
		}
	}
}

// parseMetrics returns the metrics in the text format.
func parseMetrics(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	out, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Error(err)
	}
	return out
}

// scrape returns the metrics of an agent's metrics server.
func scrape(t *testing.T, a *core.Agent) map[string]*dto.MetricFamily {
	t.Helper()
	w := httptest.NewRecorder()
	a.MetricsHandler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Errorf("/metrics: %d %s", w.Code, w.Body)
	}
	return parseMetrics(t, w.Body.String())
}

// metric returns the value of the series with these label values, or -1.
func metric(all map[string]*dto.MetricFamily, name string, labels ...string) float64 {
	for _, m := range all["kubeproxy_"+name].GetMetric() {
		var have []string
		for _, l := range m.GetLabel() {
			have = append(have, l.GetValue())
		}
		if slices.Equal(have, labels) {
			return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return -1
}

// fakePlane is a data plane that does nothing. Its Apply returns err.
type fakePlane struct{ err error }

func (p *fakePlane) Apply(context.Context, *ruleset.Delta) error { return p.err }
func (p *fakePlane) Check(context.Context) error                 { return nil }
func (p *fakePlane) Limits(tracker.Family) ruleset.Limits        { return ruleset.Limits{} }
func (p *fakePlane) Close() error                                { return nil }
func (p *fakePlane) Traffic(context.Context) (*dataplane.Traffic, error) {
	return &dataplane.Traffic{}, nil
}

func (p *fakePlane) Watch(ctx context.Context, _ time.Duration, _ func(error)) error {
	<-ctx.Done()
	return ctx.Err()
}

// mode returns a mode of the name whose data plane is p.
func (p *fakePlane) mode(name string) modes.Mode {
	return modes.Mode{
		Name: name, TracksConnections: true,
		Probe: func(context.Context, modes.Settings) error { return nil },
		Open:  func(context.Context, modes.Settings) (modes.Plane, error) { return modes.Plane{Backend: p}, nil },
	}
}

// agentIn starts an agent of the mode at the node, without servers, and calls f with it.
// f runs on another goroutine than the test and must not end it.
func (s *site) agentIn(t *testing.T, m modes.Mode, f func(*core.Agent) error) {
	t.Helper()
	c := configtest.Parsed(t, []string{"run", "--manifests", t.TempDir(), "--hostname-override", "n1", "--proxy-mode", m.Name})
	must.Do(t, s.Node.Do(func() error {
		a, err := core.New(t.Context(), core.Options{Config: c, Modes: []modes.Mode{m}, Lines: io.Discard, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Gatherer: legacyregistry.DefaultGatherer})
		if err != nil {
			return err
		}
		defer a.Close()
		return f(a)
	}))
}

func nameOf(s string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: s} }

// dualStack returns a Service of both families over UDP, and dualSlice its endpoints in one family.
func dualStack(name string, n int) *v1.Service {
	return backendtest.Service(nameOf(name), "a", fmt.Sprintf("10.96.1.%d", n), fmt.Sprintf("fd00:96::%d", n), backendtest.Over(v1.ProtocolUDP))
}

func dualSlice(service string, f tracker.Family, addr string) *discovery.EndpointSlice {
	out := backendtest.Slice(nameOf(service), f.String(), f, "a", v1.ProtocolUDP, backendtest.Endpoint(addr, "other"))
	out.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Add(time.Second).Format(time.RFC3339Nano)}
	return out
}

// TestMetricsAreThoseOfKubeProxy compares the metrics of agents in every mode, one after
// another in one process, with kube-proxy's.
func TestMetricsAreThoseOfKubeProxy(t *testing.T) {
	t.Parallel()
	ipvs := (&fakePlane{}).mode("ipvs") // TestIPVSNode has the real one
	for _, m := range []modes.Mode{modes.NFTables(), modes.IPTables(), ipvs} {
		t.Run(m.Name, func(t *testing.T) {
			t.Parallel()
			needMode(t, m.Name)
			metricsOf(t, m)
		})
	}
}

// metricsOf compares the metrics of an agent in a mode with kube-proxy's, at the start and
// after events that every metric counts.
func metricsOf(t *testing.T, m modes.Mode) {
	s := newSite(t)
	nfacct := m.Name == "iptables" && s.countsInKernel(t)
	s.agentIn(t, m, func(a *core.Agent) error {
		letter := map[string]string{"iptables": "i", "nftables": "n", "ipvs": "v"}[m.Name]
		at := scrape(t, a)
		for _, f := range kubeProxyMetrics() {
			if !strings.Contains(f.modes, letter) || f.labels != "" || strings.Contains(f.name, "_iptables_") {
				continue
			}
			if got := metric(at, strings.TrimPrefix(f.name, "kubeproxy_")); got != 0 {
				t.Errorf("at the start %s is %v, want 0", f.name, got)
			}
		}

		a.SetService(dualStack("x", 1))
		a.SetSlice(dualSlice("x", tracker.IPv4, podIPs[0]))
		a.SetSlice(dualSlice("x", tracker.IPv6, "fd00:1::2"))
		a.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		if err := a.Sync(t.Context()); err != nil {
			return err
		}
		// New endpoints, and a removed endpoint, whose UDP flows are looked up.
		a.SetSlice(dualSlice("x", tracker.IPv4, podIPs[1]))
		if err := a.Sync(t.Context()); err != nil {
			return err
		}
		a.Proxy.Healthz().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/healthz", nil))
		a.Proxy.Livez().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/livez", nil))

		served := scrape(t, a)
		known := map[string]bool{}
		for _, f := range kubeProxyMetrics() {
			if !strings.Contains(f.modes, letter) {
				continue
			}
			known[f.name] = true
			if strings.HasPrefix(f.name, "kubeproxy_iptables_") && !nfacct {
				continue
			}
			if served[f.name] == nil {
				t.Errorf("%s is missing", f.name)
				continue
			}
			f.check(t, served[f.name])
		}
		for _, name := range slices.Sorted(maps.Keys(served)) {
			if strings.HasPrefix(name, "kubeproxy_") && !known[name] {
				t.Errorf("%s is served, which kube-proxy does not have in this mode", name)
			}
		}
		if m := served["kubernetes_build_info"]; m != nil {
			t.Errorf("kubernetes_build_info is served, so the alert KubeVersionMismatch fires: %v", m)
		}
		return nil
	})
}

// countsInKernel reports whether rules of iptables can count with nfacct here.
func (s *site) countsInKernel(t *testing.T) (yes bool) {
	t.Helper()
	must.Do(t, s.Node.Do(func() error {
		b, err := iptables.New(t.Context(), iptables.Config{LocalhostNodePorts: true})
		if err != nil {
			return err
		}
		defer b.Close()
		packets, err := b.Counters()
		yes = len(packets) != 0
		return err
	}))
	return yes
}

// TestChangesAreCountedAsInKubeProxy hands in Services and EndpointSlices of both families, some of
// them without a change.
func TestChangesAreCountedAsInKubeProxy(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.agentIn(t, (&fakePlane{}).mode("nftables"), func(a *core.Agent) error {
		want := func(what string, services, pendingServices, endpoints, pendingEndpoints float64) {
			t.Helper()
			m := scrape(t, a)
			got := []float64{
				metric(m, "sync_proxy_rules_service_changes_total"), metric(m, "sync_proxy_rules_service_changes_pending"),
				metric(m, "sync_proxy_rules_endpoint_changes_total"), metric(m, "sync_proxy_rules_endpoint_changes_pending"),
			}
			if !slices.Equal(got, []float64{services, pendingServices, endpoints, pendingEndpoints}) {
				t.Errorf("%s: totals and pending changes of Services and endpoints are %v", what, got)
			}
		}
		x := dualStack("x", 1)
		slice4 := dualSlice("x", tracker.IPv4, podIPs[0])
		slice6 := dualSlice("x", tracker.IPv6, "fd00:1::2")
		a.SetService(x)
		a.SetService(dualStack("y", 2))
		want("two Services", 4, 2, 0, 0)
		x = x.DeepCopy()
		x.Spec.Ports[0].Port = 81
		a.SetService(x)
		want("one of them changed", 6, 2, 0, 0)
		a.SetService(x)
		want("and handed in again", 8, 2, 0, 0)
		a.SetSlice(slice4)
		a.SetSlice(slice6)
		want("two slices", 8, 2, 2, 2)
		a.SetSlice(slice6)
		names := dualSlice("x", tracker.IPv4, "x.example")
		names.Name, names.AddressType = "x-fqdn", discovery.AddressTypeFQDN
		a.SetSlice(names)
		want("the same slice, and one without addresses", 8, 2, 3, 2)
		a.Starting(runner.RunInfo{})
		want("a sync before all objects are listed", 8, 2, 3, 2)
		a.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		a.Starting(runner.RunInfo{})
		want("a sync", 8, 0, 3, 0)
		a.DeleteSlice(nameOf(slice4.Name))
		a.DeleteService(nameOf(x.Name))
		want("deletions", 10, 1, 4, 1)
		return nil
	})
}

// TestFailuresAreCounted makes syncs fail in every mode.
func TestFailuresAreCounted(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	names := map[string]string{
		"nftables": "sync_proxy_rules_nftables_sync_failures_total",
		"iptables": "sync_proxy_rules_iptables_restore_failures_total",
		"ipvs":     "sync_proxy_rules_iptables_restore_failures_total",
	}
	const partial = "sync_proxy_rules_iptables_partial_restore_failures_total"
	for mode, name := range names {
		t.Run(mode, func(t *testing.T) {
			plane := &fakePlane{}
			s.agentIn(t, plane.mode(mode), func(a *core.Agent) error {
				want := func(what string, v4, v6, partial4 float64) {
					t.Helper()
					if mode != "iptables" {
						partial4 = -1 // the mode has no such metric
					}
					m := scrape(t, a)
					if got := []float64{metric(m, name, "IPv4"), metric(m, name, "IPv6"), metric(m, partial, "IPv4")}; !slices.Equal(got, []float64{v4, v6, partial4}) {
						t.Errorf("%s: failures are %v, want %v", what, got, []float64{v4, v6, partial4})
					}
				}
				sync := func(fails bool, err error) {
					t.Helper()
					plane.err = err
					if got := a.Sync(t.Context()); (got != nil) != fails {
						t.Errorf("a sync ends with %v", got)
					}
				}
				want("at the start", 0, 0, 0)
				a.SetService(dualStack("x", 1))
				a.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
				sync(true, errors.New("no"))
				want("a full sync fails", 1, 1, 0)
				sync(false, nil)
				want("it succeeds", 1, 1, 0)
				a.SetService(dualStack("y", 2))
				sync(true, errors.New("no"))
				want("a sync of a change fails", 2, 2, 1)
				sync(true, context.Canceled)
				want("a sync is canceled", 2, 2, 1)
				key := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: nameOf("y"), Port: "a", Protocol: v1.ProtocolUDP}, Family: tracker.IPv6}
				sync(true, &ruleset.PartialError{Failed: map[tracker.Key]error{key: errors.New("no")}})
				want("one Service fails in IPv6", 2, 3, 1)
				a.SetService(dualStack("z", 3))
				// The backend requires a full delta, after a change and after a full delta.
				sync(true, ruleset.ErrNeedFull)
				want("the backend requires a full delta", 2, 3, 1)
				sync(true, fmt.Errorf("%w: %w", ruleset.ErrNeedFull, errors.New("no")))
				want("the backend fails and requires a full delta, twice", 4, 5, 1)
				return nil
			})
		})
	}
}
