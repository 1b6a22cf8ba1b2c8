package patterns_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// A controller computes the load balancers of every node. Compile is a pure function of a
// Service port, its endpoints and a node, so a change is compiled once for each node, and
// unchanged Services are not compiled.
func Example_allNodes() {
	nodes := []tracker.NodeInfo{{Name: "node-a", Zone: "z1"}, {Name: "node-b", Zone: "z2"}, {Name: "node-c", Zone: "z2"}}
	t, engine := newEngine(tracker.Config{})
	cursor := engine.Attach("all nodes", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		for _, c := range d.Changes {
			if c.New == nil {
				fmt.Println(c.Key.Name, "goes everywhere")
				continue
			}
			state := tracker.PortState{Port: c.New.Port, Endpoints: c.New.Endpoints}
			for _, n := range nodes {
				s := ruleset.Compile(state, &ruleset.Node{Info: n}, tracker.TopologyOptions{})
				fmt.Print(c.Key.Name, " on ", n.Name, ":")
				for _, f := range s.Frontends {
					fmt.Print(" ", f.Kind, " ", f.Target, " ", s.Pool(f.Target))
				}
				fmt.Println()
			}
		}
		return nil
	}))
	sync := func() {
		if err := cursor.Sync(context.Background()); err != nil {
			fmt.Println(err)
		}
	}

	local := service("local", "10.96.0.1")
	policy := v1.ServiceInternalTrafficPolicyLocal
	local.Spec.InternalTrafficPolicy = &policy
	t.SetService(local)
	t.SetSlice(slice("local", "node-a", "node-b"))
	sync()

	zones := slice("zones", "node-a", "node-b", "node-c")
	for i, z := range []string{"z1", "z2", "z2"} {
		zones.Endpoints[i].Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: z}}}
	}
	t.SetService(service("zones", "10.96.0.2"))
	t.SetSlice(zones)
	sync()
	// Output:
	// local on node-a: cluster IP local endpoints [10.0.0.1:8080]
	// local on node-b: cluster IP local endpoints [10.0.0.2:8080]
	// local on node-c: cluster IP drop []
	// zones on node-a: cluster IP cluster endpoints [10.0.0.1:8080]
	// zones on node-b: cluster IP cluster endpoints [10.0.0.2:8080 10.0.0.3:8080]
	// zones on node-c: cluster IP cluster endpoints [10.0.0.2:8080 10.0.0.3:8080]
}
