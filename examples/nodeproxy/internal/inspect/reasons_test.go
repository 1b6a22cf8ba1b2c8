package inspect

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestExplainAllNamesTheOwnerOfAFrontend has two Services with the same external IP and node port.
// The older one has them.
func TestExplainAllNamesTheOwnerOfAFrontend(t *testing.T) {
	cfg := configtest.Parsed(t, []string{"run", "--manifests", t.TempDir(), "--hostname-override", "n1"})
	w, err := objects.New(cfg, nil, nil, objects.WorldHooks{Keep: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	port, number := "http", int32(8080)
	for i, name := range []string{"old", "young", "other"} {
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.Unix(int64(i+1), 0)}}
		s.Spec.ClusterIP = fmt.Sprint("10.96.0.", i+1)
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
		s.Spec.Ports = []v1.ServicePort{{Name: port, Port: 80, Protocol: v1.ProtocolTCP, NodePort: 30080 + int32(i/2)}}
		s.Spec.Type, s.Spec.ExternalIPs = v1.ServiceTypeNodePort, []string{fmt.Sprint("192.0.2.", 1+i/2)}
		w.SetService(s)
		o := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4, Endpoints: []discovery.Endpoint{{Addresses: []string{"10.1.0.2"}}},
			Ports: []discovery.EndpointPort{{Name: &port, Port: &number}}}
		o.Namespace, o.Name, o.Labels = "ns", name+"-1", map[string]string{discovery.LabelServiceName: name}
		w.SetSlice(o)
	}
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	var out strings.Builder
	const want = `ns/young:http/TCP/IPv4: external IP 192.0.2.1:80 belongs to ns/old:http/TCP/IPv4 (ProxyFrontendConflict)
ns/young:http/TCP/IPv4: node port 30080 belongs to ns/old:http/TCP/IPv4 (ProxyFrontendConflict)
3 Services, 3 ports: all have endpoints, 2 frontends lost to other Services
`
	if err := explainAll(&out, w); !errors.Is(err, errCannotWork) || out.String() != want {
		t.Errorf("error %v, output:\n%s\nwant:\n%s", err, out.String(), want)
	}
}

// TestExplainAllGivesTheReasonFromTheSlices has a Service for each reason, and two that work.
func TestExplainAllGivesTheReasonFromTheSlices(t *testing.T) {
	yes, no := true, false
	ready := func(r *bool) discovery.Endpoint {
		return discovery.Endpoint{Addresses: []string{"10.1.0.2"}, Conditions: discovery.EndpointConditions{Ready: r}}
	}
	type slice struct {
		port      string // "-" for none
		endpoints []discovery.Endpoint
	}
	for _, c := range []struct {
		name     string
		selector map[string]string
		target   intstr.IntOrString
		slices   []slice
		want     string
	}{
		{name: "works", slices: []slice{{"http", []discovery.Endpoint{ready(&yes)}}}},
		{name: "no conditions", slices: []slice{{"http", []discovery.Endpoint{ready(nil)}}}},
		{name: "selector", selector: map[string]string{"app": "wbe"}, slices: []slice{{"-", nil}}, want: "its selector app=wbe matches no pod"},
		{name: "no slice", selector: map[string]string{"app": "web"}, want: "it has no EndpointSlice: the controller"},
		{name: "no selector", want: "it has no selector, and no EndpointSlice"},
		{name: "unready", selector: map[string]string{"app": "web"}, slices: []slice{{"http", []discovery.Endpoint{ready(&no)}}}, want: "1 of its 1 endpoint is not ready: a readiness probe fails"},
		{
			name: "named port", selector: map[string]string{"app": "web"}, target: intstr.FromString("htpp"),
			slices: []slice{{"-", []discovery.Endpoint{ready(&yes)}}}, want: `no container port of its 1 endpoint is named "htpp"`,
		},
		{name: "other port", slices: []slice{{"web", []discovery.Endpoint{ready(&yes)}}}, want: `its EndpointSlices have the ports "web"/TCP, and not "http"/TCP`},
	} {
		cfg := configtest.Parsed(t, []string{"run", "--manifests", t.TempDir(), "--hostname-override", "n1"})
		w, err := objects.New(cfg, nil, nil, objects.WorldHooks{Keep: true}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s"}}
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.Selector = "10.96.0.1", []string{"10.96.0.1"}, c.selector
		s.Spec.Ports = []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP, TargetPort: c.target}}
		w.SetService(s)
		w.SetService(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "headless"}, Spec: v1.ServiceSpec{ClusterIP: v1.ClusterIPNone, Ports: s.Spec.Ports}})
		for _, x := range c.slices {
			port, number := x.port, int32(8080)
			o := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4, Endpoints: x.endpoints}
			o.Namespace, o.Name, o.Labels = "ns", "s-1", map[string]string{discovery.LabelServiceName: "s"}
			if port != "-" {
				o.Ports = []discovery.EndpointPort{{Name: &port, Port: &number}}
			}
			w.SetSlice(o)
		}
		w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		var out strings.Builder
		err = explainAll(&out, w)
		if c.want == "" {
			if err != nil || out.String() != "1 Service, 1 port: all have endpoints\n" {
				t.Errorf("%s: error %v, output:\n%s", c.name, err, out.String())
			}
			continue
		}
		if !errors.Is(err, errCannotWork) || !strings.Contains(out.String(), "ns/s:http/TCP/IPv4: has no endpoints on any node: "+c.want) {
			t.Errorf("%s: error %v, output:\n%s\nwant %q", c.name, err, out.String(), c.want)
		}
	}
}

// TestExplainShowsPortsOfRanges checks that explain prints, and compares with the kernel, the ports
// to which packets to a range of ports go.
func TestExplainShowsPortsOfRanges(t *testing.T) {
	ep := func(addr string) *tracker.Endpoint {
		return &tracker.Endpoint{Addr: netip.MustParseAddrPort(addr), Node: "a", Ready: true, Serving: true, Weight: 1}
	}
	port := &tracker.ServicePort{
		Key:       tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "rtp"}, Protocol: v1.ProtocolUDP}, Family: tracker.IPv4},
		ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 10000, LastPort: 20000, TargetPort: 30000,
	}
	// Two endpoints differ only in their own port, which does not matter.
	svc := ruleset.Compile(tracker.PortState{Port: port, Endpoints: []*tracker.Endpoint{ep("10.0.0.1:80"), ep("10.0.0.1:81"), ep("10.0.0.2:80")}}, nil, tracker.TopologyOptions{})
	s := &ruleset.Snapshot{Node: &ruleset.Node{}, Ports: []*ruleset.Port{svc}}
	packet := ruleset.Packet{From: netip.MustParseAddr("192.0.2.1"), InInterface: "eth0", Protocol: v1.ProtocolUDP, To: netip.MustParseAddrPort("10.96.0.1:10007")}
	q := question{packet: packet, verdict: s.Trace(packet)}

	var out strings.Builder
	writeVerdict(&out, q.verdict)
	for _, want := range []string{"by its cluster IP, ports 10000-20000\n", "endpoint: 10.0.0.1:30007 on", "endpoint: 10.0.0.2:30007 on"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("explain prints\n%s\nwithout %q", out.String(), want)
		}
	}
	for _, c := range []struct {
		kernel []string
		agrees bool
	}{
		{[]string{"10.0.0.1:30007", "10.0.0.2:30007"}, true},
		{[]string{"10.0.0.1:30008", "10.0.0.2:30008"}, false},
		{[]string{"10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80"}, false},
	} {
		found := dataplane.Found{Entry: true}
		for _, a := range c.kernel {
			found.Endpoints = append(found.Endpoints, netip.MustParseAddrPort(a))
		}
		if err := q.compare(&out, found, q.entry()); (err == nil) != c.agrees {
			t.Errorf("a kernel with %v: %v, want agreement %t", c.kernel, err, c.agrees)
		}
	}
}
