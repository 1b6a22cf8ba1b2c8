// Package iptables forwards Service traffic with the kernel's iptables, for
// clusters and kernels that stay with it: kube-proxy's chains under kube-proxy's
// names, written by iptables-restore. A [Backend] is a [ruleset.Backend]: attach it
// to a [ruleset.Engine] and it keeps the tables filter and nat of both families in
// agreement with the ruleset. It works with both implementations, iptables-legacy
// and iptables-nft.
//
// # What it promises
//
//   - A change writes the chains that differ, in one call of iptables-restore
//     that the kernel takes as a whole: for one endpoint its own chain, that of
//     the Service's choice, and nothing that grows with the number of Services.
//     What the kernel has is read at the start and for a full delta only.
//   - At every moment in between, and while one process takes over from another,
//     a Service with endpoints sends connections to them. A restart where nothing
//     changed writes nothing.
//   - One Service that the kernel refuses does not hold up others: it is searched
//     for by halves and reported, with the line that was refused.
//   - Flushed tables, tables put back to an earlier state, and jumps that are gone
//     are noticed by [Backend.Check] and put right by the next full delta, and so is
//     whatever else differs. Only its own chains and jumps are touched.
//
// # The chains
//
// As in kube-proxy, KUBE-SERVICES in nat leads to KUBE-SVC-… for the endpoints
// that all may use, to KUBE-SVL-… for those under a policy of Local, to KUBE-EXT-…
// for external addresses and by KUBE-FW-… where sources are restricted; all of
// these end in a KUBE-SEP-… for each endpoint, and their names are the hashes that
// kube-proxy gives them. KUBE-NODEPORTS, KUBE-MARK-MASQ and KUBE-POSTROUTING, and
// in filter KUBE-SERVICES, KUBE-EXTERNAL-SERVICES, KUBE-NODEPORTS, KUBE-FORWARD and
// KUBE-PROXY-FIREWALL, are what they are there.
//
// What is different, besides what package ruleset lists:
//
//   - A chain that leads to Services holds up to 100 rules, as operators know it.
//     Beyond, it is the root of a tree: the packets are told apart by the first
//     two bits in which their rules differ, of address, protocol and port, and so
//     on until 12 or fewer are left. KUBE-SVCS-0A600400/22 is the chain for
//     10.96.4.0/22. A connection meets about two dozen rules on its way to one of
//     10,000 Services, and one Service more changes one such chain.
//   - The endpoints of a Service that has more than 32 are in groups, KUBE-EPG-…,
//     by the first digit of their chains' names; groups are chosen by their weight,
//     so that the choice stays uniform. Under client affinity every endpoint still
//     has a rule to be met.
//   - The filter table has a rule for each external frontend, not only for those
//     without endpoints, and in KUBE-CLUSTER-IPS one for each cluster IP. Only
//     packets that were sent to no endpoint meet them: between two changes, one to
//     each table, or at a port that no Service has. They are refused, or dropped
//     under a policy of Local, instead of leaving the node. Unused addresses of the
//     Service CIDRs are dropped.
//   - KUBE-EXTERNAL-SERVICES is consulted for the node's own packets, too. Those to
//     addresses of the node meet it in INPUT, all others in OUTPUT.
//   - Packets for NodePorts are refused only at addresses at which NodePorts
//     answer.
//   - The guard of the loopback range is in KUBE-PROXY-LOCALNET. KUBE-FIREWALL is
//     kubelet's and left alone.
//   - KUBE-PROXY-CANARY holds a rule that says something else after each change.
//   - Sources that are not allowed are dropped, and others refused, also where a
//     Service has no endpoints.
//
// # Refused connections of the node itself
//
// A process on the node gets the answer that a remote client gets, ECONNREFUSED, where
// a Service without endpoints is addressed by a NodePort, at loopback addresses too if
// NodePorts answer there, or by an external or load-balancer IP that is an address of
// the node. The kernel returns EPERM to a UDP socket whose packet is stopped in
// OUTPUT, so such packets are refused, or dropped, in INPUT. The socket's flow remains in
// connection tracking, untranslated, as it does with kube-proxy; package conntrack
// deletes the flow when the Service has an endpoint.
//
// At cluster IPs, UDP sockets on the node get EPERM from sending and can read
// ECONNREFUSED next; TCP connections are refused at once. kube-proxy has the same. So it
// is at external and load-balancer IPs of other hosts, where kube-proxy lets the node's
// packets leave. None of these packets ever comes to INPUT. They could be translated to
// their own source address and refused there; but then a socket that goes on sending
// is refused still when the Service has endpoints, until its flow is deleted. A source
// that is not allowed gets EPERM, too, as with kube-proxy.
//
// # Counters
//
// As in kube-proxy, two of the kernel's accounting objects (nfacct) count what rules
// did: ct_state_invalid_dropped_pkts the packets that KUBE-FORWARD drops because
// connection tracking takes them for invalid, and localhost_nps_accepted_pkts the
// connections to NodePorts at IPv4 loopback addresses. The second takes, under
// [Config.LocalhostNodePorts], one rule more for every NodePort. [Backend.Counters]
// reads them; they outlast a restart, and [Cleanup] deletes them.
//
// Where the kernel has no such objects, or iptables or the kernel no match for them,
// which [New] finds out, nothing is counted and everything else is as it is elsewhere.
//
// # Limits
//
// Weights of endpoints are probabilities of the rules that choose, exact to 2^-31.
// Endpoints cannot be chosen by a hash of the client's address and port: see
// [HashFallback] for what happens to a Service that asks for it.
//
// Client affinity is xt_recent's: it remembers 100 clients for each endpoint
// unless the module is loaded with another ip_list_tot, and forgets the oldest.
// The time that a client is remembered for starts anew with each connection.
// With iptables-legacy the kernel takes the whole table for every change, so the
// time for one grows with all there is; see the benchmarks for how much.
//
// # Needs
//
// iptables 1.6.2 or later, and a kernel with the matches addrtype, comment,
// conntrack, mark and statistic (recent for affinity) and the targets DNAT, MARK,
// MASQUERADE and REJECT; CAP_NET_ADMIN and CAP_NET_RAW in the network namespace.
// To count it takes nfnetlink_acct and the match nfacct (xt_nfacct), which the kernel
// loads when they are asked for.
// [New] tries them and says what is missing.
//
// # Under fire
//
// Tests make connections, of which none may fail and none that is open may break,
// while an agent is killed at random points of its work (20 times with each
// flavour, more with -kills), while a thousand objects are changed a second among
// 150 Services (for 2 s), and through resyncs and restarts. A killed agent takes
// the programs that it started along, so that none writes what a dead agent
// wanted. Where there is no file descriptor to spare nothing is half done.
// CAP_NET_ADMIN is enough with iptables-nft; iptables-legacy opens a raw socket,
// which takes CAP_NET_RAW. A sysctl that cannot be written is logged, and one that
// has its value already is not written: see [SetSysctls].
//
// A flood for longer and among more ("go test -run TestFlood -flood 60s -services
// 10000"): iptables-legacy made 86 syncs of 60,000 changes among 10,000 Services,
// none of which waited for longer than 3.1 s, and none of 420,000 connections
// failed. iptables-nft, which takes a time in proportion to what changed and
// another for each input, as long as the table is large, made 13 syncs among 1,000
// Services (13 s; 296,000 connections, none failed). Among 10,000 it took 35 s to
// catch up with a flood of 5 s (479,000 connections, none failed). The heap
// stayed where it was.
//
// TestRandomWorlds makes up 25 worlds for each flavour, more with -soak.
//
// The package exists on Linux only; elsewhere it is empty.
package iptables
