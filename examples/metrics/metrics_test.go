package metrics

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.yaml.in/yaml/v3"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

func newSet(mode string) *Set {
	return NewSet(Config{Mode: mode, Families: []tracker.Family{tracker.IPv4, tracker.IPv6}})
}

// families returns all exported metrics by name.
func families(t *testing.T, s *Set) map[string]*dto.MetricFamily {
	t.Helper()
	list := must.Get(prometheus.Gatherers{s.Registry(), legacyregistry.DefaultGatherer}.Gather())(t)
	out := map[string]*dto.MetricFamily{}
	for _, f := range list {
		out[f.GetName()] = f
	}
	return out
}

// value returns the value of a metric with labels "name=value,...". For a histogram it is
// the number of observations.
func value(t *testing.T, s *Set, name, labels string) float64 {
	t.Helper()
	for _, m := range families(t, s)[name].GetMetric() {
		var have []string
		for _, l := range m.GetLabel() {
			have = append(have, l.GetName()+"="+l.GetValue())
		}
		if strings.Join(have, ",") != labels {
			continue
		}
		switch {
		case m.GetHistogram() != nil:
			return float64(m.GetHistogram().GetSampleCount())
		case m.GetCounter() != nil:
			return m.GetCounter().GetValue()
		}
		return m.GetGauge().GetValue()
	}
	t.Errorf("no %s{%s}", name, labels)
	return -1
}

func TestHooksSetMetrics(t *testing.T) { synctest.Test(t, hooksSetMetrics) }

// hooksSetMetrics runs in a bubble, where no time passes.
func hooksSetMetrics(t *testing.T) {
	s, epoch := newSet("nftables"), time.Now()
	changed := func() bool { return true }
	s.ReceiveService(types.NamespacedName{Name: "x"}, changed)
	s.ReceiveService(types.NamespacedName{Name: "x"}, changed)
	s.ReceiveService(types.NamespacedName{Name: "y"}, func() bool { return false })
	s.ReceiveSlice("IPv6", changed)
	s.ReceiveSlice("", changed)
	s.ReceiveSlice("FQDN", changed)
	s.Queued(epoch.Add(-time.Second))
	s.Answered(health.Healthz, 503)
	s.Answered(health.Livez, 200)
	expect := func(name, labels string, want float64) {
		t.Helper()
		if got := value(t, s, "kubeproxy_"+name, labels); got != want {
			t.Errorf("%s{%s} is %v, want %v", name, labels, got, want)
		}
	}
	expect("sync_proxy_rules_service_changes_pending", "", 1)
	expect("sync_proxy_rules_endpoint_changes_pending", "", 2)
	synced := false
	hooks := s.Hooks(func() bool { return synced })
	hooks.SyncStart(runner.RunInfo{})
	expect("sync_proxy_rules_service_changes_pending", "", 1)
	synced = true
	hooks.SyncStart(runner.RunInfo{})
	expect("sync_proxy_rules_service_changes_pending", "", 0)
	expect("sync_proxy_rules_endpoint_changes_pending", "", 0)
	expect("sync_proxy_rules_service_changes_total", "", 6) // three for each family
	expect("sync_proxy_rules_endpoint_changes_total", "", 2)
	expect("sync_proxy_rules_last_queued_timestamp_seconds", "ip_family=IPv4", float64(epoch.Unix()-1))
	expect("proxy_healthz_total", "code=503", 1)
	expect("proxy_livez_total", "code=200", 1)

	expect("sync_proxy_rules_last_timestamp_seconds", "ip_family=IPv4", 0)
	s.Synced(ruleset.SyncInfo{Applied: true, Full: true, Took: time.Second, Err: fmt.Errorf("no")})
	expect("sync_proxy_rules_last_timestamp_seconds", "ip_family=IPv4", 0)
	s.Synced(ruleset.SyncInfo{Applied: true, Took: time.Second})
	s.Synced(ruleset.SyncInfo{})
	expect("sync_proxy_rules_last_timestamp_seconds", "ip_family=IPv6", float64(epoch.Unix()))
	expect("sync_proxy_rules_duration_seconds", "ip_family=IPv4", 2)
	expect("sync_full_proxy_rules_duration_seconds", "ip_family=IPv4", 1)
	expect("sync_partial_proxy_rules_duration_seconds", "ip_family=IPv6", 1)
	for _, err := range []error{nil, errors.New("no"), ruleset.ErrNeedFull} {
		b := s.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return err }))
		if got := b.Apply(t.Context(), &ruleset.Delta{}); got != err {
			t.Errorf("Apply returned %v, want %v", got, err)
		}
	}
	expect("sync_proxy_rules_nftables_sync_failures_total", "ip_family=IPv6", 1)
	s.CleanupFailed()
	expect("sync_proxy_rules_nftables_cleanup_failures_total", "ip_family=IPv4", 1)
	s.Flushed(tracker.IPv6, conntrack.FlushInfo{Deleted: 7})
	expect("conntrack_reconciler_deleted_entries_total", "ip_family=IPv6", 7)
	expect("conntrack_reconciler_deleted_entries_total", "ip_family=IPv4", 0)
	expect("conntrack_reconciler_sync_duration_seconds", "ip_family=IPv6", 1)

	for range 2 {
		s.LeftOut(v1.ObjectReference{Kind: "Service"}, []tracker.LeftOut{{Reason: tracker.ReasonHeadless, Expected: true}, {Reason: tracker.ReasonProtocol}})
	}
	for _, reason := range []string{"ProxyHeadless", "ProxyProtocol"} {
		if got := value(t, s, "proxier_left_out_total", "kind=Service,reason="+reason); got != 2 {
			t.Errorf("proxier_left_out_total for %s is %v", reason, got)
		}
	}

	s.Rules(tracker.IPv4, "nat", 5, 1)
	if families(t, s)["kubeproxy_sync_proxy_rules_iptables_total"] != nil {
		t.Error("mode nftables exports numbers of iptables rules")
	}
	w := httptest.NewRecorder()
	s.Ping().ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
	if w.Code != 200 || w.Body.String() != "ok" {
		t.Errorf("ping: %d %q", w.Code, w.Body)
	}
	w = httptest.NewRecorder()
	s.SLIHandler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics/slis", nil))
	for _, want := range []string{
		`kubernetes_healthcheck{name="ping",type="healthz"} 1`, `kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 1`,
		`kubernetes_healthcheck{name="proxy",type="healthz"} 0`, `kubernetes_healthcheck{name="proxy",type="livez"} 1`,
		`kubernetes_healthchecks_total{name="proxy",status="error",type="healthz"} 1`,
	} {
		if !strings.Contains(w.Body.String(), "\n"+want+"\n") {
			t.Errorf("no %s in\n%s", want, w.Body)
		}
	}
	w = httptest.NewRecorder()
	s.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if !strings.Contains(w.Body.String(), "\nkubeproxy_proxy_healthz_total{code=\"503\"} 1\n") {
		t.Errorf("%s", w.Body)
	}
}

func TestRulesAreExportedByTable(t *testing.T) {
	s := newSet("iptables")
	s.Rules(tracker.IPv6, "nat", 12, 12)
	s.Rules(tracker.IPv6, "nat", 13, 2)
	for name, want := range map[string]float64{"total": 13, "last": 2} {
		if got := value(t, s, "kubeproxy_sync_proxy_rules_iptables_"+name, "ip_family=IPv6,table=nat"); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

// TestMissingCountersAreLeftOut reads the kernel's counters at each scrape. A missing counter
// must not suppress other metrics.
func TestMissingCountersAreLeftOut(t *testing.T) {
	s := newSet("iptables")
	var packets map[string]uint64
	var failure error
	s.WatchCounters(func() (map[string]uint64, error) { return packets, failure })
	const invalid, localhost = "kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "kubeproxy_iptables_localhost_nodeports_accepted_packets_total"
	there := func(what string, names ...string) {
		t.Helper()
		all := families(t, s)
		for _, name := range []string{invalid, localhost} {
			if (all[name] != nil) != slices.Contains(names, name) {
				t.Errorf("%s: %s is %v", what, name, all[name])
			}
		}
		if all["kubeproxy_sync_proxy_rules_endpoint_changes_total"] == nil {
			t.Errorf("%s: other metrics are missing", what)
		}
	}
	there("no nfacct")
	packets = map[string]uint64{iptables.InvalidDropped: 7, "other": 1}
	there("one", invalid)
	packets[iptables.LocalhostNodePorts] = 3
	there("both", invalid, localhost)
	if i, l := value(t, s, invalid, ""), value(t, s, localhost, ""); i != 7 || l != 3 {
		t.Errorf("%v and %v, want 7 and 3", i, l)
	}
	failure = fmt.Errorf("no")
	there("a failure")
}

// TestDeltasSetEndpointMetrics applies the deltas of a real engine.
func TestDeltasSetEndpointMetrics(t *testing.T) { synctest.Test(t, deltasSetEndpointMetrics) }

// deltasSetEndpointMetrics runs in a bubble, where each change takes two seconds.
func deltasSetEndpointMetrics(t *testing.T) {
	s := newSet("nftables")
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}))(t)
	e := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr}))(t)
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	cur := e.Attach("metrics", s)
	local := v1.ServiceInternalTrafficPolicyLocal
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "x"}, Spec: v1.ServiceSpec{
		Type: v1.ServiceTypeNodePort, ClusterIP: "10.0.0.1", InternalTrafficPolicy: &local, ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
		Ports: []v1.ServicePort{{Port: 80, NodePort: 30000}},
	}}
	tr.SetService(svc)
	slice := func(nodes ...string) {
		time.Sleep(time.Second) // the tracker ignores what changed before it began
		name, port := "", int32(80)
		sl := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", Name: "x-1", Labels: map[string]string{discovery.LabelServiceName: "x"},
				Annotations: map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)},
			},
			AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port}},
		}
		for i, n := range nodes {
			sl.Endpoints = append(sl.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.1.0.%d", i+1)}, NodeName: &n})
		}
		time.Sleep(2 * time.Second)
		tr.SetSlice(sl)
	}
	check := func(what string, internal, external, latencies float64) {
		t.Helper()
		must.Do(t, cur.Sync(t.Context()))
		const name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
		if i, x := value(t, s, name, "ip_family=IPv4,traffic_policy=internal"), value(t, s, name, "ip_family=IPv4,traffic_policy=external"); i != internal || x != external {
			t.Errorf("%s: %v internal and %v external, want %v and %v", what, i, x, internal, external)
		}
		n := 0.0
		if families(t, s)["kubeproxy_network_programming_duration_seconds"] != nil {
			n = value(t, s, "kubeproxy_network_programming_duration_seconds", "ip_family=IPv4")
		}
		if n != latencies {
			t.Errorf("%s: %v latencies, want %v", what, n, latencies)
		}
	}
	check("no endpoints at all", 0, 0, 0)
	slice("there")
	check("endpoints elsewhere", 1, 1, 1)
	slice("there", "here")
	check("one here", 0, 0, 2)
	slice("there")
	check("gone", 1, 1, 3)
	cur.Resync()
	check("a full delta", 1, 1, 3)
	svc = svc.DeepCopy()
	svc.Spec.InternalTrafficPolicy = nil
	tr.SetService(svc)
	check("internal is Cluster", 0, 1, 3)
	tr.DeleteService(types.NamespacedName{Namespace: "ns", Name: "x"})
	check("no Service", 0, 0, 3)
	h := families(t, s)["kubeproxy_network_programming_duration_seconds"].GetMetric()[0].GetHistogram()
	if h.GetSampleSum() != 6 || len(h.GetBucket()) != 2+59+12+7 {
		t.Errorf("latencies: sum %v, %d buckets", h.GetSampleSum(), len(h.GetBucket()))
	}
}

// exported returns the names that a Prometheus server would hold, of all modes and with all
// events, and the labels of each.
func exported(t *testing.T) (out map[string]bool, labels map[string]map[string]bool) {
	t.Helper()
	out, labels = map[string]bool{"up": true}, map[string]map[string]bool{}
	metrics.RequestResult.Increment(t.Context(), "200", "GET", "h")
	metrics.RequestLatency.Observe(t.Context(), "GET", url.URL{Host: "h"}, time.Second)
	for _, mode := range []string{"nftables", "iptables", "ipvs"} {
		s := newSet(mode)
		s.Answered(health.Healthz, 200)
		s.Answered(health.Livez, 200)
		s.Synced(ruleset.SyncInfo{Applied: true})
		s.Synced(ruleset.SyncInfo{Applied: true, Full: true})
		s.Flushed(tracker.IPv4, conntrack.FlushInfo{})
		s.Rules(tracker.IPv4, "nat", 1, 1)
		if mode == "iptables" {
			s.WatchCounters(func() (map[string]uint64, error) {
				return map[string]uint64{iptables.InvalidDropped: 0, iptables.LocalhostNodePorts: 0}, nil
			})
		}
		s.WatchTraffic(TrafficConfig{
			Read: func(context.Context) (*dataplane.Traffic, error) {
				key := tracker.Key{ServicePortName: tracker.ServicePortName{Protocol: v1.ProtocolTCP}, Family: tracker.IPv4}
				return &dataplane.Traffic{Known: ^dataplane.CounterSet(0), Services: map[tracker.Key]dataplane.Counters{key: {}}}, nil
			},
			Endpoints: func(tracker.Key) int { return 1 },
		})
		s.latency.WithLabelValues("IPv4").Observe(1)
		s.OtherRules("kube-proxy", "iptables", "in-use")
		s.Contact("services")
		for name, f := range families(t, s) {
			has := map[string]bool{}
			for _, l := range f.GetMetric()[0].GetLabel() {
				has[l.GetName()] = true
			}
			suffixes := []string{""}
			if f.GetType() == dto.MetricType_HISTOGRAM {
				suffixes = []string{"_bucket", "_sum", "_count"}
			}
			for _, suffix := range suffixes {
				out[name+suffix], labels[name+suffix] = true, has
			}
		}
	}
	return out, labels
}

// TestOtherRulesHaveOneState sets several states of the same rules.
func TestOtherRulesHaveOneState(t *testing.T) {
	s := NewSet(Config{Mode: "nftables", Families: []tracker.Family{tracker.IPv4}})
	for _, state := range []string{"in-use", "left", ""} {
		s.OtherRules("kube-proxy", "ipvs", "in-use")
		s.OtherRules("kube-proxy", "iptables", state)
		got := map[string]string{}
		for _, m := range families(t, s)["proxier_other_proxy_rules"].GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			got[labels["proxy"]+" "+labels["mode"]] += labels["state"]
		}
		want := map[string]string{"kube-proxy ipvs": "in-use", "kube-proxy iptables": state}
		if state == "" {
			delete(want, "kube-proxy iptables")
		}
		if !maps.Equal(got, want) {
			t.Errorf("state %s: %v, want %v", state, got, want)
		}
	}
}

// metricName matches names of metrics in a query.
var metricName = regexp.MustCompile(`\b(?:kubeproxy|proxier|rest_client|process|go|up)(?:_[a-z0-9_]+)?\b`)

// groupedBy matches the labels by which a query groups.
var groupedBy = regexp.MustCompile(`\bby \(([^)]*)\)`)

// notNames matches strings and ranges, which hold no names of metrics.
var notNames = regexp.MustCompile(`"[^"]*"|\[[^\]]*\]`)

// TestAlertsAndDashboardUseExportedMetrics also checks that every metric of the proxy is in
// an alert or a panel.
func TestAlertsAndDashboardUseExportedMetrics(t *testing.T) {
	known, labels := exported(t)
	var queries []string
	text, err := os.ReadFile("../nodeproxy/deploy/overlays/prometheus/prometheus-rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Spec struct {
			Groups []struct {
				Rules []struct{ Alert, Expr string }
			}
		}
	}
	must.Do(t, yaml.Unmarshal(text, &rules))
	for _, g := range rules.Spec.Groups {
		for _, r := range g.Rules {
			queries = append(queries, r.Expr)
		}
	}
	if text, err = os.ReadFile("../nodeproxy/deploy/overlays/prometheus/dashboard.json"); err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels     []struct{ Targets []struct{ Expr string } }
		Templating struct{ List []struct{ Query string } }
	}
	must.Do(t, json.Unmarshal(text, &board))
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			queries = append(queries, target.Expr)
		}
	}
	for _, v := range board.Templating.List {
		queries = append(queries, v.Query)
	}
	used := map[string]bool{}
	for _, q := range queries {
		for _, by := range groupedBy.FindAllStringSubmatch(q, -1) {
			for _, label := range strings.Split(by[1], ", ") {
				for _, name := range metricName.FindAllString(notNames.ReplaceAllString(q, ""), -1) {
					if label != "instance" && label != "le" && known[name] && !labels[name][label] {
						t.Errorf("%s has no label %s, in %q", name, label, q)
					}
				}
			}
		}
		for _, name := range metricName.FindAllString(notNames.ReplaceAllString(q, ""), -1) {
			used[name] = true
			if !known[name] {
				t.Errorf("%s is not exported, in %q", name, q)
			}
		}
	}
	if len(queries) < 20 || len(used) < 15 {
		t.Errorf("found only %d queries with %d metrics", len(queries), len(used))
	}
	// Every metric of the proxy must be used.
	for name := range known {
		plain := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_count"), "_sum")
		seen := slices.ContainsFunc([]string{"", "_bucket", "_count", "_sum"}, func(s string) bool { return used[plain+s] })
		if (strings.HasPrefix(name, "kubeproxy_") || strings.HasPrefix(name, "proxier_")) && !seen && !slices.Contains(undisplayed, plain) {
			t.Errorf("%s is in no alert and no panel", plain)
		}
	}
}

// undisplayed holds the metrics that need neither a panel nor an alert.
var undisplayed = []string{
	"kubeproxy_sync_full_proxy_rules_duration_seconds",
	"kubeproxy_sync_partial_proxy_rules_duration_seconds",
	"kubeproxy_conntrack_reconciler_sync_duration_seconds",
	"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total",
}

// TestPortsWithoutLocalEndpointsAreCounted uses a Service with two ports: mode ipvs counts
// Services, the other modes count ports.
func TestPortsWithoutLocalEndpointsAreCounted(t *testing.T) {
	var d ruleset.Delta
	for _, port := range []string{"a", "b"} {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			key := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: types.NamespacedName{Name: "x"}, Port: port, Protocol: v1.ProtocolTCP}, Family: f}
			d.Changes = append(d.Changes, ruleset.Change{Key: key, New: &ruleset.Port{
				Key: key, Spec: &tracker.ServicePort{Key: key, InternalLocal: true, ExternalLocal: port == "b", NodePort: 30000},
				Selection: tracker.Selection{HasAny: true},
			}})
		}
	}
	for mode, want := range map[string]float64{"ipvs": 1, "iptables": 2, "nftables": 2} {
		s := newSet(mode)
		must.Do(t, s.Apply(t.Context(), &d))
		for _, f := range []string{"IPv4", "IPv6"} {
			const name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
			internal, external := value(t, s, name, "ip_family="+f+",traffic_policy=internal"), value(t, s, name, "ip_family="+f+",traffic_policy=external")
			if internal != want || external != 1 {
				t.Errorf("mode %s, %s: %v internal and %v external, want %v and 1", mode, f, internal, external, want)
			}
		}
	}
}

// TestFailedLoadBalancersAreCounted counts in mode kernelspace, and not in others.
func TestFailedLoadBalancersAreCounted(t *testing.T) {
	for mode, want := range map[string]int{"kernelspace": 1, "nftables": 0} {
		s := NewSet(Config{Mode: mode, Families: []tracker.Family{tracker.IPv4}})
		s.LoadBalancerFailed("modify", tracker.IPv4, "nodeport", "other")
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		line := `kubeproxy_sync_proxy_rules_winkernel_lb_update_failures_total{error="other",ip_family="IPv4",lb_type="nodeport"} 1`
		if got := strings.Count(w.Body.String(), line); got != want {
			t.Errorf("mode %s: %d lines %s, want %d", mode, got, line, want)
		}
	}
}
