// Package winkernel is a data plane for Windows. It programs Services into the Host Networking
// Service (HNS), as kube-proxy's mode kernelspace does, and follows the deltas of package ruleset.
//
//	hns, err := winkernel.Open()
//	...
//	backend, err := winkernel.New(ctx, winkernel.Config{
//		HNS: hns, Network: "cluster", Node: "win-1", NodeIPs: []netip.Addr{ip}, DSR: true,
//	})
//	...
//	cursor := engine.Attach("winkernel", backend)
//
// HNS forwards by two kinds of objects. An endpoint is an address: the network plugin makes one
// for each pod of the node, and a Backend makes remote ones for pods of other nodes, one for each
// address, whatever the number of Services that use it. A load balancer has one frontend, one
// port for all endpoints, and a list of endpoints. An overlay network also needs an endpoint for
// each cluster IP and one for the source address of translated connections.
//
// The types and the decisions build on every system; only [Open] needs Windows. Package fakehns is
// a service in memory.
//
// # Guarantees
//
//   - A change costs the calls that it needs, whatever exists: to replace an endpoint of a
//     cluster IP takes three (create the endpoint, modify the load balancer, delete the
//     endpoint), and no call that reads.
//   - A frontend that stays is never missing. Load balancers are modified in place. A version of
//     Windows that cannot do this, or accepts the call and does nothing, gets them deleted and
//     created, one at a time, because it refuses a second load balancer with the frontend.
//   - A new process keeps what is right. It reads the service once, writes differences only, and
//     deletes the rest last.
//   - A process may end between any two calls. The next one reaches the same state.
//   - If the service does not run, nothing is forgotten. The next Apply reads its state again.
//   - Endpoints of the network plugin are never deleted.
//
// # Ownership
//
// Load balancers have no name and no owner. A node has one service proxy, so a Backend takes every
// load balancer to be its own, and deletes those that no Service wants. The exception is a load
// balancer with an endpoint in a network other than [Config].Network: one that Docker or another
// orchestrator made. Of the endpoints it owns the
// remote ones whose hardware address begins with 02-11, and those of cluster IPs: remote, with the
// node's hardware address and the node's address as the provider. [Cleanup] deletes the same.
//
// # What HNS cannot do
//
// HNS cannot refuse or drop: a frontend without endpoints has no load balancer, and its packets are
// not translated. It has no loadBalancerSourceRanges, no affinity timeout, no weights, no hash, and
// no choice of the addresses that node ports answer at. It has no ranges of ports
// ([ruleset.PortRangesNone]): a load balancer has one port and one for its endpoints. Traffic of the node and its pods to a
// frontend with externalTrafficPolicy Local gets local endpoints, too. If endpoints of one Service
// port have different ports, those of the commonest port are served, and of equally common ones
// those of the lowest. A Service that asks for one of these gets an Event: see [Backend.Limits].
//
// Network plugins make no endpoint at the node's own address, which is the address of pods in the
// host network of this node. Load balancers leave these pods out, as kube-proxy does, so a frontend
// with no other endpoints has no load balancer. A line in [Config].Log and [Hooks].LeftOut report
// them; nodeproxy sends an Event. If there is an endpoint at the address, it is used.
//
// # Differences from kube-proxy
//
// They were found with kube-proxy 1.37.2, in recorded worlds. kube-proxy's other modes, or the API,
// define what is right.
//
//   - Endpoints that are not ready get no traffic, and publishNotReadyAddresses works: the condition
//     ready of the slice decides, as in other modes.
//   - Topology hints, trafficDistribution and the node's zone are followed. kube-proxy ignores them.
//   - Terminating endpoints serve all kinds of frontends while their pool has no ready endpoint
//     (KEP-1669), and each pool decides by itself.
//   - Endpoints with different ports: one port is served and an Event reports the others. kube-proxy
//     sends to the port that it saw last, even where no endpoint listens.
//   - A pod whose endpoint the network plugin makes late, or makes again, is added when the Service is
//     offered again or Check notices it. kube-proxy leaves the pod out until the Service changes.
//   - A restart keeps the load balancers. kube-proxy deletes and creates all of them, which takes
//     half a minute without Services (kubernetes/kubernetes#109162).
//   - Remote endpoints, and endpoints of cluster IPs, that no Service uses are deleted, including those
//     of an earlier process. kube-proxy leaks some of them.
//   - A change of a Service modifies what differs, so that other frontends keep forwarding. kube-proxy
//     deletes all load balancers of the Service and creates them again.
//   - Health checks of load-balancer IPs use TCP. kube-proxy uses the Service's protocol, so those of
//     UDP Services fail.
//   - Health checks of IPv6 addresses have the flag IPv6, without which they belong to IPv4.
//   - The health check of a load-balancer IP exists whether or not the Service has endpoints: its
//     answer is what tells the load balancer that there are none.
//   - loadBalancerSourceRanges and other settings that the service lacks are reported by an Event.
//     kube-proxy ignores them in silence.
//
// # What was tested
//
// The tests compare the objects in the service with the expected ones in 454 steps of 95 recorded
// worlds (TestWorlds), in memory and, with hnslib, in Wine. They end the process before each write.
// Package conformance compares what becomes of packets in random worlds, with failing writes and
// restarts. The README of examples/e2e compares calls with those of kube-proxy.exe.
// TestRealService, which needs Windows, programs load balancers in the real service. No packet
// has been seen on Windows yet, and no network of type Overlay.
package winkernel
