// Package nftables forwards Service traffic with the kernel's nf_tables. It programs the kernel over netlink and does not
// need the nft tool.
//
//	backend, err := nftables.New(ctx, nftables.Config{}) // a ruleset.Backend
//	...
//	defer backend.Close()
//	cursor := engine.Attach("nftables", backend) // engine is a *ruleset.Engine
//	err = cursor.Sync(ctx)
//
// A [Backend] keeps one table in each address family, by default named "proxier". [Lookup], [Ready] and [Traffic] read the
// tables of a running agent, and [Cleanup] deletes them. A [Renderer] plans the same tables without a kernel, on every
// system. [DESIGN.md] describes the tables, a packet's way through them, the limits, and the differences from kube-proxy's
// nftables mode.
//
// # Guarantees
//
//   - The cost of a change depends on the change alone. Replacing an endpoint takes two to four set elements in one
//     transaction, and the backend reads nothing back.
//   - Every transaction is atomic: a packet meets the rules from before or after it. A full delta, even that of a new
//     process, replaces everything in one transaction. Clients of Services with affinity keep their endpoints.
//   - The backend changes nothing outside its tables except one bit of the packet mark. [Backend.Check] detects tables
//     that another process altered or deleted, and the next full delta repairs them.
//   - All endpoints of a Service are equally likely. Weights are exact to about a 256th of the connections. A Service with
//     a hash chooses the same endpoint for a client on every node.
//
// # Requirements
//
// Linux 5.10 or later with nf_tables, NAT and connection tracking, and CAP_NET_ADMIN in the network namespace. [New] tries
// every feature and names what is missing. On systems other than Linux every function returns a
// [*dataplane.UnsupportedError].
//
// To replace a table in one transaction, the socket needs a buffer of about 36 bytes for each endpoint and 110 for each
// Service port. More than net.core.wmem_max needs CAP_NET_ADMIN in the initial user namespace. Without it, the backend
// fills a staging table, "proxier-shadow", in several transactions and then swaps it in.
//
// [DESIGN.md]: https://github.com/go-proxier/proxier/blob/main/nftables/DESIGN.md
package nftables
