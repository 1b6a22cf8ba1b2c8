package patterns_test

import (
	"context"
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// A selector limits a proxy to Services with its name, and to load balancers of its class.
// A change of a label or a class starts or ends the service.
func Example_selection() {
	selector := tracker.Selector{
		// Services labeled service.kubernetes.io/service-proxy-name: vendor, which
		// kube-proxy ignores (KEP-2447).
		ProxyNames: []string{"vendor"},
		Filter: func(s *v1.Service) bool {
			return s.Spec.LoadBalancerClass == nil || *s.Spec.LoadBalancerClass == "vendor.example/fast"
		},
	}
	// With these list options of an informer the API server sends no other Services.
	labels, fields := selector.ServiceListOptions()
	fmt.Println(labels, fields)
	// A proxy name on an EndpointSlice has no meaning, so it does not select slices.
	labels, _ = selector.SliceListOptions()
	fmt.Println(labels)

	t, engine := newEngine(tracker.Config{Selector: selector})
	cursor := engine.Attach("vendor", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		for _, c := range d.Changes {
			fmt.Println(c.Key.Name, "is served:", c.New != nil)
		}
		return nil
	}))
	set := func(label, class string) {
		s := service("web", "10.96.0.1")
		if label != "" {
			s.Labels = map[string]string{tracker.LabelServiceProxyName: label}
		}
		if class != "" {
			s.Spec.LoadBalancerClass = &class
		}
		if !t.SetService(s) {
			fmt.Println("nothing changes")
		}
		if err := cursor.Sync(context.Background()); err != nil {
			fmt.Println(err)
		}
	}
	set("", "")
	set("vendor", "")
	set("vendor", "vendor.example/slow")
	set("vendor", "vendor.example/fast")
	set("other", "vendor.example/fast")
	// Output:
	// service.kubernetes.io/service-proxy-name in (vendor),!service.kubernetes.io/headless spec.clusterIP!=None
	// !service.kubernetes.io/headless
	// nothing changes
	// web is served: true
	// web is served: false
	// web is served: true
	// web is served: false
}

// A snapshot finds the Services of a flow. An agent takes a new snapshot after a change,
// which Cursor.OnSync reports. Any goroutine may read a snapshot.
func Example_lookup() {
	t, engine := newEngine(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	web := service("web", "10.96.0.1")
	web.Spec.Type = v1.ServiceTypeNodePort
	web.Spec.Ports[0].NodePort = 30080
	t.SetService(web)
	t.SetService(service("api", "10.96.0.2"))
	t.SetSlice(slice("web", "node-a", "node-b"))
	t.SetSlice(slice("api", "node-a"))

	s := engine.Snapshot()
	at := netip.MustParseAddrPort
	for _, frontend := range []string{"10.96.0.1:80", "10.96.0.2:80", "0.0.0.0:30080", "10.96.0.9:80"} {
		if svc, f := s.Lookup(at(frontend), v1.ProtocolTCP); svc != nil {
			fmt.Println(frontend, "is the", f.Kind, "of", svc.Key.Name)
		} else {
			fmt.Println(frontend, "has no Service")
		}
	}
	serving := map[netip.AddrPort][]*ruleset.Port{}
	for _, svc := range s.Delta().Changes { // sorted
		for _, e := range svc.New.Endpoints {
			serving[e.Addr] = append(serving[e.Addr], svc.New)
		}
	}
	for _, endpoint := range []string{"10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"} {
		fmt.Print(endpoint, " serves")
		for _, svc := range serving[at(endpoint)] {
			fmt.Print(" ", svc.Key.Name)
		}
		fmt.Println()
	}
	// Output:
	// 10.96.0.1:80 is the cluster IP of web
	// 10.96.0.2:80 is the cluster IP of api
	// 0.0.0.0:30080 is the node port of web
	// 10.96.0.9:80 has no Service
	// 10.0.0.1:8080 serves api web
	// 10.0.0.2:8080 serves web
	// 10.0.0.3:8080 serves
}
