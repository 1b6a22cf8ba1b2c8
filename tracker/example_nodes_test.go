package tracker_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// nodeWeights holds the weights of nodes. The handler of Node objects and the hook use it from
// several goroutines.
type nodeWeights struct{ m sync.Map }

// set stores the weight of a node, and reports whether it changed.
func (w *nodeWeights) set(n *v1.Node) (changed bool) {
	weight := uint16(1)
	if n.Labels["example.com/size"] == "large" {
		weight = 4
	}
	old, known := w.m.Swap(n.Name, weight)
	return !known || old != weight
}

// of returns the weight of a node, 1 if the node is unknown.
func (w *nodeWeights) of(node string) uint16 {
	if weight, ok := w.m.Load(node); ok {
		return weight.(uint16)
	}
	return 1
}

// Weigh endpoints by a label of their Node. The hook reads the weights that the handler of
// Node objects stores.
func ExampleTracker_Recompute() {
	var weights nodeWeights
	t, err := tracker.New(tracker.Config{
		OnServiceEndpoint: func(_ *tracker.ServicePort, e *tracker.Endpoint) error {
			e.Weight = weights.of(e.Node)
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	show := func() {
		updates := t.Take().Updates
		slices.SortFunc(updates, func(a, b tracker.Update) int { return strings.Compare(a.Name.Name, b.Name.Name) })
		for _, u := range updates {
			for _, e := range u.Ports[0].Endpoints {
				fmt.Println(u.Name.Name, e, e.Weight)
			}
		}
	}
	setNode := func(n *v1.Node) {
		if weights.set(n) {
			t.Recompute(n.Name)
		}
	}
	for i, name := range []string{"api", "web"} {
		t.SetService(service("ns", name, fmt.Sprint("10.96.0.", i+1)))
		s := with(slice("ns", name, name), fmt.Sprint("10.0.", i, ".1"), fmt.Sprint("10.0.", i, ".2"))
		*s.Endpoints[1].NodeName = name + "-node"
		t.SetSlice(s)
	}
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	show()
	node := &v1.Node{}
	node.Name, node.Labels = "web-node", map[string]string{"example.com/size": "large"}
	fmt.Println("web-node is large")
	setNode(node)
	show()
	node.Labels["example.com/rack"] = "7"
	fmt.Println("another label")
	setNode(node)
	show()
	// Output:
	// api 10.0.0.1:8080 1
	// api 10.0.0.2:8080 1
	// web 10.0.1.1:8080 1
	// web 10.0.1.2:8080 1
	// web-node is large
	// web 10.0.1.1:8080 1
	// web 10.0.1.2:8080 4
	// another label
}
