package tracker_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// mark is an OnService hook that stores the annotation "color" in the port.
func mark(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	p.Ext = color(s.Annotations["color"])
	return nil
}

// TestOnServiceEndpointFollowsChanges checks the endpoints of one Service with a hook
// that depends on the Service's annotation.
func TestOnServiceEndpointFollowsChanges(t *testing.T) {
	var e events
	calls := 0
	tr := newSynced(t, tracker.Config{
		Node: tracker.NodeInfo{Name: "node-1"}, Events: &e, OnService: mark,
		OnServiceEndpoint: func(p *tracker.ServicePort, ep *tracker.Endpoint) error {
			calls++
			ep.Addr = endpoint("99").Addr
			switch c := p.Ext.(color); {
			case c == "refuse" && strings.HasSuffix(ep.Node, "2"):
				return errors.New("refused")
			case c == "warn":
				ep.Weight = 2
				return fmt.Errorf("wrapped: %w", tracker.Warning("weight %d is a guess", 2))
			case c == "heavy":
				ep.Weight = 9
			}
			return nil
		},
	})
	colored := func(c string) *v1.Service {
		s := service("ns", "svc", "10.96.0.1")
		s.UID = "uid-1"
		s.Annotations = map[string]string{"color": c}
		return s
	}
	step := func(what string, called int, want string) []*tracker.Endpoint {
		t.Helper()
		calls = 0
		var eps []*tracker.Endpoint
		got := "nothing"
		for _, u := range tr.Take().Updates {
			got = ""
			for _, p := range u.Ports {
				eps = p.Endpoints
				for _, ep := range p.Endpoints {
					got += fmt.Sprintf("%s*%d ", ep.Addr, ep.Weight)
				}
			}
		}
		if strings.TrimSpace(got) != want || calls != called {
			t.Errorf("%s: got %q by %d calls, want %q by %d", what, got, calls, want, called)
		}
		return eps
	}
	slice := with(slice("ns", "a", "svc"), "10.0.0.1", "10.0.0.2", "10.0.0.3")
	slice.Endpoints[1].NodeName = ptr("node-2")
	tr.SetSlice(slice)
	step("before the Service", 0, "nothing")
	tr.SetService(colored("plain"))
	plain := step("the Service comes", 3, "10.0.0.1:8080*1 10.0.0.2:8080*1 10.0.0.3:8080*1")
	tr.SetService(colored("heavy"))
	heavy := step("the Service changes", 3, "10.0.0.1:8080*9 10.0.0.2:8080*9 10.0.0.3:8080*9")
	if plain[0].Weight != 1 {
		t.Error("a published endpoint was modified")
	}
	slice.Endpoints[2].Conditions.Ready = ptr(false)
	tr.SetSlice(slice)
	again := step("an endpoint changes", 1, "10.0.0.1:8080*9 10.0.0.2:8080*9 10.0.0.3:8080*9")
	if again[0] != heavy[0] || again[1] != heavy[1] || again[2] == heavy[2] || again[2].Ready {
		t.Error("an unchanged endpoint got a new pointer, or a changed one kept its pointer")
	}
	tr.SetService(colored("heavy"))
	step("the same Service is set again", 0, "nothing")

	tr.SetService(colored("refuse"))
	step("one is refused", 3, "10.0.0.1:8080*1 10.0.0.3:8080*1")
	slice.Endpoints[2].Conditions.Ready = ptr(true)
	tr.SetSlice(slice)
	step("beside one that was refused", 1, "10.0.0.1:8080*1 10.0.0.3:8080*1")
	tr.SetService(colored("warn"))
	step("warnings", 3, "10.0.0.1:8080*2 10.0.0.2:8080*2 10.0.0.3:8080*2")
	want := []string{
		`Service ns/svc true ProxyHookFailed: port "http" (IPv4): endpoint 10.0.0.2:8080: refused`,
		`Service ns/svc true ProxyHookWarning: port "http" (IPv4): endpoint 10.0.0.1:8080: wrapped: weight 2 is a guess; port "http" (IPv4): endpoint 10.0.0.2:8080: wrapped: weight 2 is a guess; port "http" (IPv4): endpoint 10.0.0.3:8080: wrapped: weight 2 is a guess`,
	}
	if !slices.Equal(e, want) {
		t.Errorf("events %q, want %q", e, want)
	}

	tr.DeleteService(named("svc"))
	step("the Service is gone", 0, "")
	tr.SetService(colored("heavy"))
	step("and is back", 3, "10.0.0.1:8080*9 10.0.0.2:8080*9 10.0.0.3:8080*9")
}

// TestSetNodeUsesHookedEndpoints has a hook that moves endpoints to other nodes.
// SetNode must use the hook's results to find the affected Services.
func TestSetNodeUsesHookedEndpoints(t *testing.T) {
	tr := newSynced(t, tracker.Config{
		Node: tracker.NodeInfo{Name: "node-9"},
		OnServiceEndpoint: func(_ *tracker.ServicePort, ep *tracker.Endpoint) error {
			ep.Node = "moved"
			return nil
		},
	})
	s := service("ns", "svc", "10.96.0.1")
	s.Spec.InternalTrafficPolicy = ptr(v1.ServiceInternalTrafficPolicyLocal)
	tr.SetService(s)
	tr.SetSlice(with(slice("ns", "a", "svc"), "10.0.0.1"))
	tr.Take()
	tr.SetNode(tracker.NodeInfo{Name: "node-1"})
	if c := tr.Take(); len(c.Updates) != 0 {
		t.Error("node-1, where the hook left no endpoint:", show(c))
	}
	tr.SetNode(tracker.NodeInfo{Name: "moved"})
	if c := tr.Take(); len(c.Updates) != 1 {
		t.Error("the node to which the hook moved the endpoint:", show(c))
	}
}

// TestHookedEndpointsMatchRebuild compares the results of incremental changes with
// those of a new tracker.
func TestHookedEndpointsMatchRebuild(t *testing.T) {
	calls := 0
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 4))
		config := tracker.Config{
			Node: tracker.NodeInfo{Name: "node-1"}, OnService: mark,
			OnServiceEndpoint: func(p *tracker.ServicePort, ep *tracker.Endpoint) error {
				calls++
				n := int(ep.Addr.Addr().As16()[15]) + len(p.Ext.(color))
				if n%5 == 0 {
					return errors.New("refused")
				}
				ep.Weight = uint16(1 + n%3)
				return nil
			},
		}
		tr := newSynced(t, config)
		services, all := map[types.NamespacedName]*v1.Service{}, map[types.NamespacedName]*discovery.EndpointSlice{}
		got := map[types.NamespacedName][]tracker.PortState{}
		text := func(ports []tracker.PortState) string {
			out := ""
			for _, p := range ports {
				out += p.Port.Key.Port + p.Port.Key.Family.String() + ":"
				for _, e := range p.Endpoints {
					out += fmt.Sprintf(" %s@%s*%d ready=%v", e.Addr, e.Node, e.Weight, e.Ready)
				}
			}
			return out
		}
		for range 60 {
			name := named(fmt.Sprint("s", r.IntN(3)))
			switch r.IntN(4) {
			case 0:
				delete(services, name)
				tr.DeleteService(name)
			case 1:
				s := randomService(r, name)
				s.Annotations = map[string]string{"color": strings.Repeat("x", r.IntN(3))}
				services[name] = s
				tr.SetService(s)
			default:
				es := slice("ns", fmt.Sprint(name.Name, r.IntN(2)), name.Name)
				for i := range 8 {
					if r.IntN(2) == 0 {
						es.Endpoints = append(es.Endpoints, discovery.Endpoint{
							Addresses: []string{fmt.Sprint("10.0.0.", i)}, NodeName: ptr("node-1"),
							Conditions: discovery.EndpointConditions{Ready: ptr(r.IntN(5) != 0)},
						})
					}
				}
				all[named(es.Name)] = es
				tr.SetSlice(es)
			}
			if r.IntN(3) == 0 {
				continue
			}
			for _, u := range tr.Take().Updates {
				if got[u.Name] = u.Ports; len(u.Ports) == 0 {
					delete(got, u.Name)
				}
			}
			fresh := newSynced(t, config)
			for _, s := range services {
				fresh.SetService(s)
			}
			for _, es := range all {
				fresh.SetSlice(es)
			}
			want := map[types.NamespacedName][]tracker.PortState{}
			for _, u := range fresh.Take().Updates {
				want[u.Name] = u.Ports
			}
			if !maps.EqualFunc(got, want, func(a, b []tracker.PortState) bool { return text(a) == text(b) }) {
				t.Fatalf("seed %d\n got %v\nwant %v", seed, got, want)
			}
		}
	}
	if calls < 1000 {
		t.Fatalf("the hook was called %d times, too few for this test", calls)
	}
}

// TestHookWarningsSkipNothing checks that warnings leave nothing out and are reported
// once per object.
func TestHookWarningsSkipNothing(t *testing.T) {
	var e events
	tr := newSynced(t, tracker.Config{
		Events: &e,
		OnService: func(_ *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			p.HashBuckets = 100
			return tracker.Warning("%d slots are few", p.HashBuckets)
		},
		OnEndpoint: func(_ *discovery.EndpointSlice, _ *discovery.Endpoint, ep *tracker.Endpoint) error {
			if ep.Addr.Addr() == addr("10.0.0.3") {
				return errors.New("refused")
			}
			ep.Weight = 5
			return tracker.Warning("no weight given")
		},
	})
	tr.SetService(service("ns", "svc", "10.96.0.1"))
	tr.SetSlice(with(slice("ns", "a", "svc"), "10.0.0.1", "10.0.0.2", "10.0.0.3"))
	c := tr.Take()
	if show(c) != "svc http/IPv4=2" || c.Updates[0].Ports[0].Port.HashBuckets != 100 || c.Updates[0].Ports[0].Endpoints[0].Weight != 5 {
		t.Errorf("%s: %+v", show(c), c.Updates)
	}
	slices.Sort(e)
	want := []string{
		`EndpointSlice ns/a true ProxyHookFailed: endpoint 10.0.0.3:8080: refused`,
		`EndpointSlice ns/a true ProxyHookWarning: endpoint 10.0.0.1:8080: no weight given; endpoint 10.0.0.2:8080: no weight given`,
		`Service ns/svc true ProxyHookWarning: port "http" (IPv4): 100 slots are few`,
	}
	if !slices.Equal(e, want) {
		t.Errorf("events\n%s\nwant\n%s", strings.Join(e, "\n"), strings.Join(want, "\n"))
	}
}

// refs collects the references of events.
type refs []v1.ObjectReference

func (r *refs) Event(ref v1.ObjectReference, _ bool, _, _ string) { *r = append(*r, ref) }

// TestEventRefersToLatestObject checks that an event refers to the Service that was
// set last.
func TestEventRefersToLatestObject(t *testing.T) {
	var r refs
	tr := newSynced(t, tracker.Config{Events: &r})
	s := service("ns", "svc", "10.96.0.1")
	for _, uid := range []types.UID{"one", "two"} {
		s.UID = uid
		tr.SetService(s)
		tr.Event(named("svc"), true, tracker.ReasonLimitExceeded, "too much")
	}
	tr.DeleteService(named("svc"))
	tr.Take()
	tr.Event(named("svc"), false, tracker.ReasonLimitExceeded, "too much")
	want := refs{
		{Kind: "Service", APIVersion: "v1", Namespace: "ns", Name: "svc", UID: "one"},
		{Kind: "Service", APIVersion: "v1", Namespace: "ns", Name: "svc", UID: "two"},
		{Kind: "Service", APIVersion: "v1", Namespace: "ns", Name: "svc"},
	}
	if !slices.Equal(r, want) {
		t.Errorf("events refer to %v, want %v", r, want)
	}
}

// TestUnlistedKindsAreNotRequired checks that only the sources of Config.Kinds
// must be marked, and that Missing lists them.
func TestUnlistedKindsAreNotRequired(t *testing.T) {
	tr := must.Get(tracker.New(tracker.Config{Kinds: []tracker.Kind{tracker.KindSlices, tracker.KindServices}}))(t)
	if got := fmt.Sprint(tr.Missing()); got != "[Services Slices]" || tr.Synced() {
		t.Errorf("missing %s, synced %v", got, tr.Synced())
	}
	tr.MarkSynced(tracker.KindNodes, tracker.KindServices)
	if got := fmt.Sprint(tr.Missing()); got != "[Slices]" || tr.Synced() {
		t.Errorf("missing %s, synced %v", got, tr.Synced())
	}
	tr.MarkSynced(tracker.KindSlices)
	if got := tr.Missing(); got != nil || !tr.Synced() {
		t.Errorf("missing %v, synced %v", got, tr.Synced())
	}
	if all, err := tracker.New(tracker.Config{}); err != nil || fmt.Sprint(all.Missing()) != "[Services Slices Nodes]" {
		t.Errorf("by default: %v, error %v", all.Missing(), err)
	}
	for _, s := range [][]tracker.Kind{{}, {tracker.KindServices, 3}} {
		if _, err := tracker.New(tracker.Config{Kinds: s}); err == nil {
			t.Errorf("sources %v: error %v", s, err)
		}
	}
}
