// Package winkernel is a data plane for Windows. It programs Services into the Host Networking Service (HNS), as
// kube-proxy's mode kernelspace does, and follows the deltas of package ruleset.
//
//	hns, err := winkernel.Open()
//	...
//	backend, err := winkernel.New(ctx, winkernel.Config{
//		HNS: hns, Network: "cluster", Node: "win-1", NodeIPs: []netip.Addr{ip}, DSR: true,
//	})
//	...
//	cursor := engine.Attach("winkernel", backend)
//
// The network plugin makes an HNS endpoint for each pod of the node, and a Backend makes a remote one for each address
// of pods of other nodes. A load balancer has one frontend, one port for all endpoints, and a list of endpoints. Only
// [Open] needs Windows. Package fakehns is a service in memory.
//
// # Guarantees
//
//   - Replacing an endpoint of a cluster IP takes three calls, and no call that reads.
//   - A frontend that stays is never missing, unless Windows cannot modify load balancers: then it is deleted and
//     created, one at a time.
//   - A process may end between any two calls. The next one reads the service once, writes differences only, and deletes
//     the rest last.
//   - Endpoints of the network plugin are never deleted.
//
// Load balancers have no owner, so a Backend, like [Cleanup], deletes every one that no
// Service needs, except one with an endpoint in a network other than [Config].Network. It
// owns the remote endpoints whose hardware address begins with 02-11, and the endpoints
// of cluster IPs.
//
// # What HNS cannot do
//
// HNS cannot refuse or drop: a frontend without endpoints has no load balancer. It has no loadBalancerSourceRanges,
// affinity timeout, weights, hash, or choice of the addresses that node ports answer at. Traffic of the node and its
// pods to a frontend with externalTrafficPolicy Local gets local endpoints, too. If endpoints of one Service port have
// different ports, only the endpoints with the commonest port are served. A Service that asks for one of these gets
// an Event: see [Backend.Limits].
//
// As with kube-proxy, load balancers leave out pods in the host network, for which network plugins make no endpoint. A
// line in [Config].Log and [Hooks].LeftOut report them.
//
// # Differences from kube-proxy 1.37.2
//
//   - Topology hints, trafficDistribution and the node's zone are followed. Terminating endpoints serve while their pool
//     has no ready endpoint (KEP-1669).
//   - A pod whose endpoint the network plugin makes late is added when Check notices it. kube-proxy leaves the pod out
//     until the Service changes.
//   - A restart keeps the load balancers (kubernetes/kubernetes#109162), and a change of a Service modifies what
//     differs. kube-proxy deletes and creates load balancers.
//   - Health checks of load-balancer IPs use TCP whatever the Service's protocol is, and exist even without endpoints.
//
// No packet has been seen on Windows yet, and no network of type Overlay: the tests run in memory and in Wine.
package winkernel
