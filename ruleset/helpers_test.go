package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// key returns the key of the port "p" of Service default/name.
func key(name string, f tracker.Family) tracker.Key {
	return tracker.Key{
		ServicePortName: tracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "default", Name: name},
			Port:           "p",
			Protocol:       v1.ProtocolTCP,
		},
		Family: f,
	}
}

// endpoint returns a ready endpoint.
func endpoint(addr, node string) *tracker.Endpoint {
	return &tracker.Endpoint{
		Addr: netip.MustParseAddrPort(addr), Node: node,
		Ready: true, Serving: true, Weight: 1,
	}
}

// service returns a ClusterIP Service with one TCP port named "p".
func service(name, clusterIP string, edit ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: v1.ServiceSpec{
			Type:       v1.ServiceTypeClusterIP,
			ClusterIP:  clusterIP,
			ClusterIPs: []string{clusterIP},
			IPFamilies: []v1.IPFamily{v1.IPFamily(tracker.FamilyOf(netip.MustParseAddr(clusterIP)).String())},
			Ports:      []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}},
		},
	}
	for _, f := range edit {
		f(s)
	}
	return s
}

// slice returns an EndpointSlice of a Service with endpoints at the addresses, on
// node "n1", port 8080.
func slice(service string, addresses ...string) *discovery.EndpointSlice {
	return sliceOn(service, "n1", addresses...)
}

func sliceOn(service, node string, addresses ...string) *discovery.EndpointSlice {
	name, port, proto := "p", int32(8080), v1.ProtocolTCP
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: service + "-" + node,
			Labels: map[string]string{discovery.LabelServiceName: service},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
	}
	for _, a := range addresses {
		if netip.MustParseAddr(a).Is6() {
			s.AddressType = discovery.AddressTypeIPv6
		}
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a}, NodeName: &node})
	}
	return s
}

// world returns a synced tracker and an engine.
func world(t testing.TB, c Config, node tracker.NodeInfo) (*tracker.Tracker, *Engine) {
	t.Helper()
	tr, err := tracker.New(tracker.Config{Node: node, OnService: fromAnnotations})
	if err != nil {
		t.Fatal(err)
	}
	c.Source = tr
	e, err := NewEngine(c)
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return tr, e
}

// fromAnnotations is a hook that sets the extension of annotation "ext", NeedLocalSet if there is an
// annotation "local", and the Hash by the length of annotation "hash" if that is "x" or "xx".
func fromAnnotations(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	if text := s.Annotations["ext"]; text != "" {
		p.Ext = ext(len(text))
	}
	p.NeedLocalSet = s.Annotations["local"] != ""
	if text := s.Annotations["hash"]; text == "x" || text == "xx" {
		p.Hash = tracker.Hash(len(text))
	}
	return nil
}

// externalIPs sets the external IPs of a Service.
func externalIPs(list ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.ExternalIPs = list }
}

// show formats a frontend in one line.
func show(f Frontend) string {
	s := fmt.Sprintf("%s %s:%d to %s", f.Kind, f.Addr, f.Port, f.Target)
	if f.Kind == KindNodePort {
		s = fmt.Sprintf("%s %d to %s", f.Kind, f.Port, f.Target)
	}
	if f.Internal != f.Target {
		s += fmt.Sprintf(", near %s", f.Internal)
	}
	s += fmt.Sprintf(", masquerade %s", f.Masquerade)
	if len(f.Sources) != 0 {
		s += fmt.Sprintf(", from %v", f.Sources)
	}
	return s
}

// ptr returns a pointer to a copy of v.
func ptr[T any](v T) *T { return &v }

// removeTakenFrontends takes the frontends from the failed Services of a delta that accepted ones have now.
func removeTakenFrontends(acked map[tracker.Key]*Port, d *Delta, unsure, accepted func(*Change) bool) {
	taken := map[l4Key]bool{}
	for i := range d.Changes {
		if c := &d.Changes[i]; c.New != nil && accepted(c) {
			for j := range c.New.Frontends {
				taken[l4KeyOf(c.New, &c.New.Frontends[j])] = true
			}
		}
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		s := acked[c.Key]
		gone := func(f Frontend) bool { return taken[l4KeyOf(s, &f)] }
		if s == nil || !unsure(c) || !slices.ContainsFunc(s.Frontends, gone) {
			continue
		}
		out := *s
		out.Frontends = slices.DeleteFunc(slices.Clone(s.Frontends), gone)
		acked[c.Key] = &out
	}
}
