package tracker_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// Set a Service and its EndpointSlice, take the changes, and select the endpoints
// that this node may use.
func Example() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	local := v1.ServiceInternalTrafficPolicyLocal
	web := service("ns", "web", "10.96.0.1")
	web.Spec.InternalTrafficPolicy = &local
	t.SetService(web)
	s := with(slice("ns", "web-abcde", "web"), "10.0.0.1", "10.0.0.2")
	*s.Endpoints[1].NodeName = "node-2"
	t.SetSlice(s)
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)

	for _, u := range t.Take().Updates {
		for _, p := range u.Ports {
			use := tracker.Select(p.Port, p.Endpoints, t.Node())
			fmt.Println(p.Port.Key, p.Port, "has", p.Endpoints, "uses", use.Local)
		}
	}
	// Output:
	// ns/web:http/TCP/IPv4 10.96.0.1:80/TCP has [10.0.0.1:8080 10.0.0.2:8080] uses [10.0.0.1:8080]
}

// Print the endpoints that are added and removed, without any Services.
func ExampleEndpointsChangeTracker() {
	t, err := tracker.NewEndpointsChangeTracker(tracker.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	print := func() {
		for _, c := range t.Take() {
			old := map[*tracker.Endpoint]bool{}
			for _, p := range c.Old {
				for _, e := range p.Endpoints {
					old[e] = true
				}
			}
			for i := range c.New {
				for _, e := range c.New[i].Endpoints {
					if !old[e] {
						fmt.Println("+", tracker.KeyOf(c.Name, &c.New[i]), e)
					}
					delete(old, e)
				}
			}
			for e := range old {
				fmt.Println("-", c.Name, e)
			}
		}
	}
	t.EndpointSliceUpdate(with(slice("ns", "web-abcde", "web"), "10.0.0.1", "10.0.0.2"), false)
	print()
	t.EndpointSliceUpdate(with(slice("ns", "web-abcde", "web"), "10.0.0.2", "10.0.0.3"), false)
	print()
	fmt.Println(t.LocalReadyEndpoints("node-1"))
	// Output:
	// + ns/web:http/TCP/IPv4 10.0.0.1:8080
	// + ns/web:http/TCP/IPv4 10.0.0.2:8080
	// + ns/web:http/TCP/IPv4 10.0.0.3:8080
	// - ns/web 10.0.0.1:8080
	// map[ns/web:2]
}

// mode is a vendor's own setting of a Service.
type mode struct{ dsr bool }

// Equal lets the tracker detect changes of the setting.
func (m mode) Equal(o tracker.Extension) bool { return o == m }

// Read an annotation of Services, request local endpoints for some of them, and leave
// others to another proxy.
func ExampleConfig_extension() {
	t, err := tracker.New(tracker.Config{
		Selector: tracker.Selector{Filter: func(s *v1.Service) bool {
			return s.Spec.LoadBalancerClass == nil || *s.Spec.LoadBalancerClass != "example.com/other"
		}},
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			switch s.Annotations["example.com/mode"] {
			case "":
			case "dsr":
				p.Ext, p.NeedLocalSet = mode{dsr: true}, true
			default:
				return fmt.Errorf("unknown mode %q", s.Annotations["example.com/mode"])
			}
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)

	print := func() {
		for _, u := range t.Take().Updates {
			for _, p := range u.Ports {
				m, _ := p.Port.Ext.(mode)
				fmt.Println(u.Name, "dsr:", m.dsr)
			}
			if len(u.Ports) == 0 {
				fmt.Println(u.Name, "was removed")
			}
		}
	}
	web, other := service("ns", "web", "10.96.0.1"), service("ns", "other", "10.96.0.2")
	other.Spec.LoadBalancerClass = ptr("example.com/other")
	t.SetService(web)
	t.SetService(other)
	print()
	web.Annotations = map[string]string{"example.com/mode": "dsr"}
	t.SetService(web)
	print()
	fmt.Println("again:", t.SetService(web))
	web.Annotations["example.com/mode"] = "unknown"
	t.SetService(web)
	print()
	// Output:
	// ns/web dsr: false
	// ns/web dsr: true
	// again: false
	// ns/web was removed
}

// Use only a ServiceChangeTracker, with kube-proxy's style of updates.
func ExampleServiceChangeTracker() {
	t, err := tracker.NewServiceChangeTracker(tracker.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	old, now := service("ns", "web", "10.96.0.1"), service("ns", "web", "10.96.0.1")
	now.Spec.Ports[0].Port = 8080
	t.Update(nil, old)
	t.Take()
	t.Update(old, now)
	for _, c := range t.Take() {
		fmt.Println(c.Name, c.Old, c.New)
	}
	// Output: ns/web [10.96.0.1:80/TCP] [10.96.0.1:8080/TCP]
}

// Choose the endpoints that a node uses under topology hints. The choice for another
// node needs no other state.
func ExampleSelect() {
	port := &tracker.ServicePort{}
	eps := []*tracker.Endpoint{
		{Addr: netip.MustParseAddrPort("10.0.0.1:8080"), Ready: true, ForZones: []string{"zone-a"}},
		{Addr: netip.MustParseAddrPort("10.0.0.2:8080"), Ready: true, ForZones: []string{"zone-b"}},
	}
	for _, zone := range []string{"zone-a", "zone-b", "zone-c"} {
		use := tracker.Select(port, eps, tracker.NodeInfo{Zone: zone})
		fmt.Println(zone, use.Cluster)
	}
	// Output:
	// zone-a [10.0.0.1:8080]
	// zone-b [10.0.0.2:8080]
	// zone-c [10.0.0.1:8080 10.0.0.2:8080]
}

// Take changes when the tracker reports some. In an agent, package runner calls Take.
func ExampleTracker_Notify() {
	t, err := tracker.New(tracker.Config{Kinds: []tracker.Kind{tracker.KindServices, tracker.KindSlices}})
	if err != nil {
		fmt.Println(err)
		return
	}
	t.Notify(func() {
		for _, u := range t.Take().Updates {
			fmt.Println(u.Name, "has", len(u.Ports), "ports")
		}
	})
	t.SetService(service("ns", "web", "10.96.0.1"))
	fmt.Println("waiting for", t.Missing())
	t.MarkSynced(tracker.KindServices, tracker.KindSlices)
	t.DeleteService(types.NamespacedName{Namespace: "ns", Name: "web"})
	// Output:
	// waiting for [Services Slices]
	// ns/web has 1 ports
	// ns/web has 0 ports
}

// Read the node's facts from its Node object.
func ExampleNodeInfoOf() {
	node := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{v1.LabelTopologyZone: "zone-a"}},
		Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
			{Type: v1.NodeHostName, Address: "node-1"},
			{Type: v1.NodeExternalIP, Address: "192.0.2.1"},
			{Type: v1.NodeInternalIP, Address: "10.0.0.1"},
		}},
	}
	info := tracker.NodeInfoOf(node)
	fmt.Println(info.Name, info.Zone, info.Addresses)
	// Output: node-1 zone-a [10.0.0.1]
}

// List only the Services of a proxy named "mesh".
func ExampleSelector() {
	s := tracker.Selector{ProxyNames: []string{"mesh"}}
	labels, fields := s.ServiceListOptions()
	fmt.Println(labels)
	fmt.Println(fields)
	// Output:
	// service.kubernetes.io/service-proxy-name in (mesh),!service.kubernetes.io/headless
	// spec.clusterIP!=None
}

// drained is the name of a node that gets no new connections of a Service.
type drained string

// Equal lets the tracker detect changes of the name.
func (d drained) Equal(o tracker.Extension) bool { return o == d }

// Set weights from an annotation of the Service. OnService reads the annotation, and
// OnServiceEndpoint applies it to each endpoint of the port.
func ExampleConfig_onServiceEndpoint() {
	t, err := tracker.New(tracker.Config{
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			p.Ext = drained(s.Annotations["example.com/drain"])
			return nil
		},
		OnServiceEndpoint: func(p *tracker.ServicePort, e *tracker.Endpoint) error {
			if node, ok := p.Ext.(drained); ok && e.IsLocal(string(node)) {
				e.Weight = 0
			}
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	web := service("ns", "web", "10.96.0.1")
	web.Annotations = map[string]string{"example.com/drain": "node-2"}
	t.SetService(web)
	s := with(slice("ns", "web-abcde", "web"), "10.0.0.1", "10.0.0.2")
	*s.Endpoints[1].NodeName = "node-2"
	t.SetSlice(s)
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	for _, e := range t.Take().Updates[0].Ports[0].Endpoints {
		fmt.Println(e, e.Weight)
	}
	// Output:
	// 10.0.0.1:8080 1
	// 10.0.0.2:8080 0
}
