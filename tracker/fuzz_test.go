package tracker_test

import (
	"encoding/json"
	"reflect"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/tracker"
)

// FuzzService passes any decodable Service to a tracker that also has a valid one.
// The valid one must not change.
func FuzzService(f *testing.F) {
	for _, seed := range []string{
		`{"metadata":{"namespace":"ns","name":"svc"},"spec":{"type":"LoadBalancer","clusterIP":"10.96.0.1","clusterIPs":["10.96.0.1","fd00::1"],"ipFamilies":["IPv4","IPv6"],
		  "ports":[{"name":"http","port":80,"nodePort":30080},{"port":0},{"name":"x","port":70000,"protocol":"X"}],"externalIPs":["192.0.2.01","::ffff:1.2.3.4","x"],
		  "loadBalancerSourceRanges":[" 10.0.0.0/8 ","x","::ffff:1.2.3.4/120","fd00::/64"],"externalTrafficPolicy":"Local","internalTrafficPolicy":"Local","healthCheckNodePort":32000,
		  "sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":-3}}},
		  "status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.9"},{"hostname":"x"},{"ip":"fd00::9","ipMode":"Proxy"}]}}}`,
		`{"metadata":{"namespace":"ns","name":"svc"},"spec":{"clusterIP":"None"}}`,
		`{"metadata":{"namespace":"ns","name":"svc"},"spec":{"clusterIP":"10.96.0.1","ipFamilies":["IPv6","IPv4"],"clusterIPs":["fd00::1"],"ports":[{"port":1}]}}`,
		`null`, `{}`,
	} {
		f.Add([]byte(seed))
	}
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		var s *v1.Service
		if json.Unmarshal(data, &s) != nil {
			return
		}
		tr := newSynced(t, tracker.Config{})
		tr.SetService(service("sound", "sound", "10.96.9.9"))
		before := s.DeepCopy()
		tr.SetService(s)
		if !reflect.DeepEqual(s, before) {
			t.Fatal("the Service was modified")
		}
		sound := false
		for _, u := range tr.Take().Updates {
			sound = sound || u.Name.Name == "sound"
			for _, p := range u.Ports {
				checkPort(t, p.Port)
			}
		}
		if !sound && (s == nil || s.Namespace != "sound") {
			t.Fatal("another Service changed")
		}
		if tr.SetService(s) {
			t.Fatal("setting the same object again counts as a change")
		}
		if s != nil {
			name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
			tr.DeleteService(name)
			for _, u := range tr.Take().Updates {
				if u.Name == name && len(u.Ports) > 0 {
					t.Fatal("a deleted Service has ports")
				}
			}
		}
	})
}

// checkPort checks the guarantees for every ServicePort.
func checkPort(t *testing.T, p *tracker.ServicePort) {
	t.Helper()
	f := p.Key.Family
	if f.Bits() == 0 || tracker.FamilyOf(p.ClusterIP) != f || p.ClusterIP.Is4In6() || p.Port == 0 || p.Affinity < 0 {
		t.Fatalf("%+v", p)
	}
	switch p.Key.Protocol {
	case v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP:
	default:
		t.Fatalf("%+v", p)
	}
	for _, a := range append(p.ExternalIPs[:len(p.ExternalIPs):len(p.ExternalIPs)], p.LoadBalancerIPs...) {
		if tracker.FamilyOf(a) != f || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || a.Zone() != "" {
			t.Fatalf("%+v", p)
		}
	}
	for _, r := range p.SourceRanges {
		if !r.IsValid() || tracker.FamilyOf(r.Addr()) != f || r.Addr().Is4In6() || r != r.Masked() {
			t.Fatalf("%+v", p)
		}
	}
}

// FuzzSlice passes any decodable EndpointSlice to a tracker, for a Service with every
// kind of port.
func FuzzSlice(f *testing.F) {
	for _, seed := range []string{
		`{"metadata":{"namespace":"ns","name":"s","labels":{"kubernetes.io/service-name":"svc"},"annotations":{"endpoints.kubernetes.io/last-change-trigger-time":"2099-01-01T00:00:00.5Z"}},
		  "addressType":"IPv4","ports":[{"name":"http","port":80},{"name":"","port":53,"protocol":"UDP"}],
		  "endpoints":[{"addresses":["10.0.0.1"],"conditions":{"ready":false,"serving":true,"terminating":true},"nodeName":"n","zone":"z","hints":{"forZones":[{"name":"z"}],"forNodes":[{"name":"n"}]}},{"addresses":["010.0.0.2"]}]}`,
		`{"metadata":{"namespace":"ns","name":"s","labels":{"kubernetes.io/service-name":"svc"}},"addressType":"IPv6","ports":[{"name":"http","port":-1}],"endpoints":[{"addresses":["fd00::1%x"]}]}`,
		`null`, `{}`,
	} {
		f.Add([]byte(seed))
	}
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		var s *discovery.EndpointSlice
		if json.Unmarshal(data, &s) != nil {
			return
		}
		tr := newSynced(t, tracker.Config{})
		svc := dualStack()
		svc.Spec.Ports = append(svc.Spec.Ports, v1.ServicePort{Port: 53, Protocol: v1.ProtocolUDP})
		tr.SetService(svc)
		tr.SetSlice(with(slice("ns", "sound", "svc"), "10.0.0.200"))
		before := s.DeepCopy()
		tr.SetSlice(s)
		if !reflect.DeepEqual(s, before) {
			t.Fatal("the slice was modified")
		}
		for _, u := range tr.Take().Updates {
			for _, p := range u.Ports {
				checkPort(t, p.Port)
				for i, e := range p.Endpoints {
					if tracker.FamilyOf(e.Addr.Addr()) != p.Port.Key.Family || e.Addr.Port() == 0 || i > 0 && p.Endpoints[i-1].Addr.Compare(e.Addr) >= 0 {
						t.Fatalf("%v: %v", p.Port.Key, p.Endpoints)
					}
				}
				got := tracker.Select(p.Port, p.Endpoints, tracker.NodeInfo{Name: "n", Zone: "z"})
				if len(p.Endpoints) > 0 && len(got.Reachable) > 0 && !got.HasAny {
					t.Fatalf("%+v", got)
				}
			}
		}
		if tr.SetSlice(s) {
			t.Fatal("setting the same object again counts as a change")
		}
	})
}
