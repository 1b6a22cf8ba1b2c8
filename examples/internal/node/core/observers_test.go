package core

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// TestReportCountsAllDeltasOfASync divides the changes of a sync into several deltas.
func TestReportCountsAllDeltasOfASync(t *testing.T) {
	const ports = 6
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}}))(t)
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	// A delta has one or two of the ports.
	engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr, Budget: ruleset.Budget{Delta: 1}}))(t)
	set := metrics.NewSet(metrics.Config{Mode: "test", Families: []tracker.Family{tracker.IPv4}})
	proxy := must.Get(health.NewProxy(health.ProxyConfig{Timeout: time.Minute, Families: []tracker.Family{tracker.IPv4}}))(t)
	var out bytes.Buffer
	o := &observers{metrics: set, Proxy: proxy, out: &out, manifests: true}
	deltas, unsure := 0, 0
	cursor := engine.Attach("rules", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		deltas++
		var err error
		if deltas == unsure {
			err = ruleset.ErrNeedFull
		}
		o.appliedDelta(d, err)
		return err
	}))
	cursor.OnSync(o.onSync)
	late := false // the sync begins before the source says that it has handed in all objects
	sync := func() string {
		t.Helper()
		if !late {
			o.handedIn()
		}
		o.begin()
		must.Do(t, cursor.Sync(t.Context()))
		out.Reset()
		o.report(0)
		line, _, _ := strings.Cut(out.String(), " took=")
		return line
	}
	if got, want := sync(), "synced services=0 endpoints=0 changed=0"; got != want {
		t.Errorf("empty: %q, want %q", got, want)
	}

	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"}, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.1"}}
	for i := range ports {
		svc.Spec.Ports = append(svc.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Protocol: v1.ProtocolTCP, Port: int32(80 + i)})
	}
	deltas = 0
	tr.SetService(svc)
	if got, want := sync(), "synced services=1 endpoints=0 changed=6"; got != want || deltas < 2 {
		t.Errorf("%d deltas: %q, want several and %q", deltas, got, want)
	}

	// Two ports are changed before, and the full delta has the changes of the others.
	moved := svc.DeepCopy()
	for i := range moved.Spec.Ports {
		moved.Spec.Ports[i].Port += 100
	}
	deltas, unsure = 0, 3
	tr.SetService(moved)
	if got, want := sync(), "synced services=1 endpoints=0 changed=6"; got != want || deltas != 4 {
		t.Errorf("%d deltas, the third of which needs a full one: %q, want %q", deltas, got, want)
	}

	late = true
	tr.SetService(svc)
	if got := sync(); got != "" {
		t.Errorf("a sync of objects that the source still hands in: %q", got)
	}
	late = false
	if got, want := sync(), "synced services=1 endpoints=0 changed=6"; got != want {
		t.Errorf("the sync after it: %q, want %q", got, want)
	}
}

// TestAnHourOfChangesIsAShortLog changes five Services a second for an hour, with both formats, with
// and without a Service that cannot be programmed.
func TestAnHourOfChangesIsAShortLog(t *testing.T) {
	const perSecond, hour = 5, 3600
	for _, tt := range []struct {
		name      string
		json      bool
		every     bool
		refused   bool
		min, most int // lines
		bytes     int
	}{
		{"text", false, false, false, 55, 61, 20_000},
		{"JSON", true, false, false, 55, 61, 20_000},
		{"JSON, a refused Service", true, false, true, 300, 2 * (20 + hour/10 + 2), 250_000},
		{"every line", false, true, false, perSecond*hour - 1, perSecond*hour + 1, 10_000_000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var out bytes.Buffer
				log := slog.New(slog.NewJSONHandler(&out, nil))
				args := []string{"run", "--hostname-override", "node", fmt.Sprintf("--log-every-sync=%t", tt.every)}
				if tt.json {
					args = append(args, "--logging-format=json")
				}
				cfg := configtest.Parsed(t, args)
				opts := &Options{Config: cfg, Log: log}
				if !tt.json {
					opts.Lines = &out
				}
				o := must.Get(newObservers(opts, []tracker.Family{tracker.IPv4}))(t)
				tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}, Log: log}))(t)
				engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr, Budget: ruleset.DefaultBudget(), Log: log}))(t)
				cursor := engine.Attach("rules", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
					o.appliedDelta(d, nil)
					failed := map[tracker.Key]error{}
					for i := range d.Changes {
						if k := d.Changes[i].Key; tt.refused && k.Name == "s0" {
							failed[k] = errors.New("too large")
						}
					}
					if len(failed) != 0 {
						return &ruleset.PartialError{Failed: failed}
					}
					return nil
				}))
				cursor.OnSync(o.onSync)
				r := must.Get(runner.New(runner.Config{Min: time.Millisecond, Retry: cfg.SyncPeriod, Log: log}, func(ctx context.Context) error {
					o.begin()
					err := cursor.Sync(ctx)
					failed := 0
					if err != nil {
						failed = 1
					}
					o.report(failed)
					return err
				}))(t)
				engine.Notify(r.Trigger)
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() { ended <- r.Run(ctx) }()
				for i := range 50 {
					tr.SetService(&v1.Service{
						ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("s", i)},
						Spec:       v1.ServiceSpec{ClusterIP: fmt.Sprintf("10.96.0.%d", i+1), Ports: []v1.ServicePort{{Protocol: v1.ProtocolTCP, Port: 80}}},
					})
				}
				tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
				for n := range perSecond * hour {
					time.Sleep(time.Second / perSecond)
					name, port := fmt.Sprint("s", n%50), int32(8080)
					tr.SetSlice(&discovery.EndpointSlice{
						ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{discovery.LabelServiceName: name}},
						AddressType: discovery.AddressTypeIPv4,
						Ports:       []discovery.EndpointPort{{Name: new(string), Port: &port}},
						Endpoints:   []discovery.Endpoint{{Addresses: []string{fmt.Sprintf("10.1.%d.%d", n/50%250, n%50)}}},
					})
				}
				synctest.Wait()
				cancel()
				<-ended
				if lines := strings.Count(out.String(), "\n"); lines < tt.min || lines > tt.most || out.Len() > tt.bytes {
					t.Errorf("%d lines of %d bytes, such as\n%.2000s", lines, out.Len(), out.String())
				}
			})
		})
	}
}
