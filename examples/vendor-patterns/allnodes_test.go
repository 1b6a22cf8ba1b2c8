package patterns_test

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/placement"
	"github.com/go-proxier/proxier/tracker"
)

// A controller computes the load balancers of every node. Package ruleset/placement computes
// a change once for the nodes that see it alike, with the frontends that the Engine assigned.
// The tracker has no node of its own. A node that joins gets every Service of the snapshot.
func Example_allNodes() {
	t, engine := newEngine(tracker.Config{})
	nodes := placement.New()
	show := func(name string, s *ruleset.Port, on string) {
		if s == nil {
			fmt.Println(name, "goes from", on)
			return
		}
		fmt.Print(name, " on ", on, ":")
		for _, f := range s.Frontends {
			fmt.Print(" ", f.Kind, " ", f.Target, " ", s.Pool(f.Target))
		}
		fmt.Println()
	}
	cursor := engine.Attach("all nodes", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		for i := range d.Changes {
			for c := range nodes.Changes(d, &d.Changes[i]) {
				on := slices.Sorted(c.Nodes())
				if c.Everywhere() {
					on = []string{"every node"}
				}
				show(c.Key.Name, c.New, strings.Join(on, ", "))
			}
		}
		return nil
	}))
	sync := func() {
		if err := cursor.Sync(context.Background()); err != nil {
			fmt.Println(err)
		}
	}
	for i, zone := range []string{"z1", "z2", "z2"} {
		nodes.SetNode(tracker.NodeInfo{Name: fmt.Sprintf("node-%c", 'a'+i), Zone: zone})
	}

	t.SetService(service("plain", "10.96.0.3"))
	t.SetSlice(slice("plain", "node-a"))
	sync()

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
	// One endpoint goes. The other node's rules stay.
	t.SetSlice(slice("local", "node-a"))
	sync()
	nodes.SetNode(tracker.NodeInfo{Name: "node-d", Zone: "z1"})
	snapshot := engine.Snapshot()
	for _, svc := range snapshot.Ports {
		show(svc.Key.Name, nodes.Service(snapshot.Node, svc, "node-d"), "node-d")
	}
	t.DeleteService(types.NamespacedName{Namespace: "shop", Name: "plain"})
	sync()
	// Output:
	// plain on every node: cluster IP cluster endpoints [10.0.0.1:8080]
	// local on node-a: cluster IP local endpoints [10.0.0.1:8080]
	// local on node-b: cluster IP local endpoints [10.0.0.2:8080]
	// local on node-c: cluster IP drop []
	// zones on node-a: cluster IP cluster endpoints [10.0.0.1:8080]
	// zones on node-b, node-c: cluster IP cluster endpoints [10.0.0.2:8080 10.0.0.3:8080]
	// local on node-b: cluster IP drop []
	// plain on node-d: cluster IP cluster endpoints [10.0.0.1:8080]
	// local on node-d: cluster IP drop []
	// zones on node-d: cluster IP cluster endpoints [10.0.0.1:8080]
	// plain goes from every node
}
