package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// speaker is a node "here" with a Follower.
type speaker struct {
	t      *testing.T
	tr     *tracker.Tracker
	cursor *ruleset.Cursor
	vips   *follower
	said   []string
}

func newSpeaker(t *testing.T) *speaker {
	w := &speaker{t: t}
	var err error
	w.tr, err = tracker.New(tracker.Config{
		Node: tracker.NodeInfo{Name: "here"},
	})
	if err != nil {
		t.Fatal(err)
	}
	engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: w.tr}))(t)
	w.vips = newFollower(func(a address) { w.said = append(w.said, text(a)) }, []netip.Prefix{netip.MustParsePrefix("203.0.113.0/25")})
	w.cursor = engine.Attach("speaker", w.vips)
	w.tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return w
}

// text returns an address as "ADDRESS +" or "-", and each Service with the same sign.
func text(a address) string {
	sign := map[bool]string{true: "+", false: "-"}
	out := a.Addr.String() + " " + sign[a.Serves]
	for _, name := range slices.SortedFunc(maps.Keys(a.Services), func(a, b types.NamespacedName) int { return strings.Compare(a.Name, b.Name) }) {
		out += " " + name.Name + sign[a.Services[name]]
	}
	return out
}

// says syncs and compares what the hook said since the last call.
func (w *speaker) says(want ...string) {
	w.t.Helper()
	must.Do(w.t, w.cursor.Sync(w.t.Context()))
	if !slices.Equal(w.said, want) {
		w.t.Errorf("the hook said %q, want %q", w.said, want)
	}
	w.said = nil
}

// namespace returns the namespace of a Service: "x" of "x-NAME", and else "ns".
func namespace(name string) string {
	if x, _, ok := strings.Cut(name, "-"); ok {
		return x
	}
	return "ns"
}

// service sets a Service with the ports at external IPs or, with "lb " in front, load-balancer IPs. The policy
// is "Local" or "Cluster". A Service whose name begins with "o" is older than others.
func (w *speaker) service(name, policy, ips string, ports ...int32) {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace(name), Name: name, CreationTimestamp: metav1.Unix(2000, 0)},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ClusterIP: fmt.Sprint("10.96.0.", name[0]), IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
		},
	}
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	if name[0] == 'o' {
		s.CreationTimestamp = metav1.Unix(1000, 0)
	}
	if policy == "Cluster" {
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
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
func (w *speaker) endpoints(name string, port int32, at ...string) {
	portName := fmt.Sprint("p", port)
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace(name), Name: fmt.Sprint(name, port), Labels: map[string]string{discovery.LabelServiceName: name}},
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
	w := newSpeaker(t)
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
	if len(w.vips.ports) != 0 || len(w.vips.told) != 0 {
		t.Errorf("left: %v, %v", w.vips.ports, w.vips.told)
	}
}

func TestPolicyCluster(t *testing.T) {
	w := newSpeaker(t)
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

func TestPortsAndServicesShareAddresses(t *testing.T) {
	w := newSpeaker(t)
	w.service("a", "Local", "203.0.113.1", 80, 81)
	w.endpoints("a", 80, "there")
	w.endpoints("a", 81, "here")
	w.says("203.0.113.1 + a+") // one port of it serves
	w.service("b", "Local", "203.0.113.1", 82)
	w.endpoints("b", 82, "there")
	w.says("203.0.113.1 - a+ b-")
	w.endpoints("b", 82, "here")
	w.says("203.0.113.1 + a+ b+")
	// A full delta repeats nothing, and finds what went in between.
	w.cursor.Resync()
	w.says()
	w.tr.DeleteService(types.NamespacedName{Namespace: "ns", Name: "b"})
	w.cursor.Resync()
	w.says("203.0.113.1 + a+")
}

func TestOtherNamespacesDoNotAffectAnAddress(t *testing.T) {
	for _, policy := range []string{"Local", "Cluster"} {
		w := newSpeaker(t)
		w.service("v", policy, "lb 203.0.113.200", 443)
		w.endpoints("v", 443, "here")
		w.says("203.0.113.200 + v+")
		// Even an older Service does not own an assigned address, whether it has endpoints or not.
		for _, name := range []string{"x-a", "ox-a"} {
			w.service(name, policy, "203.0.113.200", 80, 443)
			w.says()
			w.endpoints(name, 80, "here")
			w.says()
			w.endpoints("v", 443)
			w.says("203.0.113.200 - v-")
			w.endpoints("v", 443, "here")
			w.says("203.0.113.200 + v+")
		}
		w.service("y-a", policy, "lb 203.0.113.200", 81) // of the same age as v, and later by name
		w.says()
		w.service("o", policy, "203.0.113.200", 82) // of the same namespace
		w.says("203.0.113.200 - o- v+")
		w.endpoints("o", 82, "here")
		w.says("203.0.113.200 + o+ v+")
		w.tr.DeleteService(types.NamespacedName{Namespace: "ns", Name: "v"})
		w.says("203.0.113.200 - y-a-")
		w.tr.DeleteService(types.NamespacedName{Namespace: "y", Name: "y-a"})
		w.says("203.0.113.200 -") // external IPs are left, outside of the range
	}
}

func TestExternalIPsAreAnnouncedInTheRanges(t *testing.T) {
	w := newSpeaker(t)
	w.service("a", "Cluster", "203.0.113.127 203.0.113.128 8.8.8.8", 80)
	w.endpoints("a", 80, "here")
	w.says("203.0.113.127 + a+")
	w.service("o", "Cluster", "203.0.113.127 8.8.8.8", 81)
	w.service("ox-a", "Cluster", "203.0.113.127", 82)
	w.endpoints("ox-a", 82, "here")
	w.says("203.0.113.127 - a+ o-") // o is the first by key
	w.service("o", "Cluster", "8.8.8.8", 81)
	w.says("203.0.113.127 + ox-a+")
	// No ranges allow no external IPs.
	none := w.cursor.Follow("none", newFollower(func(a address) { t.Errorf("without ranges: %v", a) }, nil))
	must.Do(t, none.Sync(t.Context()))
}
