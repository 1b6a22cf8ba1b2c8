package patterns_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// limits is the content of this vendor's annotation of a Service, in JSON: a rate for each
// class of clients.
type limits map[string]int

// Equal compares contents: the annotation's order may differ, and every event creates a new
// map. If Equal compared pointers, every event of an annotated Service would reprogram the
// Service.
func (l limits) Equal(o tracker.Extension) bool {
	m, ok := o.(limits)
	return ok && maps.Equal(l, m)
}

// Hooks read data from an annotation of Services and from labels of EndpointSlices.
func Example_annotations() {
	t, engine := newEngine(tracker.Config{
		// OnService is called for each port of a Service, in each family. The tracker logs
		// an error and leaves the port out.
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			text, ok := s.Annotations["vendor.example/limits"]
			if !ok {
				return nil
			}
			var l limits
			if err := json.Unmarshal([]byte(text), &l); err != nil {
				return fmt.Errorf("annotation vendor.example/limits: %w", err)
			}
			p.Ext = l
			return nil
		},
		// OnEndpoint is called for each endpoint, with its slice.
		OnEndpoint: func(s *discovery.EndpointSlice, _ *discovery.Endpoint, e *tracker.Endpoint) error {
			if s.Labels["vendor.example/size"] == "large" {
				e.Weight = 4
			}
			return nil
		},
	})
	cursor := engine.Attach("vendor", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		for _, c := range d.Changes {
			l, _ := c.New.Spec.Ext.(limits)
			fmt.Println(c.Key.Name, "limits", l)
			for ep := range c.Upserted() {
				fmt.Println("  endpoint", ep, "with weight", ep.Weight)
			}
		}
		return nil
	}))
	set := func(text string) {
		s := service("web", "10.96.0.1")
		s.Annotations = map[string]string{"vendor.example/limits": text}
		fmt.Println("changed:", t.SetService(s))
		if err := cursor.Sync(context.Background()); err != nil {
			fmt.Println(err)
		}
	}
	eps := slice("web", "node-a")
	eps.Labels["vendor.example/size"] = "large"
	t.SetSlice(eps)
	set(`{"gold": 100, "others": 10}`)
	set(`{ "others": 10, "gold": 100 }`)
	set(`{"gold": 200, "others": 10}`)
	// Output:
	// changed: true
	// web limits map[gold:100 others:10]
	//   endpoint 10.0.0.1:8080 with weight 4
	// changed: false
	// changed: true
	// web limits map[gold:200 others:10]
}
