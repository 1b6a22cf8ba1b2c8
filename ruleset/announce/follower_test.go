package announce_test

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

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/announce"
	"github.com/go-proxier/proxier/tracker"
)

// world is a node "here" with a Follower.
type world struct {
	t      *testing.T
	tr     *tracker.Tracker
	cursor *ruleset.Cursor
	vips   *announce.Follower
	said   []string
}

func newWorld(t *testing.T) *world {
	w := &world{t: t}
	var err error
	w.tr, err = tracker.New(tracker.Config{
		Node: tracker.NodeInfo{Name: "here"},
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			p.PassWithoutEndpoints = s.Annotations["pass"] != ""
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: w.tr})
	if err != nil {
		t.Fatal(err)
	}
	w.vips = announce.New(func(a announce.Address) { w.said = append(w.said, text(a)) })
	w.cursor = engine.Attach("speaker", w.vips)
	w.tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return w
}

// text returns an address as "ADDRESS +" or "-", and each Service with the same sign.
func text(a announce.Address) string {
	sign := map[bool]string{true: "+", false: "-"}
	out := a.Addr.String() + " " + sign[a.Serves]
	for _, s := range a.Services {
		out += " " + s.Name.Name + sign[s.Serves]
	}
	return out
}

// says syncs and compares what the hook said since the last call.
func (w *world) says(want ...string) {
	w.t.Helper()
	if err := w.cursor.Sync(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	if !slices.Equal(w.said, want) {
		w.t.Errorf("the hook said %q, want %q", w.said, want)
	}
	w.said = nil
}

// service sets a Service with the ports at external IPs or, with "lb " in front, load-balancer IPs. The policy
// may be "Local", "Cluster" or "pass", which is Local with PassWithoutEndpoints.
func (w *world) service(name, policy, ips string, ports ...int32) {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ClusterIP: fmt.Sprint("10.96.0.", name[0]), IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
		},
	}
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	switch policy {
	case "Cluster":
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	case "pass":
		s.Annotations = map[string]string{"pass": "yes"}
	}
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", p), Port: p})
	}
	if lb, ok := strings.CutPrefix(ips, "lb "); ok {
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: lb}}
	} else {
		s.Spec.ExternalIPs = strings.Fields(ips)
	}
	w.tr.SetService(s)
}

// endpoints sets the endpoints of a Service's ports: "here" and "there" are ready, "here-" and "there-"
// terminate and serve.
func (w *world) endpoints(name string, port int32, at ...string) {
	portName := fmt.Sprint("p", port)
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(name, port), Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &portName, Port: &port}},
	}
	for i, a := range at {
		node, ends := strings.CutSuffix(a, "-")
		ready, serving := !ends, true
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{fmt.Sprint("10.0.0.", i+1)}, NodeName: &node,
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &ends},
		})
	}
	w.tr.SetSlice(s)
}

func TestPolicyLocal(t *testing.T) {
	w := newWorld(t)
	w.service("a", "Local", "lb 203.0.113.1", 80)
	w.says("203.0.113.1 - a-")
	w.endpoints("a", 80, "there")
	w.says()
	w.endpoints("a", 80, "here", "there")
	w.says("203.0.113.1 + a+")
	w.endpoints("a", 80, "here", "here")
	w.says()
	// The last local endpoint terminates: the rules still use it.
	w.endpoints("a", 80, "here-", "there")
	w.says("203.0.113.1 - a-")
	w.endpoints("a", 80, "there")
	w.says()
	w.endpoints("a", 80, "here")
	w.says("203.0.113.1 + a+")
	w.tr.DeleteService(types.NamespacedName{Namespace: "ns", Name: "a"})
	w.says("203.0.113.1 -")
	if all := w.vips.All(); len(all) != 0 {
		t.Errorf("left: %v", all)
	}
}

func TestPolicyCluster(t *testing.T) {
	w := newWorld(t)
	w.service("a", "Cluster", "203.0.113.1 203.0.113.2", 80)
	w.says("203.0.113.1 - a-", "203.0.113.2 - a-")
	w.endpoints("a", 80, "there")
	w.says("203.0.113.1 + a+", "203.0.113.2 + a+")
	w.endpoints("a", 80, "there-") // no node would be better
	w.says()
	w.service("a", "Cluster", "203.0.113.2", 80)
	w.says("203.0.113.1 -")
	w.service("a", "Local", "203.0.113.2", 80)
	w.says("203.0.113.2 - a-")
}

// TestPassedPacketsAreNotServed has an address that no rule mentions while the node has no endpoint.
func TestPassedPacketsAreNotServed(t *testing.T) {
	w := newWorld(t)
	w.service("a", "pass", "203.0.113.1", 80)
	w.endpoints("a", 80, "here")
	w.says("203.0.113.1 + a+")
	w.endpoints("a", 80, "here-", "there")
	w.says("203.0.113.1 - a-")
	w.endpoints("a", 80, "there")
	w.says() // external traffic passes
	w.endpoints("a", 80)
	w.says("203.0.113.1 -") // all traffic passes
	w.endpoints("a", 80, "here")
	w.says("203.0.113.1 + a+")
}

func TestPortsAndServicesShareAddresses(t *testing.T) {
	w := newWorld(t)
	w.service("a", "Local", "203.0.113.1", 80, 81)
	w.endpoints("a", 80, "there")
	w.endpoints("a", 81, "here")
	w.says("203.0.113.1 + a+") // one port of it serves
	w.service("b", "Local", "203.0.113.1", 82)
	w.endpoints("b", 82, "there")
	w.says("203.0.113.1 - a+ b-")
	w.endpoints("b", 82, "here")
	w.says("203.0.113.1 + a+ b+")
	all := w.vips.All()
	if len(all) != 1 || all[0].Addr != netip.MustParseAddr("203.0.113.1") || len(all[0].Services[0].Ports) != 2 || all[0].Services[1].Ports[0].Spec.Port != 82 {
		t.Errorf("all: %+v", all)
	}
	// A full delta repeats nothing, and finds what went in between.
	w.cursor.Resync()
	w.says()
	w.tr.DeleteService(types.NamespacedName{Namespace: "ns", Name: "b"})
	w.cursor.Resync()
	w.says("203.0.113.1 + a+")
}
