package agent

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// TestReportCountsAllDeltasOfASync divides the changes of a sync into several deltas.
func TestReportCountsAllDeltasOfASync(t *testing.T) {
	const ports = 6
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}})
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.SourceServices, tracker.SourceSlices, tracker.SourceNodes)
	// A delta has one or two of the ports.
	engine, err := ruleset.NewEngine(ruleset.Config{Tracker: tr, Budget: ruleset.Budget{Delta: 1}})
	if err != nil {
		t.Fatal(err)
	}
	set := metrics.NewSet(metrics.Config{Mode: "test", Families: []tracker.Family{tracker.IPv4}})
	proxy, err := health.NewProxy(health.ProxyConfig{Timeout: time.Minute, Families: []tracker.Family{tracker.IPv4}})
	if err != nil {
		t.Fatal(err)
	}
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
	sync := func() string {
		t.Helper()
		o.handedIn()
		asked := o.begin()
		if err := cursor.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		out.Reset()
		o.report(0, asked)
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
}
