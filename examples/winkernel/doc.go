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
// HNS forwards by two kinds of objects. An endpoint is an address: the network plugin makes one for each pod of the
// node, and a Backend makes a remote one for each address of pods of other nodes. A load balancer has one frontend,
// one port for all endpoints, and a list of endpoints. An overlay network also needs an endpoint for each cluster IP
// and one for the source address of translated connections. Only [Open] needs Windows. Package fakehns is a service in
// memory.
//
// # Guarantees
//
//   - To replace an endpoint of a cluster IP takes three calls (create the endpoint, modify the load balancer, delete
//     the endpoint), and no call that reads.
//   - A frontend that stays is never missing. A version of Windows that cannot modify load balancers gets them deleted
//     and created, one at a time, because it refuses a second load balancer with the frontend.
//   - A process may end between any two calls. The next one reads the service once, writes differences only, and deletes
//     the rest last. Apply also reads the state again after the service did not run.
//   - Endpoints of the network plugin are never deleted.
//
// Load balancers have no name and no owner, so a Backend deletes each that no Service wants, except one with an
// endpoint in a network other than [Config].Network. Of the endpoints it owns the remote ones whose hardware address
// begins with 02-11, and those of cluster IPs: remote, with the node's hardware address and the node's address as the
// provider. [Cleanup] deletes the same.
//
// # What HNS cannot do
//
// HNS cannot refuse or drop: a frontend without endpoints has no load balancer. It has no loadBalancerSourceRanges,
// affinity timeout, weights, hash, or choice of the addresses that node ports answer at. Traffic of
// the node and its pods to a frontend with externalTrafficPolicy Local gets local endpoints, too. If endpoints of one
// Service port have different ports, only those of the commonest port are served, and of equally common ones those of
// the lowest. A Service that asks for one of these gets an Event: see [Backend.Limits].
//
// Network plugins make no endpoint at the node's own address, which pods in its host network have. Load balancers
// leave these pods out, as kube-proxy does. A line in [Config].Log and [Hooks].LeftOut report them. If the endpoint
// exists, it is used.
//
// # Differences from kube-proxy 1.37.2
//
//   - The condition ready decides which endpoints get traffic. Topology hints, trafficDistribution and the node's zone
//     are followed. Terminating endpoints serve while their pool has no ready endpoint (KEP-1669).
//   - A pod whose endpoint the network plugin makes late, or makes again, is added when the Service is offered again
//     or Check notices it. kube-proxy leaves the pod out until the Service changes.
//   - A restart keeps the load balancers (kubernetes/kubernetes#109162), and a change of a Service modifies what
//     differs. kube-proxy deletes and creates load balancers. Endpoints that no Service uses are deleted.
//   - Health checks of load-balancer IPs use TCP whatever the Service's protocol is, have the flag IPv6 for such
//     addresses, and exist even without endpoints.
//
// The tests use 454 steps of 95 recorded worlds (TestWorlds), in memory and in Wine. TestRealService, which
// needs Windows, programs load balancers in the real service. No packet has been seen on Windows yet, and no
// network of type Overlay.
package winkernel
