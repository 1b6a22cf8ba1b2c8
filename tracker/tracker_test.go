package tracker_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// show renders updates: "svc http/IPv4=2 ..." with the number of endpoints.
func show(c tracker.Changes) string {
	var out []string
	for _, u := range c.Updates {
		line := u.Name.Name
		for _, p := range u.Ports {
			line += fmt.Sprintf(" %s/%s=%d", p.Port.Key.Port, p.Port.Key.Family, len(p.Endpoints))
		}
		out = append(out, line)
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

func TestNothingIsTakenBeforeSync(t *testing.T) {
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "me"}}))(t)
	calls := [2]int{}
	tr.Notify(func() { calls[0]++; tr.Synced() }) // not with the lock held
	tr.SetService(service("ns", "svc", "10.96.0.1"))
	tr.SetSlice(with(slice("ns", "a", "svc"), "10.0.0.1"))
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices)
	tr.MarkSynced(tracker.Kind(77))
	if c := tr.Take(); tr.Synced() || c.Updates != nil || c.Node.Name != "me" || calls[0] != 0 {
		t.Fatal("changes or calls before all sources are synced", c, calls)
	}
	tr.MarkSynced(tracker.KindNodes)
	if !tr.Synced() || calls[0] != 1 {
		t.Fatal("no notification after the sources are synced", calls)
	}
	tr.MarkSynced(tracker.KindNodes)
	tr.Notify(func() { calls[1]++ })
	if c := tr.Take(); show(c) != "svc http/IPv4=1" {
		t.Fatal(show(c))
	}
	if c := tr.Take(); c.Updates != nil {
		t.Fatal(show(c))
	}
	tr.SetSlice(with(slice("ns", "a", "svc"), "10.0.0.1"))
	if calls != [2]int{1, 0} {
		t.Error("notified without a change", calls)
	}
	tr.SetSlice(with(slice("ns", "a", "svc"), "10.0.0.2"))
	tr.DeleteSlice(named("a"))
	tr.SetNode(tracker.NodeInfo{Name: "you"})
	tr.SetService(service("ns", "svc", "10.96.0.2"))
	tr.DeleteService(named("svc"))
	if calls != [2]int{6, 5} {
		t.Error(calls)
	}
}

// TestSetNodeUpdatesAffectedServices checks which Services are returned after the
// node changed.
func TestSetNodeUpdatesAffectedServices(t *testing.T) {
	local := v1.ServiceInternalTrafficPolicyLocal
	hints := func(s *discovery.EndpointSlice, h *discovery.EndpointHints) *discovery.EndpointSlice {
		for i := range s.Endpoints {
			s.Endpoints[i].Hints = h
		}
		return s
	}
	forZones := func(zones ...string) *discovery.EndpointHints {
		h := &discovery.EndpointHints{}
		for _, z := range zones {
			h.ForZones = append(h.ForZones, discovery.ForZone{Name: z})
		}
		return h
	}
	fill := func(tr *tracker.Tracker) {
		for i, name := range []string{"plain", "local", "local-elsewhere", "zone-a", "zone-c", "node-hints"} {
			s := service("ns", name, fmt.Sprintf("10.96.0.%d", i+1))
			if strings.HasPrefix(name, "local") {
				s.Spec.InternalTrafficPolicy = &local
			}
			tr.SetService(s)
		}
		tr.SetService(service("ns", "empty", "10.96.0.100"))
		tr.SetSlice(with(slice("ns", "1", "plain"), "10.0.0.1"))
		tr.SetSlice(with(slice("ns", "2", "local"), "10.0.0.2"))
		elsewhere := with(slice("ns", "3", "local-elsewhere"), "10.0.0.3")
		elsewhere.Endpoints[0].NodeName = ptr("elsewhere")
		tr.SetSlice(elsewhere)
		mixed := hints(with(slice("ns", "4", "zone-a"), "10.0.0.4", "10.0.1.4"), forZones("a"))
		mixed.Endpoints[1].Hints = forZones("b")
		tr.SetSlice(mixed)
		tr.SetSlice(hints(with(slice("ns", "5", "zone-c"), "10.0.0.5"), forZones("c")))
		onNodes := hints(with(slice("ns", "6", "node-hints"), "10.0.0.6", "10.0.1.6"), &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: "node-1"}}})
		onNodes.Endpoints[1].Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: "node-2"}}}
		tr.SetSlice(onNodes)
	}
	for _, tt := range []struct {
		name     string
		from, to tracker.NodeInfo
		ignore   bool
		want     string
	}{
		{"name", tracker.NodeInfo{Name: "x"}, tracker.NodeInfo{Name: "node-1"}, false, "local node-hints"},
		{"name, no endpoints on either", tracker.NodeInfo{Name: "x"}, tracker.NodeInfo{Name: "y"}, false, ""},
		{"name, between nodes with endpoints", tracker.NodeInfo{Name: "node-1"}, tracker.NodeInfo{Name: "elsewhere"}, false, "local local-elsewhere node-hints"},
		{"zone", tracker.NodeInfo{Zone: "x"}, tracker.NodeInfo{Zone: "a"}, false, "zone-a"},
		{"zone, between hinted zones", tracker.NodeInfo{Zone: "a"}, tracker.NodeInfo{Zone: "b"}, false, "zone-a"},
		{"zone without hints", tracker.NodeInfo{Zone: "x"}, tracker.NodeInfo{Zone: "y"}, false, ""},
		{"zone that changes no endpoint", tracker.NodeInfo{Zone: "x"}, tracker.NodeInfo{Zone: "c"}, false, ""},
		{"addresses", tracker.NodeInfo{}, tracker.NodeInfo{Addresses: []netip.Addr{addr("192.0.2.1")}}, false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := newSynced(t, tracker.Config{Node: tt.from})
			fill(tr)
			tr.Take()
			if tr.SetNode(tt.from) || !tr.SetNode(tt.to) || !tr.Node().Equal(tt.to) {
				t.Error("wrong result of SetNode or Node")
			}
			c := tr.Take()
			var got []string
			for _, u := range c.Updates {
				got = append(got, u.Name.Name)
			}
			slices.Sort(got)
			if strings.Join(got, " ") != tt.want || !c.Node.Equal(tt.to) {
				t.Errorf("got %v, want %s", got, tt.want)
			}
		})
	}
}

// TestDeletedNodeStays calls SetNode as a handler of Node deletions does, and with a
// node without a name.
func TestDeletedNodeStays(t *testing.T) {
	me := tracker.NodeInfo{Name: "node-1", Zone: "a", Addresses: addrs("192.0.2.1")}
	elsewhere := tracker.NodeInfo{Name: "node-1", Addresses: addrs("192.0.2.2")}
	nameOnly := tracker.NodeInfo{Name: "node-1"}
	for _, tt := range []struct {
		name    string
		set     tracker.NodeInfo
		changed bool
		want    tracker.NodeInfo
	}{
		{"deleted", tracker.NodeInfoOf(nil), false, me},
		{"zero", tracker.NodeInfo{}, false, me},
		{"no name", tracker.NodeInfo{Addresses: addrs("192.0.2.2")}, true, elsewhere},
		{"no name, all else the same", tracker.NodeInfo{Zone: "a", Addresses: addrs("192.0.2.1")}, false, me},
		{"name only", nameOnly, true, nameOnly},
		{"a Node object without addresses", tracker.NodeInfoOf(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}), true, nameOnly},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := newSynced(t, tracker.Config{Node: me})
			local := v1.ServiceInternalTrafficPolicyLocal
			s := service("ns", "svc", "10.96.0.1")
			s.Spec.InternalTrafficPolicy = &local
			tr.SetService(s)
			tr.SetSlice(with(slice("ns", "a", "svc"), "10.0.0.1"))
			u := tr.Take().Updates
			if len(u) != 1 || len(u[0].Ports) != 1 {
				t.Fatalf("updates %v", u)
			}
			if got := tr.SetNode(tt.set); got != tt.changed {
				t.Errorf("SetNode() = %v", got)
			}
			if got := tr.Node(); !got.Equal(tt.want) {
				t.Errorf("the node is %+v, want %+v", got, tt.want)
			}
			c := tr.Take()
			if len(c.Updates) != 0 {
				t.Errorf("updates %v", c.Updates)
			}
			p := u[0].Ports[0]
			if got := tracker.Select(p.Port, p.Endpoints, c.Node); len(got.Local) != 1 {
				t.Errorf("%d local endpoints, want 1", len(got.Local))
			}
		})
	}

	// A tracker without a node name stores what it gets.
	tr := newSynced(t, tracker.Config{})
	if !tr.SetNode(tracker.NodeInfo{Zone: "a"}) || !tr.Node().Equal(tracker.NodeInfo{Zone: "a"}) {
		t.Errorf("without a name: %+v", tr.Node())
	}
	if !tr.SetNode(me) || !tr.Node().Equal(me) {
		t.Errorf("with a name: %+v", tr.Node())
	}
}

func TestNodeIsCopied(t *testing.T) {
	tr := newSynced(t, tracker.Config{})
	n := tracker.NodeInfo{Name: "me", Addresses: addrs("192.0.2.1")}
	tr.SetNode(n)
	n.Addresses[0] = addr("192.0.2.2")
	if got := tr.Take().Node.Addresses; !slices.Equal(got, addrs("192.0.2.1")) {
		t.Error(got)
	}
}

// TestTrackerSurvivesHookPanic checks that a hook that panics leaves the tracker usable.
func TestTrackerSurvivesHookPanic(t *testing.T) {
	tr := newSynced(t, tracker.Config{OnService: func(s *v1.Service, _ *v1.ServicePort, _ *tracker.ServicePort) error {
		if s.Annotations != nil {
			panic("hook")
		}
		return nil
	}})
	bad := service("ns", "bad", "10.96.0.2")
	bad.Annotations = map[string]string{}
	func() {
		defer func() { _ = recover() }()
		tr.SetService(bad)
		t.Error("no panic")
	}()
	tr.SetService(service("ns", "svc", "10.96.0.1"))
	if got := show(tr.Take()); got != "svc http/IPv4=0" {
		t.Error(got)
	}
}

func ptr[T any](v T) *T { return &v }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func named(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "ns", Name: name}
}

// service returns a ClusterIP Service with one TCP port "http", 80.
func service(namespace, name, ip string) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.ServiceSpec{
			Type:       v1.ServiceTypeClusterIP,
			ClusterIP:  ip,
			ClusterIPs: []string{ip},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports:      []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
	if a, err := netip.ParseAddr(ip); err == nil && a.Is6() {
		s.Spec.IPFamilies[0] = v1.IPv6Protocol
	}
	return s
}

// slice returns an IPv4 EndpointSlice with the port "http", 8080, and no
// endpoints.
func slice(namespace, name, owner string) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name,
			Labels: map[string]string{discovery.LabelServiceName: owner},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: ptr("http"), Protocol: ptr(v1.ProtocolTCP), Port: ptr(int32(8080))}},
	}
}

// with adds ready endpoints on node-1 to a slice.
func with(s *discovery.EndpointSlice, addrs ...string) *discovery.EndpointSlice {
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a}, NodeName: ptr("node-1")})
	}
	return s
}

func key(service, port string, f tracker.Family) tracker.Key {
	return tracker.Key{
		ServicePortName: tracker.ServicePortName{NamespacedName: named(service), Port: port, Protocol: v1.ProtocolTCP},
		Family:          f,
	}
}
