// Package socketlb translates TCP connections of a node's own processes and pods to Services
// when they are made: BPF programs on a cgroup replace the address in connect(2), and
// getpeername(2) shows the Service's again. No packet of such a connection is translated
// afterwards, and connection tracking keeps no address for it.
//
// A [Backend] is a [ruleset.Backend] that stands before another one, such as package
// nftables. It follows the same [ruleset.Engine] with a cursor of its own, which is synced
// when the rules of the other are in effect:
//
//	rules := engine.Attach("nftables", nftablesBackend)
//	sockets := engine.Attach("socketlb", socketlbBackend)
//	...
//	if err := rules.Sync(ctx); err == nil {
//		err = sockets.Sync(ctx)
//	}
//
// Whatever this package does not translate goes to the Service's address, and the backend
// behind serves it. So nothing is lost where an entry is missing, does not fit into a map or
// could not be written, nor while no programs are attached. "nodeproxy run --socket-lb" is
// an agent with both.
//
// # What is translated
//
// A connection is translated where this makes no difference to what
// [ruleset.Snapshot.Trace] says, but for two that are named below. It chooses among the
// same endpoints: by internalTrafficPolicy, externalTrafficPolicy and topology, by weight,
// and with client affinity. Left to the backend behind are:
//
//   - UDP, SCTP, MPTCP, and clients elsewhere;
//   - Services without endpoints for the connection, ports of cluster IPs that no Service
//     has, and unused addresses of Service CIDRs;
//   - load-balancer IPs with loadBalancerSourceRanges, and Services that choose endpoints by
//     a hash of the source: a socket usually has no source before it connects;
//   - connections of pods that must be masqueraded: to external, load-balancer and node
//     addresses under externalTrafficPolicy Cluster, and all under
//     [ruleset.Node].MasqueradeAll. At the socket the endpoint would see the pod's address;
//   - sockets of the node that are bound to an address that the Node object does not have,
//     such as a loopback address: the address could not be reached from the endpoint;
//   - NodePorts at addresses that are not the node's own, and at loopback and link-local
//     addresses, which every network namespace has for itself.
//
// The programs tell the node from its pods by the cookie of the network namespace. All
// other namespaces count as pods of the node that [ruleset.LocalTraffic] recognises, if it
// can recognise any in the family. Containers that are not pods of the cluster, above all
// nested clusters with the same Service CIDR, must therefore be in a cgroup outside of
// Config.Cgroup.
//
// # Differences
//
//   - A pod that reaches itself through a Service sees its own address as the client's. At
//     the node it would be masqueraded. Connections that are masqueraded for another reason
//     are left alone, so the endpoint sees an address of the node as ever.
//   - Client affinity is by network namespace and not by source address: hostNetwork pods
//     and the node's processes are one client, and a pod with several addresses is one. The
//     backend behind remembers clients by itself, so that a pod that uses an address that is
//     left alone may have another endpoint there.
//
// Other programs see connections to endpoints where they saw connections to Services before:
// rules in the pod or on the node that match a Service's address, ss, and connection
// tracking. For service meshes that redirect a pod's connections by such rules there is
// Config.NodeOnly.
//
// # Maps
//
// A frontend leads to a pool, for the node and for pods, and a pool has numbered slots:
//
//	frontends  address, port         -> service, affinity, pool and size for node and pods
//	endpoints  service, pool, slot   -> address, port
//	members    service, pool, endpoint, of Services with affinity
//	clients    service, namespace    -> time, endpoint
//	addresses  of the node           -> whether NodePorts answer there, whether it is a source
//	peers      cookie of a socket    -> Service's address, endpoint
//	counters   connections of the node, and of pods
//
// Apply writes what differs: an endpoint that replaces another one is one write. Endpoints
// are written before frontends, and are deleted after them. A change of a Service's
// endpoints takes time proportional to the number of these. Connections to endpoints that
// are gone live on.
//
// The maps and the links of the programs are files in Config.Dir. They stay in effect when
// the process ends, and the next one takes them over: it replaces the programs in one step
// and keeps what is in the maps. A map that was made with another size is replaced as a
// whole. [Backend.Check] compares all entries, the programs and the files with what was
// written and follows the node's addresses; a full delta repairs them. [Cleanup] removes
// everything.
//
// A program that runs when a socket is closed deletes its peer. Peers are bounded: further
// connections are left to the backend behind. So are clients: when there are more, the least
// recently used one is forgotten and may get another endpoint.
//
// # Cost
//
// The gain is in packets, none of which is translated. A new connection costs about as much as
// through package nftables, most of it to remember the peer, which getpeername needs. The map of
// peers is cheaper than storage in the socket (BPF_MAP_TYPE_SK_STORAGE): BenchmarkConnections
// measured 97.6 % of direct connections with the map, and 96.6 % with storage.
//
// The benchmarks of this package compare with two ways to the endpoint's own address. "direct"
// is on the same node, beside the same rules: what a connection between pods of such a node
// costs, and what a Service can be compared with. "bare" is on a node without any rules. The
// difference between the two is no cost of Services: the rules of the backend behind switch on
// connection tracking for all connections of the node.
//
// This package does not exempt the connections that it translates from connection tracking,
// although their packets need no translation. Network policies, firewalls that accept
// established connections, and masquerading towards other networks follow a connection by its
// entry, and would treat these connections differently from direct ones.
//
// # Requirements
//
// Linux 5.14 or later, a cgroup2 and a BPF file system, and CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN in the
// initial user namespace. Linux 6.1 rejects the programs without CAP_PERFMON. [New] and [Probe] name what is missing in a
// [*ruleset.UnsupportedError]. There is no compiler at any time: program_linux.go assembles
// the programs with the asm package of github.com/cilium/ebpf.
//
// How to read the code: program_linux.go is what the kernel runs, maps_linux.go what it
// reads, and backend_linux.go what writes that. On systems other than Linux all functions
// return an error.
package socketlb
