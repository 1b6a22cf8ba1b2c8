package tracker_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// TestEveryReasonIsReachable has an object, or endpoints, for each Reason. It reads the
// constants from the source, so that a new one needs a case. Package ruleset tests its own.
func TestEveryReasonIsReachable(t *testing.T) {
	left := map[tracker.Reason]bool{
		tracker.ReasonFrontendConflict: true, // only package ruleset
	}
	config := tracker.Config{
		Families: []tracker.Family{tracker.IPv4},
		Selector: tracker.Selector{Filter: func(s *v1.Service) bool { return s.Annotations["filter"] == "" }},
		OnService: func(s *v1.Service, _ *v1.ServicePort, _ *tracker.ServicePort) error {
			switch s.Annotations["hook"] {
			case "fail":
				return errors.New("no")
			case "warn":
				return tracker.Warning("perhaps")
			}
			return nil
		},
		OnLeftOut: func(o v1.ObjectReference, list []tracker.LeftOut) {
			for _, l := range list {
				left[l.Reason] = true
				if l.Err == nil || l.Err.Error() == "" || o.Kind == "" {
					t.Errorf("%+v of %v", l, o)
				}
			}
		},
	}
	for _, c := range []struct {
		want    tracker.Reason
		log     bool // it has a line and an event
		whole   bool
		service func(*v1.Service)
		slice   func(*discovery.EndpointSlice)
		config  func(*tracker.Config)
	}{
		{want: tracker.ReasonExternalName, whole: true, service: func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeExternalName }},
		{want: tracker.ReasonHeadless, whole: true, service: func(s *v1.Service) { s.Spec.ClusterIP = v1.ClusterIPNone }},
		{want: tracker.ReasonHeadless, whole: true, service: func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", []string{v1.ClusterIPNone} }},
		{want: tracker.ReasonHeadlessLabel, whole: true, service: func(s *v1.Service) { s.Labels = map[string]string{v1.IsHeadlessService: ""} }},
		{want: tracker.ReasonHeadlessLabel, whole: true, slice: func(s *discovery.EndpointSlice) { s.Labels[v1.IsHeadlessService] = "" }},
		{want: tracker.ReasonOtherProxy, whole: true, service: func(s *v1.Service) { s.Labels = map[string]string{tracker.LabelServiceProxyName: "other"} }},
		{want: tracker.ReasonOtherProxy, whole: true, service: func(*v1.Service) {}, config: func(c *tracker.Config) { c.Selector.ProxyNames = []string{"mine"} }},
		{want: tracker.ReasonFiltered, whole: true, service: func(s *v1.Service) { s.Annotations = map[string]string{"filter": "yes"} }},
		{want: tracker.ReasonNoClusterIP, whole: true, service: func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil }},
		{want: tracker.ReasonNoClusterIP, whole: true, log: true, service: func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", []string{"10.96.0.1"} }},
		{want: tracker.ReasonNoPorts, whole: true, service: func(s *v1.Service) { s.Spec.Ports = nil }},
		{want: tracker.ReasonInvalid, whole: true, log: true, service: func(s *v1.Service) { s.Namespace = "" }},
		{want: tracker.ReasonInvalid, log: true, service: func(s *v1.Service) { s.Spec.SessionAffinity = "clientIP" }},
		{want: tracker.ReasonInvalid, log: true, service: func(s *v1.Service) { s.Spec.Type = "nodePort" }},
		{want: tracker.ReasonPortNumber, log: true, service: func(s *v1.Service) { s.Spec.Ports[0].Port = 70000 }},
		{want: tracker.ReasonProtocol, log: true, service: func(s *v1.Service) { s.Spec.Ports[0].Protocol = "tcp" }},
		{want: tracker.ReasonDuplicate, log: true, service: func(s *v1.Service) { s.Spec.Ports = append(s.Spec.Ports, s.Spec.Ports[0]) }},
		{want: tracker.ReasonAddress, log: true, service: func(s *v1.Service) { s.Spec.ExternalIPs = []string{"x"} }},
		{want: tracker.ReasonReserved, log: true, service: func(s *v1.Service) { s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "169.254.169.254"}} }},
		{want: tracker.ReasonFamily, service: func(s *v1.Service) { s.Spec.ExternalIPs = []string{"fd00::1"} }},
		{want: tracker.ReasonFamily, service: func(s *v1.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies = "fd00::1", []string{"fd00::1"}, []v1.IPFamily{v1.IPv6Protocol}
		}},
		{want: tracker.ReasonFamily, whole: true, slice: func(s *discovery.EndpointSlice) { s.AddressType = discovery.AddressTypeIPv6 }},
		{want: tracker.ReasonFamilyMismatch, log: true, service: func(s *v1.Service) {
			s.Spec.ClusterIPs, s.Spec.IPFamilies = []string{"10.96.0.1"}, []v1.IPFamily{v1.IPv6Protocol}
		}},
		{want: tracker.ReasonFamilyMismatch, service: func(s *v1.Service) { s.Spec.ClusterIPs, s.Spec.IPFamilies = []string{"10.96.0.1", "fd00::1"}, nil }},
		{want: tracker.ReasonIPMode, service: func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.1", IPMode: ptr(v1.LoadBalancerIPModeProxy)}}
		}},
		{want: tracker.ReasonHostname, service: func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{Hostname: "lb.example.com"}}
		}},
		{want: tracker.ReasonExternalIPsOff, service: func(s *v1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1"} }, config: func(c *tracker.Config) { c.IgnoreExternalIPs = true }},
		{want: tracker.ReasonSourceRange, log: true, service: func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "x"} }},
		{want: tracker.ReasonClosed, log: true, service: func(s *v1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"x"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		}},
		{want: tracker.ReasonHookFailed, log: true, service: func(s *v1.Service) { s.Annotations = map[string]string{"hook": "fail"} }},
		{want: tracker.ReasonHookWarning, log: true, service: func(s *v1.Service) { s.Annotations = map[string]string{"hook": "warn"} }},
		{want: tracker.ReasonLimitExceeded, log: true, service: func(s *v1.Service) { s.Spec.Ports = make([]v1.ServicePort, 2001) }},
		{want: tracker.ReasonAddressType, whole: true, log: true, slice: func(s *discovery.EndpointSlice) { s.AddressType = discovery.AddressTypeFQDN }},
		{want: tracker.ReasonNoService, whole: true, log: true, slice: func(s *discovery.EndpointSlice) { s.Labels = nil }},
		{want: tracker.ReasonPortName, log: true, slice: func(s *discovery.EndpointSlice) { s.Ports[0].Name = nil }},
		{want: tracker.ReasonNoPortNumber, slice: func(s *discovery.EndpointSlice) { s.Ports[0].Port = nil }},
		{want: tracker.ReasonPortNumber, log: true, slice: func(s *discovery.EndpointSlice) { s.Ports[0].Port = ptr(int32(-1)) }},
		{want: tracker.ReasonProtocol, log: true, slice: func(s *discovery.EndpointSlice) { s.Ports[0].Protocol = ptr(v1.Protocol("udp")) }},
		{want: tracker.ReasonAddress, log: true, slice: func(s *discovery.EndpointSlice) { s.Endpoints[0].Addresses = nil }},
		{want: tracker.ReasonFurtherAddress, slice: func(s *discovery.EndpointSlice) { s.Endpoints[0].Addresses = []string{"10.0.0.1", "10.0.0.2"} }},
		{want: tracker.ReasonFamilyMismatch, log: true, slice: func(s *discovery.EndpointSlice) { s.Endpoints[0].Addresses[0] = "fd00::1" }},
		{want: tracker.ReasonDuplicate, slice: func(s *discovery.EndpointSlice) { s.Endpoints = append(s.Endpoints, s.Endpoints[0]) }},
		{want: tracker.ReasonInvalid, log: true, slice: func(s *discovery.EndpointSlice) {
			s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: "now"}
		}},
	} {
		var sent events
		var got []tracker.LeftOut
		cfg := config
		cfg.Events = &sent
		cfg.OnLeftOut = func(o v1.ObjectReference, list []tracker.LeftOut) {
			config.OnLeftOut(o, list)
			got = append(got, list...)
		}
		if c.config != nil {
			c.config(&cfg)
		}
		tr := newSynced(t, cfg)
		s, sl := service("ns", "svc", "10.96.0.1"), with(slice("ns", "a", "svc"), "10.0.0.1")
		if c.service != nil {
			c.service(s)
			tr.SetService(s)
		} else {
			c.slice(sl)
			tr.SetSlice(sl)
		}
		i := slices.IndexFunc(got, func(l tracker.LeftOut) bool { return l.Reason == c.want })
		if i < 0 || got[i].Whole != c.whole || got[i].Expected == c.log {
			t.Errorf("%s: left out %+v", c.want, got)
		}
		if has := strings.Contains(strings.Join(sent, "\n"), string(c.want)); has != c.log && s.Namespace != "" {
			t.Errorf("%s: events %q", c.want, sent)
		}
	}
	for reason := range excluded(t) {
		left[reason] = true
	}
	file := must.Get(parser.ParseFile(token.NewFileSet(), "reason.go", nil, 0))(t)
	slice := must.Get(parser.ParseFile(token.NewFileSet(), "../endpointslice/leftout.go", nil, 0))(t)
	texts := map[string]string{}
	n := 0
	for _, f := range []*ast.File{slice, file} {
		ast.Inspect(f, func(x ast.Node) bool {
			spec, ok := x.(*ast.ValueSpec)
			if !ok {
				return true
			}
			name := spec.Names[0].Name
			if lit, ok := spec.Values[0].(*ast.BasicLit); ok {
				texts[name], _ = strconv.Unquote(lit.Value)
			}
			if f == file {
				n++
				if !left[tracker.Reason(texts[name])] {
					t.Errorf("no case leads to %s, %q", name, texts[name])
				}
			}
			return true
		})
	}
	if n != len(texts) || n < 30 {
		t.Errorf("%d constants of tracker, %d texts", n, len(texts))
	}
}

// excluded returns the reasons of Selection.Excludes, and checks them.
func excluded(t *testing.T) map[tracker.Reason]bool {
	out := map[tracker.Reason]bool{}
	node := tracker.NodeInfo{Name: "here", Zone: "a"}
	for _, c := range []struct {
		port  tracker.ServicePort
		other tracker.Endpoint // besides a ready one on the node
		want  tracker.Reason
	}{
		{other: tracker.Endpoint{Ready: true, Weight: 1}},
		{other: tracker.Endpoint{Serving: true, Weight: 1}, want: tracker.ReasonNotReady},
		{other: tracker.Endpoint{Serving: true, Terminating: true, Weight: 1}, want: tracker.ReasonTerminating},
		{other: tracker.Endpoint{Ready: true, Weight: 1, ForZones: []string{"b"}}, want: tracker.ReasonHints},
		{port: tracker.ServicePort{InternalLocal: true}, other: tracker.Endpoint{Ready: true, Weight: 1, Node: "there"}, want: tracker.ReasonOtherNode},
		{other: tracker.Endpoint{Ready: true}, want: tracker.ReasonWeight},
	} {
		own := &tracker.Endpoint{Ready: true, Weight: 1, Node: "here", ForZones: []string{"a"}}
		all := []*tracker.Endpoint{own, &c.other}
		if c.other.Weight == 0 {
			all = all[:1] // as package ruleset does
		}
		s := tracker.Select(&c.port, all, node)
		if got := s.Excludes(&c.port, &c.other, node); got != c.want {
			t.Errorf("%+v: excluded by %q, want %q", c.other, got, c.want)
		}
		if got := s.Excludes(&c.port, own, node); got != "" {
			t.Errorf("the endpoint in use is excluded by %q", got)
		}
		out[c.want] = true
	}
	return out
}

// TestOnLeftOutIsBounded has more invalid source ranges than the list may have.
func TestOnLeftOutIsBounded(t *testing.T) {
	n := 0
	tr := newSynced(t, tracker.Config{OnLeftOut: func(_ v1.ObjectReference, left []tracker.LeftOut) { n = len(left) }})
	s := service("ns", "svc", "10.96.0.1")
	for i := range 3000 {
		s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprint("x", i))
	}
	if tr.SetService(s); n != 1000 {
		t.Errorf("%d parts", n)
	}
}
