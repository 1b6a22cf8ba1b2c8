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
// may use. [ServiceChangeTracker] and [EndpointsChangeTracker] are the two halves of a Tracker. Hooks in [Config] see
// the API objects and may change the values made from them or attach an [Extension].
//
// [MIGRATING.md] maps the names of kube-proxy's trackers, and Example (ComingFromKubeProxy) has a sync loop like its.
//
// # Guarantees
//
//   - Published values ([ServicePort], [Endpoint] and slices of them) never change. Callers may keep them and read
//     them from any goroutine. A value that an update does not change keeps its pointer.
//   - The tracker neither modifies the objects it is given nor keeps any of their memory.
//   - Only differences in the resulting values count as changes. Rewriting or reordering an object does not.
//   - An unusable part of an object affects that part only. The tracker reports it to [Config.Log] and
//     [Config.Events], and everything that is left out to [Config.OnLeftOut], with a [Reason].
//   - An update costs work for the changed object and, in Take, for its Service. Only [Tracker.SetNode] visits all
//     endpoints, if the node's name or zone changes.
//
// # Services and ports
//
// A Service has ports if [Selector] selects it, it has a cluster IP and its type is not ExternalName. Each entry of
// spec.ports becomes one [ServicePort] per family of the Service. Package [endpointslice] merges slices.
//
//   - A port is skipped if its protocol is not TCP, UDP or SCTP, if its number is out of range, or if it repeats the
//     name or number of an earlier port with the same protocol.
//   - As in kube-proxy, load-balancer addresses apply whatever spec.loadBalancerClass and spec.type are. Policy
//     Local for external traffic applies only to NodePort and LoadBalancer Services and to Services with external
//     IPs, and spec.healthCheckNodePort only to LoadBalancer Services with that policy.
//   - Unlike kube-proxy, invalid source ranges open nothing, and some addresses are rejected: see
//     [ServicePort].SourceRanges and [ServicePort].LoadBalancerIPs.
//
// [MIGRATING.md]: https://github.com/go-proxier/proxier/blob/main/ruleset/MIGRATING.md
package tracker
