package patterns_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// A selector limits a proxy to Services with its name, and to load balancers of its class.
// A change of a label or a class starts or ends the service.
func Example_selection() {
	selector := tracker.Selector{
		// Services labelled service.kubernetes.io/service-proxy-name: vendor, which
		// kube-proxy ignores (KEP-2447).
		ProxyName: "vendor",
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
	// service.kubernetes.io/service-proxy-name=vendor,!service.kubernetes.io/headless spec.clusterIP!=None
	// !service.kubernetes.io/headless
	// nothing changes
	// web is served: true
	// web is served: false
	// web is served: true
	// web is served: false
}
