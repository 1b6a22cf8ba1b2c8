// Package socketlb translates TCP connections and UDP datagrams of a node's own processes and
// pods to Services at the socket. BPF programs on a cgroup replace the address in connect(2) and
// sendmsg(2), and getpeername(2) and recvmsg(2) return the Service's address. No packet is
// translated afterwards, and its entry in connection tracking has no translation.
//
// A [Backend] is a [ruleset.Backend] that stands before another backend, such as package
// nftables. It follows the same [ruleset.Engine] with a cursor of its own, which is synced
// after the other backend's cursor:
//
//	rules := engine.Attach("nftables", nftablesBackend)
//	sockets := engine.Attach("socketlb", socketlbBackend)
//	...
//	if err := rules.Sync(ctx); err == nil {
//		err = sockets.Sync(ctx)
//	}
//
// Connections that this package does not translate go to the Service's address, where the
// backend behind serves them. So no connection is lost while no programs are attached, or if
// an entry is missing, does not fit into a map or cannot be written. "nodeproxy run
// --socket-lb" is an agent with both backends.
//
// # What is translated
//
// A connection is translated if that agrees with [ruleset.Snapshot.Trace], except for the
// two differences below. Its endpoint is chosen by internalTrafficPolicy,
// externalTrafficPolicy and topology, by weight, and with client affinity. The following
// connections are left to the backend behind:
//
//   - SCTP, MPTCP, and clients elsewhere;
//   - datagrams from an unconnected UDP socket to a second Service, if the chosen endpoint
//     already answers the socket for another Service: both answers would have one source;
//   - datagrams from a connected UDP socket to another address, whose answers the kernel does not
//     deliver;
//   - datagrams of a socket to more than 8 addresses, and of a network namespace beyond a sixteenth
//     of Config.Connections;
//   - Services without endpoints for the connection, ports of cluster IPs that no Service
//     has, and unused addresses of Service CIDRs;
//   - ranges of ports ([tracker.ServicePort].LastPort): the programs find a frontend by its exact
//     address and port in a hash map, and a range would need a second look-up in every program;
//   - load-balancer IPs with loadBalancerSourceRanges, and Services that choose endpoints by
//     a hash of the source: a socket usually has no source before it connects;
//   - connections of pods that must be masqueraded: to external, load-balancer and node
//     addresses under externalTrafficPolicy Cluster, and all under
//     [ruleset.Node].MasqueradeAll. At the socket the endpoint would see the pod's address;
//   - sockets of the node that are bound to an address that the Node object does not have,
//     such as a loopback address: the endpoint could not reply to that address;
//   - NodePorts at addresses that are not the node's own, and at loopback and link-local
//     addresses, which every network namespace has for itself.
//
// The programs recognize the node's own processes by the cookie of the network namespace.
// Processes in other namespaces count as pods of the node that [ruleset.LocalTraffic]
// recognizes, if it can recognize any in the family. Containers that are not pods of the
// cluster, above all nested clusters with the same Service CIDR, must therefore be in a
// cgroup outside of Config.Cgroup.
//
// # Datagrams
//
// An unconnected UDP socket may talk to several Services. All its datagrams to one address go to
// one endpoint as long as that is ready or serves while it terminates; then the next datagram goes
// to another one. The source of an answer is the address that the process sent to, until the socket
// is closed: no other socket takes the place of its flows. If the process uses the endpoint's own
// address, answers come from there. No program sees the datagrams of a connected socket, so when its endpoint is
// gone the socket is ended (SOCK_DESTROY, CONFIG_INET_DIAG_DESTROY): the process gets
// ECONNABORTED immediately, and its next socket another endpoint. The same happens after a restart
// to the sockets whose endpoint left while no process ran.
//
// To end sockets of pods, the process must find their network namespaces in /proc (hostPID) and
// enter them. It needs CAP_SYS_ADMIN, and CAP_SYS_PTRACE for processes of other users or with other
// capabilities. Otherwise a connected socket stays with the endpoint that is gone, and the Backend
// logs that once. Without the kernel's option no socket is ended.
//
// A resolver sends the questions for A and AAAA from one socket at the same time
// (kubernetes/kubernetes#56903). TestParallelLookupsLoseNothing does so from 2,000 sockets at a
// time. On Linux 6.18 neither way loses an answer, because the kernel resolves the race of two
// packets that begin one flow since Linux 5.6. Within 30 s after the programs are attached, 16 of
// 275,000 answers were lost: connection tracking still had flows of the same ports through the
// rules, and translated new ones to keep them apart. In 60 s on a busy machine, 0 of 132,824 answers
// were lost through sockets, and 0 of 42,188 through package nftables. The rates of that run say
// nothing. A full connection tracking table drops new flows both ways, because those through
// sockets are tracked, too: with room for 1,000 flows, 64 of 6,024 answers were lost through sockets
// and 64 of 6,052 through package nftables. To repeat it, as root:
//
//	PROXIER_THOROUGH=1 go test ./examples/socketlb -run ParallelLookups -v -args -lookups 60s
//	go test ./examples/socketlb -run '^$' -bench Lookups     # look-ups a second, beside both ways
//
// # Differences
//
//   - A pod that reaches itself through a Service sees its own address as the client's. The
//     rules of the node would masquerade it. Connections that are masqueraded for another
//     reason are left alone, so the endpoint still sees an address of the node.
//   - Client affinity is by network namespace and not by source address. hostNetwork pods
//     and the node's processes are one client, and a pod with several addresses is one. The
//     backend behind stores clients separately, so a pod may have another endpoint at an
//     address of the Service that is left alone.
//   - The error queue of a UDP socket (IP_RECVERR) names the endpoint's address and not the
//     Service's, such as for a datagram that is too large for the path.
//
// Rules in the pod or on the node, ss, and connection tracking see such a connection at the
// endpoint's address, not at the Service's. For service meshes that redirect a pod's
// connections by the Service's address there is Config.NodeOnly.
//
// # Guarantees
//
// The maps and the links of the programs are files in Config.Dir. They stay in effect when
// the process ends. The next process takes them over: it replaces the programs in one step
// and keeps the entries of the maps. A map of another size is replaced as a whole.
// Connections to endpoints that are removed live on.
//
// Apply writes only what differs; the cost of a change depends on the number of endpoints of
// the Service. [Backend.Check] compares all entries, the programs and the files with what was
// written, and follows the node's addresses. A full delta repairs them. [Cleanup] removes
// everything. Config.Connections bounds the connections and flows that are translated at a time, and
// Config.Clients the clients with affinity: when there are more, the least recently used client
// is removed and may get another endpoint.
//
// The packets of a translated connection need no translation. Connections are made at 97 to 98 % of
// the rate to the endpoint's own address, and at 95 % through package nftables. Look-ups of two
// datagrams from a new socket are made at 96 % (BenchmarkLookups, connected or not, errors of 6
// to 7 % on a busy machine; package nftables 94 and 95 %). Translated connections
// are still tracked, because network policies and firewalls depend on that. DESIGN.md beside the
// code describes the maps, the programs and the benchmarks.
//
// # Requirements
//
// Linux 5.14 or later, a cgroup2 and a BPF file system, and CAP_BPF, CAP_PERFMON and
// CAP_NET_ADMIN in the initial user namespace. Linux 6.1 rejects the programs without
// CAP_PERFMON. [New] and [Probe] name what is missing in a [*dataplane.UnsupportedError]. No
// compiler is needed. On systems other than Linux all functions return an error.
package socketlb
