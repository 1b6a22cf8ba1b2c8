// Package iptables forwards Service traffic with the kernel's iptables. It is for
// clusters and kernels that keep iptables: kube-proxy's chains under kube-proxy's
// names, written by iptables-restore. A [Backend] is a [ruleset.Backend]: attach it
// to a [ruleset.Engine] and it keeps the tables filter and nat of both families in
// agreement with the ruleset. It works with both implementations, iptables-legacy
// and iptables-nft.
//
// # Guarantees
//
//   - A change writes the chains that differ, by one call of iptables-restore that the
//     kernel applies as a whole. One endpoint changes its own chain and that of the
//     Service's choice, and nothing that grows with the number of Services. The backend
//     reads the kernel's tables for full deltas only.
//   - At every moment between two changes, and while one process takes over from another,
//     a Service with endpoints sends connections to them. A restart writes nothing if
//     nothing changed. If the process is killed, so are the programs that it started, and
//     none of them writes later.
//   - A Service that the kernel refuses does not hold up others. Apply finds it by
//     bisection and reports it, with the line that was refused.
//   - [Backend.Check] notices flushed tables, tables that were restored to an earlier
//     state, and missing jumps. The next full delta repairs these and everything else
//     that differs. The backend touches only its own chains and jumps.
//
// # Chains
//
// As in kube-proxy, KUBE-SERVICES in nat leads to KUBE-SVC-… for the endpoints that all
// clients may use, to KUBE-SVL-… for those under a policy of Local, to KUBE-EXT-… for
// external addresses, and through KUBE-FW-… where sources are restricted. All of these
// end in a KUBE-SEP-… for each endpoint. The names are the hashes that kube-proxy uses.
// KUBE-NODEPORTS, KUBE-MARK-MASQ and KUBE-POSTROUTING, and in filter KUBE-SERVICES,
// KUBE-EXTERNAL-SERVICES, KUBE-NODEPORTS, KUBE-FORWARD and KUBE-PROXY-FIREWALL, have the
// same purposes as in kube-proxy.
//
// The differences from kube-proxy, besides those that package ruleset lists, are:
//
//   - A chain that leads to Services has the shape that operators know from kube-proxy up
//     to 100 rules. With more it is the root of a tree, which divides packets by the first
//     two bits in which the rules differ, of address, protocol and port, until 12 or fewer
//     rules are left.
//     KUBE-SVC-IP-0A600400/22 is the chain for 10.96.4.0/22. A connection meets about two
//     dozen rules on its way to one of 10,000 Services, and adding a Service changes one
//     such chain.
//   - The endpoints of a Service that has more than 32 are in groups, KUBE-SEP-G-…,
//     by the first digit of their chains' names. Groups are chosen by their weight,
//     so the choice stays uniform. Under client affinity the Service's chain still has a
//     rule for every endpoint.
//   - The filter table has a rule for each external frontend, not only for those
//     without endpoints, and in KUBE-CLUSTER-IPS one for each cluster IP. Only
//     packets that were sent to no endpoint meet them: between the changes of the two
//     tables, or at a port that no Service has. These rules refuse the packets, or drop
//     them under a policy of Local, so that they do not leave the node. Packets to unused
//     addresses of the Service CIDRs are dropped.
//   - The node's own packets meet KUBE-EXTERNAL-SERVICES, too: in INPUT if they are
//     for addresses of the node, in OUTPUT otherwise.
//   - Packets for NodePorts are refused only at addresses at which NodePorts
//     answer.
//   - The guard of the loopback range is in KUBE-PROXY-LOCALNET. KUBE-FIREWALL is
//     kubelet's and stays untouched.
//   - KUBE-PROXY-CANARY holds one rule whose comment is a fresh random value after
//     every change.
//   - Sources that are not allowed are dropped, and others refused, also where a
//     Service has no endpoints.
//
// # Refused connections of the node itself
//
// A process on the node gets ECONNREFUSED, as a remote client does, at a NodePort of a
// Service without endpoints, including at loopback addresses if NodePorts answer there,
// and at an external or load-balancer IP that is an address of the node. The kernel
// returns EPERM to a UDP socket whose packet is stopped in OUTPUT, so the backend refuses
// or drops such packets in INPUT. The socket's flow stays in connection tracking,
// untranslated, as it does with kube-proxy; package conntrack deletes the flow when the
// Service gets an endpoint.
//
// At cluster IPs, and at external and load-balancer IPs of other hosts, UDP sockets on the
// node get EPERM from sending and can read ECONNREFUSED next; TCP connections are refused
// at once. A source that is not allowed gets EPERM, too. See MayFailSend in
// [ruleset.Verdict].
//
// # Counters
//
// As in kube-proxy, rules count into two of the kernel's accounting objects (nfacct).
// The object ct_state_invalid_dropped_pkts counts the packets that KUBE-FORWARD drops
// because connection tracking considers them invalid. The object
// localhost_nps_accepted_pkts counts the connections to NodePorts at IPv4 loopback
// addresses. With [Config.LocalhostNodePorts], it takes one more rule for every
// NodePort. [Backend.Counters] reads the objects. They outlast a restart, and [Cleanup]
// deletes them.
//
// If the kernel has no such objects, or iptables or the kernel no match for them,
// [New] logs that, nothing is counted, and everything else works.
//
// # Traffic
//
// [Backend.Traffic] and [Traffic] sum up the counters of the rules that choose an endpoint: the
// connections of each Service port. These counters outlast a restart, and all changes but those
// of the Service's own endpoints, for which their chain is written again. With
// [Config.CountTraffic] the new chain begins with the sum of the old one, which takes another
// run of iptables-save. Connections between that and the run of iptables-restore are not counted.
//
// # Limits
//
// Weights of endpoints are probabilities of the rules that choose, exact to 2^-31.
// Endpoints cannot be chosen by a hash of the client's address and port; see
// [HashFallback] for Services that ask for it.
//
// Client affinity is xt_recent's. It remembers 100 clients for each endpoint
// unless the module is loaded with another ip_list_tot, and forgets the oldest.
// Each connection restarts a client's affinity timeout.
// With iptables-legacy the kernel replaces the whole table for every change, so the
// time for a change grows with the size of the table. iptables-nft takes a time
// proportional to the change plus, for each input, to the size of the table. See the
// benchmarks.
//
// # Requirements
//
// The package needs iptables 1.6.2 or later, and a kernel with the matches addrtype,
// comment, conntrack, mark and statistic (recent for affinity) and the targets DNAT,
// MARK, MASQUERADE and REJECT. It needs CAP_NET_ADMIN in the network namespace, and
// iptables-legacy, which opens a raw socket, needs CAP_NET_RAW as well. Counters need
// nfnetlink_acct and the match nfacct (xt_nfacct), which the kernel loads on demand.
// [Probe] and [New] try them and report what is missing. On other systems than Linux the
// package compiles, and its functions return a [*ruleset.UnsupportedError].
package iptables
