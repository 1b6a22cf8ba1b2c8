// Package nftables forwards Service traffic with the kernel's nf_tables. It programs the
// kernel over netlink and does not need the nft tool.
//
//	backend, err := nftables.New(ctx, nftables.Config{})
//	if err != nil {
//		return err
//	}
//	defer backend.Close()
//	cursor := engine.Attach("nftables", backend) // engine is a *ruleset.Engine
//	err = cursor.Sync(ctx)
//
// A [Backend] is a [ruleset.Backend]. It keeps one table in each address family, by default
// named "proxier", in agreement with the ruleset. The example of this package is a complete
// agent. [Lookup], [Ready] and [Traffic] read the tables of a running agent, and [Cleanup]
// deletes them. DESIGN.md, beside the source, describes the tables and follows a packet
// through them.
//
// A [Renderer] plans the same tables without a kernel, on every system: a [Transaction] can be printed as
// "nft -f" reads it. Another program may commit it.
//
// # Guarantees
//
//   - The cost of a change depends on the change alone. Replacing an endpoint takes two to
//     four set elements in one transaction, and the backend reads nothing back.
//   - Every transaction is atomic: a packet meets the rules from before or after it. A full
//     delta, also that of a new process, replaces everything in one transaction. No Service
//     is missing at any moment, and clients of Services with affinity keep their endpoints.
//   - The backend changes nothing outside its tables except one bit of the packet mark.
//     [Backend.Check] detects tables that another process altered or deleted, and the next
//     full delta repairs them.
//   - All endpoints of a Service are equally likely. Weights are exact to about a 256th of the
//     connections. A Service with a hash chooses the same endpoint for a client on every node,
//     under the conditions in DESIGN.md.
//   - A process on the node that connects to a NodePort without endpoints gets ECONNREFUSED,
//     as a remote client does. So it does at an external or load-balancer IP that is an
//     address of the node. At cluster IPs and at IPs of other hosts, a UDP socket gets EPERM
//     from sending first (see MayFailSend in [ruleset.Verdict]).
//
// # Offload
//
// With [Config.Offload], established connections of Services that cross the node take a fast
// path, a flowtable. The kernel forwards their packets as they come in, without netfilter's
// hooks and without a route look-up. TCP takes the fast path, UDP only with Offload.UDP, and
// SCTP never. Packets on the fast path skip:
//
//   - the prerouting, forward and postrouting hooks of every program, also those of iptables.
//     A network policy in these hooks does not apply to connections that it allowed before it
//     changed. Marks, limits, logs and counters there apply to the first packets only;
//   - policy routing by mark. A connection whose route or interface goes away returns to the
//     usual path;
//   - the bridge, for packets that leave a bridge by a port that Offload.Interfaces chooses.
//
// Offload makes the kernel count the packets of all connections that begin later in the network
// namespace (net.netfilter.nf_conntrack_acct). Connections that began earlier are not
// offloaded. A connection that is silent for 30 s returns to the usual path and may be
// offloaded again. A connection that another program translated is offloaded only if that
// program's rules come before the backend's and the destination is a frontend of a Service.
//
// An endpoint that is removed keeps its offloaded TCP connections, as it keeps others. Package
// conntrack ends UDP flows to it, within about a second. [Backend.Watch] follows interfaces
// that come and go.
//
// # Differences from kube-proxy's nftables mode
//
// Packets are treated the same, except for the differences that package ruleset lists and
// these:
//
//   - The table has another name, so both can be installed while one takes over from the
//     other. It has its own chains and maps.
//   - Client affinity is kept for each Service port and, under externalTrafficPolicy Local,
//     separately for traffic that may use every endpoint and traffic that may use local ones.
//     Each connection restarts the timeout of its client. After the timeout is shortened, a
//     remembered client may make one more connection within the old timeout.
//   - Connections of an endpoint to itself are masqueraded only if the endpoint is on this
//     node or its node is not known. Others do not start here.
//   - The first packet of a connection loses the priority that a local process gave it
//     (SO_PRIORITY).
//
// Unlike package iptables, and like kube-proxy, the backend does not drop TCP packets that
// connection tracking considers invalid, such as those outside of the TCP window. An endpoint's
// packet of this kind reaches the client untranslated, and the client's answer resets the
// connection. TCPBeLiberal of package conntrack makes the kernel translate such packets.
//
// # Requirements
//
// Linux 5.10 or later with nf_tables, NAT and connection tracking, and CAP_NET_ADMIN in the
// network namespace. [New] tries every feature and names what is missing. Offload was tested
// in Debian's Linux 5.10, 6.1 and 6.12. On systems other than Linux every function returns a
// [*dataplane.UnsupportedError].
//
// To replace a table in one transaction, the socket needs a buffer of about 36 bytes for each
// endpoint and 110 for each Service port. More than net.core.wmem_max needs CAP_NET_ADMIN in
// the initial user namespace, which a node agent has. Without it, the backend fills a staging
// table, "proxier-shadow", in several transactions and then swaps it in. The two names
// alternate.
//
// # Limits
//
// These are all limits, in each family. None of them makes a Service that has rules lose them to
// another.
//
//   - 1,048,575 pools. A Service port takes one, and two if externalTrafficPolicy Local applies
//     and this node has endpoints. A Service beyond that fails alone. If it had rules, it keeps
//     them, without frontends and endpoints that are gone, and takes no frontend from another
//     Service, even if it has precedence (see [ruleset.ErrRefused]).
//   - 32,767 pools with client affinity. Services beyond that are forwarded without affinity, and
//     a log line tells how many. They get affinity, the oldest first, when others give it up.
//   - 65,535 endpoints of a pool with client affinity, and 32,767 with weights or a hash. Only the
//     first ones of a larger pool are used (see [Backend.Limits]).
//   - Config.StickyClients remembered clients, of all Services together. Clients beyond that are
//     served without being remembered, until others expire.
//   - Connections to ranges of ports ([ruleset.Frontend].LastPort) are not counted, unless by
//     Config.CountPackets, and do not take the fast path. A very long range that is shifted
//     downwards may have no translation in the kernel; then its Service fails. A client that uses
//     one source port for two addresses of one endpoint's port may reach another port of a shifted
//     range, in package iptables, too.
//   - With Config.CountPackets, packets are counted for 1,048,576 destinations. If connections
//     outlive their Service, its counter returns, and stays until the address has a Service again
//     and loses it.
//   - Traffic is counted for twice the number of frontends that the last full delta had, and at
//     least 4,096. Connections to further destinations are forwarded without being counted.
//   - A transaction is at most as large as the socket's buffer. A Service that does not fit fails
//     alone, with [ErrTooLarge], and keeps what remains of its rules.
//
// After a restart, Services that have rules in the kernel come before others if there is not
// enough room, and older Services before newer ones (see tracker.ServicePort.Created). Sets of Service addresses and endpoints
// have room for twice what the last full delta needed, at least 4,096; when one is full, Apply
// asks for a full delta, which makes room. Numbers of handlers (see DESIGN.md) and affinity
// timeouts have no limit that a Service could reach.
//
// With a hash, a Service takes about 120 bytes of kernel memory for each bucket of its table:
// 60 kB in each family for 15 endpoints. A Service with client affinity takes about 3 kB for a
// timeout that no other uses.
package nftables
