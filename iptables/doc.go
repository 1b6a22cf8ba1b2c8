// Package iptables forwards Service traffic with iptables. It keeps kube-proxy's chains,
// under kube-proxy's names, in the tables filter and nat. It works with both
// implementations, iptables-legacy and iptables-nft.
//
// A [Backend] is a [ruleset.Backend]: attach it to a [ruleset.Engine], and it keeps the
// tables of both address families in agreement with the ruleset.
//
//	b, err := iptables.New(ctx, iptables.Config{})
//	...
//	defer b.Close()
//	cursor := engine.Attach("iptables", b)
//	go b.Watch(ctx, 30*time.Second, func(error) { cursor.Resync(); runner.Trigger() })
//
// A [Renderer] turns a ruleset into the same rules without a kernel, on every system: a [Transaction] can
// be printed, compared, divided, and committed by a program of one's own. Package fake is a kernel in
// memory that applies it.
//
// The chains, and a packet's way through them, are drawn in [DESIGN.md], which also has the answers that
// processes of the node get.
//
// # Guarantees
//
//   - A change writes the chains that differ, with one call of iptables-restore for each
//     table, or a few if it is very large. The kernel applies each call as a whole. A
//     changed endpoint costs its own chain and the chains of its Service that choose it,
//     regardless of the number of Services. The backend reads the kernel's tables for full
//     deltas only, unless [Config.CountTraffic] is set.
//   - A Service with endpoints forwards connections at every moment, between the writes
//     of a change and while one process takes over from another. A restart writes nothing
//     if nothing changed. If the process is killed, the programs that it started are
//     killed, too, and do not write later.
//   - A Service that the kernel refuses does not hold up others. [Backend.Apply] finds it
//     by bisection and returns the line that was refused.
//   - [Backend.Check] detects flushed tables, tables that were restored to an earlier
//     state, and missing jumps and rules of the chains that every node has, such as
//     KUBE-POSTROUTING and KUBE-SERVICES. The next full delta repairs these and everything
//     else that differs. The backend touches only its own chains and jumps.
//
// # Differences from kube-proxy
//
// Besides those that package ruleset lists:
//
//   - Chains with many rules are trees, and Services with many endpoints have them in groups, so a
//     packet meets a number of rules that grows with the logarithm of the number of Services, and
//     adding a Service changes one small chain. Under client affinity a Service's chain still has
//     a rule for every endpoint.
//   - The filter table has rules for Services with endpoints, too, and stops packets for ports that no
//     Service has and for unused addresses of the Service CIDRs.
//   - KUBE-EXTERNAL-SERVICES has the rules for cluster IPs, too, so that packets to a cluster IP
//     that is an address of the node are refused in INPUT. With kube-proxy, which has them in
//     KUBE-SERVICES, such packets reach the node's own servers.
//   - The node's own packets meet KUBE-EXTERNAL-SERVICES, too: in INPUT if they are for
//     addresses of the node, and by way of KUBE-SERVICES in OUTPUT otherwise.
//   - "kube-proxy --cleanup" deletes everything that affects packets. Some chains stay in the
//     filter table, which no rule leads to; [Cleanup] deletes them, too.
//   - Packets for NodePorts are refused only at addresses at which NodePorts answer.
//   - The guard of the loopback range is in KUBE-PROXY-LOCALNET. KUBE-FIREWALL is
//     kubelet's and stays untouched. route_localnet is set back to 0 if it was 0 before.
//   - Packets from sources that are not allowed are dropped, and others refused, also
//     where a Service has no endpoints.
//
// # Limits
//
// None of these limits makes a Service that has rules lose them to another. A Service that cannot
// be programmed keeps what remains of its rules: frontends and endpoints that it has no more
// leave them. It takes no frontend from another Service, even if it has precedence (see
// [ruleset.ErrRefused]).
//
// An affinity timeout is at most 48 days; a Service with a longer one is refused (see
// [Backend.Limits]). The number of Services is limited by the time for a change and by memory
// only: the backend takes no packet marks, sets or numbers for a Service. Names of chains are 80
// bits of a hash, as kube-proxy's.
//
// Weights of endpoints are probabilities of the rules that choose, exact to 2^-31.
// iptables has no match that could choose endpoints by a hash of the client's address and
// port. A Service that asks for one is served as if it did not, and the backend logs it.
//
// The kernel's module xt_recent implements client affinity. It remembers 100 clients for
// each endpoint, unless it is loaded with another ip_list_tot, and then forgets the
// oldest. Each connection restarts a client's affinity timeout.
//
// With iptables-legacy the kernel replaces the whole table for every change, so the time
// for a change grows with the size of the table. With iptables-nft, a change
// costs time proportional to its size, and each iptables-restore call adds time proportional to
// the table's size.
//
// # Requirements
//
// The package needs iptables 1.6.2 or later, and a kernel with the matches addrtype,
// comment, conntrack, mark and statistic (recent for affinity) and the targets DNAT, MARK,
// MASQUERADE and REJECT. It needs CAP_NET_ADMIN in the network namespace, and
// iptables-legacy, which opens a raw socket, needs CAP_NET_RAW as well. [New] and [Probe]
// try them and return a [*dataplane.UnsupportedError] that names what is missing. Kernel
// counters are optional: see [Backend.Counters]. On other systems than Linux the package
// compiles, and its functions return a *dataplane.UnsupportedError.
//
// [DESIGN.md]: https://github.com/go-proxier/proxier/blob/main/iptables/DESIGN.md
package iptables
