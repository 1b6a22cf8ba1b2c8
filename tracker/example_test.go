package tracker_test

import (
	"fmt"

	v1 "k8s.io/api/core/v1"

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
	t.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)

	for _, u := range t.Take().Updates {
		for _, p := range u.Ports {
			use := tracker.Select(p.Port, p.Endpoints, t.Node(), tracker.TopologyOptions{})
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
	t.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)

	print := func() {
		for _, u := range t.Take().Updates {
			for _, p := range u.Ports {
				m, _ := tracker.ExtAs[mode](p.Port.Ext)
				fmt.Println(u.Name, "dsr:", m.dsr)
			}
			if len(u.Ports) == 0 {
				fmt.Println(u.Name, "is gone")
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
	// ns/web is gone
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
