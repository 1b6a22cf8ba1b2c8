// Package tracker turns Kubernetes Services and EndpointSlices into plain values and reports which Services
// changed. Service proxies, DNS servers and policy agents can all build on it. It has no kernel code.
//
//	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
//	...
//	t.SetService(service) // from a watch, a file, a test
//	t.SetSlice(slice)
//	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
//	for _, u := range t.Take().Updates {
//		fmt.Println(u.Name, u.Ports)
//	}
//
// A [Tracker] takes each object in its current state, and the names of deleted objects. [Tracker.Take] returns every
// Service that may have changed, complete and in all families. [Select] chooses the endpoints of a port that a node
// may use. [ServiceChangeTracker] and [EndpointsChangeTracker] are the two halves of a Tracker.
//
// # Guarantees
//
//   - Published values ([ServicePort], [Endpoint] and slices of them) never change. Callers may keep them and read
//     them from any goroutine. A value that an update does not change keeps its pointer.
//   - The tracker neither modifies the objects it is given nor keeps any of their memory.
//   - Only differences in the resulting values count as changes. Rewriting or reordering an object does not.
//   - An unusable part of an object affects that part only. The tracker reports it to [Config.Log] and
//     [Config.Events] and never panics. [Config.OnLeftOut] receives everything that is left out, with a [Reason].
//   - An update costs work for the changed object and, in Take, for its Service. Only [Tracker.SetNode] visits all
//     endpoints, if the node's name or zone changes.
//
// # Services and ports
//
// A Service has ports if [Selector] selects it, it has a cluster IP and its type is not ExternalName. Each entry of
// spec.ports becomes one [ServicePort] per family of the Service. Package [endpointslice] describes how endpoints
// are merged. Slices of a Service that is missing or not selected are kept. These rules go beyond the fields of
// ServicePort:
//
//   - Unspecified, multicast and broadcast addresses are rejected everywhere, loopback addresses and
//     169.254.169.254 as external and load-balancer IPs, and link-local addresses as external IPs.
//     kube-proxy accepts all of them in the status of a Service, where the API server does not check them.
//   - Without spec.ipFamilies, which the API server always sets, a Service has only spec.clusterIP.
//   - A port is skipped if its protocol is not TCP, UDP or SCTP, if its number is out of range, or if it repeats the
//     name or number of an earlier port with the same protocol.
//   - As in kube-proxy, load-balancer addresses apply whatever spec.loadBalancerClass and spec.type are. Policy
//     Local for external traffic applies only to NodePort and LoadBalancer Services and to Services with external
//     IPs, and spec.healthCheckNodePort only to LoadBalancer Services with that policy.
//   - Source ranges restrict only their own family. If a range is invalid and no valid range is left for a family,
//     the load-balancer addresses of that family are closed. kube-proxy ignores the invalid range, which opens them.
//
// # Extensions
//
// [Config.OnService] and [Config.OnEndpoint] see the API objects and may change the values made from them or attach
// an [Extension]. An EndpointSlice may arrive before its Service, so OnEndpoint cannot see the Service.
// [Config.OnServiceEndpoint] runs when both are known. A hook that accepts a value
// and still has something to report returns [Warning].
//
// [MIGRATING.md] maps the names of kube-proxy's trackers. Example (ComingFromKubeProxy) shows event handlers and a
// sync loop of kube-proxy's shape on this package.
//
// [MIGRATING.md]: https://github.com/go-proxier/proxier/blob/main/ruleset/MIGRATING.md
package tracker
