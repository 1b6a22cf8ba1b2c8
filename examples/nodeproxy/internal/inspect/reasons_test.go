package inspect

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// TestExplainAllNamesTheOwnerOfAFrontend has two Services with the same external IP and node port.
// The older one has them.
func TestExplainAllNamesTheOwnerOfAFrontend(t *testing.T) {
	cfg := configtest.Parsed(t, []string{"run", "--manifests", t.TempDir(), "--hostname-override", "n1"})
	w := must.Get(objects.New(cfg, nil, nil, objects.WorldHooks{Keep: true}, slog.New(slog.DiscardHandler)))(t)
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
		w := must.Get(objects.New(cfg, nil, nil, objects.WorldHooks{Keep: true}, slog.New(slog.DiscardHandler)))(t)
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
		err := explainAll(&out, w)
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
