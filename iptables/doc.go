// Package iptables forwards Service traffic with iptables, either iptables-legacy or iptables-nft. It keeps kube-proxy's
// chains, under kube-proxy's names, in the tables filter and nat of both address families.
//
//	b, err := iptables.New(ctx, iptables.Config{}) // a ruleset.Backend
//	...
//	defer b.Close()
//	cursor := engine.Attach("iptables", b)
//	go b.Watch(ctx, 30*time.Second, func(error) { cursor.Resync(); runner.Trigger() })
//
// A [Renderer] turns a ruleset into the same rules without a kernel, on every system. [DESIGN.md] has the chains, a
// packet's way through them, and the differences from kube-proxy.
//
// # Guarantees
//
//   - A change writes the chains that differ, with one call of iptables-restore for each table, or a few if it is very
//     large. The kernel applies each call as a whole. A changed endpoint costs its own chain and the chains of its
//     Service that choose it. Only full deltas read the kernel's tables, unless [Config.CountTraffic] is set.
//   - A Service with endpoints forwards connections at every moment, also while one process takes over from another. A
//     restart writes nothing if nothing changed.
//   - No Service holds up others: [New] tries every kind of rule, and each chain has a bounded size.
//   - [Backend.Check] detects tables that were flushed or restored to an earlier state, and missing jumps and rules of the
//     chains that every node has. The next full delta repairs everything that differs. The backend touches only its own
//     chains and jumps.
//
// # Limits
//
// An affinity timeout is at most 48 days. A Service without endpoints refuses all sources if it allows more than 250.
// Weights of endpoints are exact to 2^-31. A Service that asks for a hash is served without it, and logged.
//
// The kernel's module xt_recent implements client affinity. It remembers 100 clients for each endpoint, unless it is
// loaded with another ip_list_tot, and then forgets the oldest. Each connection restarts a client's affinity timeout.
//
// With iptables-legacy the kernel replaces the whole table for every change. With iptables-nft, each iptables-restore
// call adds time proportional to the table's size.
//
// # Requirements
//
// The package needs iptables 1.6.2 or later, and a kernel with the matches addrtype, comment, conntrack, mark and
// statistic (recent for affinity, sctp for SCTP) and the targets DNAT, MARK, MASQUERADE and REJECT. It needs
// CAP_NET_ADMIN in the network namespace, and for iptables-legacy CAP_NET_RAW. A chain can take 750 kB in a message to
// nf_tables if users choose external IPs for that. Without CAP_NET_ADMIN in the initial user namespace, this needs a
// net.core.wmem_max of 393,216. [New] and [Probe] try them and return a
// [*dataplane.UnsupportedError] that names what is missing, as all functions do on other systems than Linux.
//
// [DESIGN.md]: https://github.com/go-proxier/proxier/blob/main/iptables/DESIGN.md
package iptables
