package ruleset_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

var _ ruleset.Source = (*tracker.View)(nil)

func fanoutTracker(t *testing.T, c tracker.Config) *tracker.Tracker {
	t.Helper()
	tr, err := tracker.New(c)
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return tr
}

func engineOf(t *testing.T, tr ruleset.Source) *ruleset.Engine {
	t.Helper()
	e, err := ruleset.NewEngine(ruleset.Config{Source: tr})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// rules returns everything that forwards packets, by key.
func rules(e *ruleset.Engine) map[tracker.Key]string {
	out := map[tracker.Key]string{}
	for _, s := range e.Snapshot().Ports {
		out[s.Key] = fmt.Sprint(s.Spec, s.Frontends, s.Endpoints, s.Pool(ruleset.TargetCluster), s.Pool(ruleset.TargetLocal))
	}
	return out
}

// TestEnginesOfOneTrackerHaveTheirOwnRules makes random changes, with Services that ask for the
// same external IPs. Nodes join, leave, change their zone and lag. Each must have the rules of
// an Engine with a Tracker of its own.
func TestEnginesOfOneTrackerHaveTheirOwnRules(t *testing.T) {
	addr := func(v4, v6 string, mod int) func(tracker.Family, int) netip.Addr {
		return func(f tracker.Family, n int) netip.Addr {
			if f == tracker.IPv6 {
				return netip.MustParseAddr(fmt.Sprintf("%s%x", v6, n%mod))
			}
			return netip.MustParseAddr(fmt.Sprint(v4, n%mod))
		}
	}
	names := []string{"a", "b", "c", "d", "e"}
	conflicts := 0
	for seed := range uint64(25) {
		params := worldgen.Params{
			Families:  []tracker.Family{tracker.IPv4, tracker.IPv6},
			ClusterIP: addr("10.96.0.", "fd00::", 250), ExternalIP: addr("198.18.0.", "fd01::", 3), LoadBalancerIP: addr("198.19.0.", "fd02::", 3),
			Protocols: []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}, Affinity: true, Weights: true, Sources: []string{"192.0.2.0/24", "fd00::/16"},
		}
		for i := range 6 {
			params.Backends = append(params.Backends, worldgen.Backend{
				Node: names[i%3], Ports: []uint16{80},
				Addr: func(f tracker.Family) netip.Addr { return addr("10.0.0.", "fd03::", 250)(f, i+1) },
			})
		}
		g := worldgen.New(seed, params)
		shared := fanoutTracker(t, tracker.Config{Events: events(func(string) { conflicts++ })})
		fanout := tracker.NewFanout(shared)
		views, engines := map[string]*tracker.View{}, map[string]*ruleset.Engine{}
		owns, ownEngines := map[string]*tracker.Tracker{}, map[string]*ruleset.Engine{}
		for _, n := range names {
			owns[n] = fanoutTracker(t, tracker.Config{Node: tracker.NodeInfo{Name: n, Zone: "zone-a"}})
			ownEngines[n] = engineOf(t, owns[n])
		}
		for step := range 40 {
			ops := g.Start
			if step != 0 {
				ops = g.Step
			}
			for _, o := range ops() {
				if o.SetNode != nil {
					continue
				}
				o.Apply(shared)
				for _, n := range names {
					o.Apply(owns[n])
				}
			}
			n := names[step%len(names)]
			switch {
			case views[n] == nil:
				views[n] = fanout.View(owns[n].Node())
				engines[n] = engineOf(t, views[n])
			case step%4 == 0:
				views[n].End()
				delete(views, n)
				delete(engines, n)
			case step%4 == 1:
				info := tracker.NodeInfo{Name: n, Zone: []string{"zone-a", "zone-b"}[step/4%2], Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.9")}}
				views[n].SetNode(info)
				owns[n].SetNode(info)
			}
			for i, n := range names {
				if engines[n] == nil || (step+i)%3 == 0 { // lags
					continue
				}
				got, want := rules(engines[n]), rules(ownEngines[n])
				for k, w := range want {
					if got[k] != w {
						t.Fatalf("seed %d step %d node %s: %v is\n%s\nwant\n%s", seed, step, n, k, got[k], w)
					}
				}
				if len(got) != len(want) {
					t.Fatalf("seed %d step %d node %s: %d Service ports, want %d", seed, step, n, len(got), len(want))
				}
			}
		}
	}
	if conflicts == 0 {
		t.Error("no two Services asked for one address")
	}
}

// events is an EventSink that calls a function with the reason.
type events func(reason string)

func (f events) Event(_ v1.ObjectReference, _ bool, reason, _ string) { f(reason) }

// TestConflictIsReportedOnce has three engines that find the same conflict, one of them later.
func TestConflictIsReportedOnce(t *testing.T) {
	var reasons []string
	shared := fanoutTracker(t, tracker.Config{Events: events(func(r string) { reasons = append(reasons, r) })})
	fanout := tracker.NewFanout(shared)
	set := func(name string, age time.Duration) {
		shared.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-age))},
			Spec: v1.ServiceSpec{
				ClusterIP: "10.96.0." + name, ExternalIPs: []string{"198.18.0.1"}, Ports: []v1.ServicePort{{Port: 80}},
			},
		})
	}
	owner := func(e *ruleset.Engine) string {
		for _, s := range e.Snapshot().Ports {
			if slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.Kind == ruleset.KindExternalIP }) {
				return s.Key.Name
			}
		}
		return ""
	}
	var all []*ruleset.Engine
	join := func(name string) {
		all = append(all, engineOf(t, fanout.View(tracker.NodeInfo{Name: name})))
	}
	join("a")
	join("b")
	set("2", time.Minute)
	set("3", time.Hour)
	check := func(want string) {
		t.Helper()
		for i, e := range all {
			if got := owner(e); got != want {
				t.Errorf("engine %d: Service %q has the address, want %q", i, got, want)
			}
		}
	}
	check("3")
	join("c")
	check("3")
	if len(reasons) != 1 {
		t.Errorf("events %v, want one", reasons)
	}
	shared.DeleteService(types.NamespacedName{Namespace: "ns", Name: "3"})
	check("2")
}

// TestViewOfNodeThatLeftIsForgotten joins and leaves many times, and deletes Services.
func TestViewOfNodeThatLeftIsForgotten(t *testing.T) {
	shared := fanoutTracker(t, tracker.Config{})
	fanout := tracker.NewFanout(shared)
	calls := 0
	stays := fanout.View(tracker.NodeInfo{Name: "stays"})
	end := stays.Notify(func() { calls++ })
	for i := range 100 {
		v := fanout.View(tracker.NodeInfo{Name: "leaves"})
		v.Notify(func() { calls++ })
		v.End()
		v.End()
		if got := v.Take(); len(got.Updates) != 0 {
			t.Fatal("a view that ended takes updates")
		}
		name := fmt.Sprint("s", i)
		shared.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
			Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Port: 80}}},
		})
		if got := stays.Take(); len(got.Updates) != 1 || len(got.Updates[0].Ports) != 1 {
			t.Fatalf("step %d: took %v", i, got)
		}
		shared.DeleteService(types.NamespacedName{Namespace: "ns", Name: name})
		if got := stays.Take(); len(got.Updates) != 1 || len(got.Updates[0].Ports) != 0 {
			t.Fatalf("step %d: took %v", i, got)
		}
	}
	if calls != 200 {
		t.Errorf("%d calls, want 200", calls)
	}
	end()
	stays.SetNode(tracker.NodeInfo{Name: "renamed"})
	if calls != 200 {
		t.Error("an ended function was called")
	}
	// Only some of the deleted Services are still known.
	if got := stays.Take(); len(got.Updates) >= 64 {
		t.Errorf("%d updates after a new name", len(got.Updates))
	}
}
