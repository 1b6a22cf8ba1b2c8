// Package socketlb translates TCP connections and UDP datagrams of a node's own processes and pods to Services at the
// socket. BPF programs on a cgroup replace the address in connect(2) and sendmsg(2), and getpeername(2) and recvmsg(2)
// return the Service's address. No packet is translated afterwards.
//
// A [Backend] is a [ruleset.Backend] that stands before another backend, such as package nftables. Its cursor is synced
// after the other backend's:
//
//	rules := engine.Attach("nftables", nftablesBackend)
//	sockets := engine.Attach("socketlb", socketlbBackend)
//	...
//	if err := rules.Sync(ctx); err == nil {
//		err = sockets.Sync(ctx)
//	}
//
// Connections that this package does not translate go to the Service's address, where the backend behind serves them.
// So no connection is lost while no programs are attached, or if an entry is missing. [DESIGN.md] lists these
// connections, and describes the maps, the programs and what happens to datagrams.
//
// Containers that are not pods of the cluster, above all nested clusters with the same Service CIDR, must be in a cgroup
// outside of Config.Cgroup: their processes count as pods of the node. Config.NodeOnly is for service meshes that
// redirect a pod's connections by the Service's address.
//
// # Differences
//
//   - A pod that reaches itself through a Service sees its own address as the client's.
//   - Client affinity is by network namespace: hostNetwork pods and the node's processes are one client.
//   - The error queue of a UDP socket (IP_RECVERR), rules in the pod or on the node, ss, and connection tracking see the
//     endpoint's address, not the Service's.
//
// # Guarantees
//
// The maps and the links of the programs are files in Config.Dir, and stay in effect when the process ends. The next
// process replaces the programs in one step and keeps the entries. Connections to removed endpoints continue. A
// connected UDP socket is ended with its endpoint: the process gets ECONNABORTED.
//
// The cost of a change depends on the number of endpoints of the Service. [Backend.Check] compares all entries, the
// programs and the files with what was written, and a full delta repairs them. [Cleanup] removes everything.
//
// # Requirements
//
// Linux 5.14 or later, a cgroup2 and a BPF file system, and CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN in the initial
// user namespace. [New] and [Probe] name a missing requirement in a [*dataplane.UnsupportedError]. No compiler is
// needed. To end sockets of pods, the process must find their network namespaces in /proc (hostPID) and enter them.
// It needs CAP_SYS_ADMIN, CONFIG_INET_DIAG_DESTROY, and CAP_SYS_PTRACE for processes of other users or with other
// capabilities. Otherwise a connected socket stays with its removed endpoint, and the Backend logs that once.
//
// [DESIGN.md]: https://github.com/go-proxier/proxier/blob/main/examples/socketlb/DESIGN.md
package socketlb
