package patterns_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

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
	for _, endpoint := range []string{"10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"} {
		fmt.Print(endpoint, " serves")
		for _, svc := range s.LookupEndpoint(at(endpoint), v1.ProtocolTCP) {
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
