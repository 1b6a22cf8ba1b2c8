// Package nftables forwards Service traffic with the kernel's nf_tables, over netlink and
// without the nft tool. A [Backend] is a [ruleset.Backend]: attach it to a
// [ruleset.Engine], and it keeps one table in each address family, by default "proxier",
// in agreement with the ruleset.
//
// # Guarantees
//
//   - The cost of a change depends on the change alone. Replacing an endpoint takes two to
//     four set elements in one transaction, and nothing is read back.
//   - Every transaction is atomic: a packet meets the rules from before or after it. A full
//     delta, also that of a new process, replaces everything in one transaction. No Service
//     is missing at any moment, and clients of Services with affinity keep their endpoints.
//   - The backend touches nothing outside its tables, and one bit of the packet mark.
//     [Backend.Check] notices tables that another process altered or deleted, and the next
//     full delta repairs them.
//
// # Layout
//
// Services and endpoints have no chains, rules or anonymous sets of their own. A fixed set
// of chains, and a few more for each number of endpoints in use, look things up in named
// maps. To follow a connection to 10.96.0.10 port 53 through "nft list table ip proxier":
//
//	map service-ips {
//		elements = { 10.96.0.10 . udp . 53 comment "kube-system/dns:dns" : 8010:2 }
//	}
//
// The value is a dispatch key. Its first three digits are the handler, which determines
// what happens to the connection, and its last five the pool of endpoints:
//
//	map handlers {
//		elements = { 8010:0 : goto cluster-ip-3 }
//	}
//	map endpoints {
//		elements = { 0:2 . 0x00000000 : 10.244.1.7 . 53,
//			     0:2 . 0x00000001 : 10.244.2.4 . 53,
//			     0:2 . 0x00000002 : 10.244.3.9 . 53 }
//	}
//	chain cluster-ip-3 {
//		ip saddr != 10.244.0.0/16 meta mark set meta mark | 0x00004000
//		goto pool-3
//	}
//	chain pool-3 {
//		update @connections { ip daddr . meta l4proto . th dport counter } dnat ip to meta priority & f:ffff . numgen random mod 3 map @endpoints
//		dnat ip to meta priority & f:ffff . numgen random mod 3 map @endpoints
//	}
//
// "nft get element ip proxier service-ips { 10.96.0.10 . udp . 53 }" finds the first of
// these at once. Handlers have these other chains:
//
//   - external-N: masquerade, then pool-N;
//   - local-N: externalTrafficPolicy Local. Internal traffic, from this node and its pods,
//     gets another dispatch key from internal-service-ips, which leads to the endpoints of
//     every node. Other traffic goes to pool-N, of local endpoints;
//   - local-none: the same on a node without local endpoints, where other traffic is dropped;
//   - firewall-…: only sources in allowed-sources-LENGTH, a set for each prefix length, go
//     on to the chain named behind the dash;
//   - sticky-N-Ts: pool-N with client affinity. sticky-clients remembers the endpoint of a
//     client for T seconds, sticky-endpoints has the endpoints that still exist, and new
//     clients get one from sticky-buckets;
//   - pool-by-source-N and pool-by-port-N: the bucket follows from a hash of the client's
//     address, or of its address and port. Names of chains that lead there contain the same
//     words, such as cluster-ip-by-port-N and sticky-by-source-N-Ts;
//   - no-endpoints rejects, and no-local-endpoints drops, except what the node sends to
//     itself: see "Refused connections of the node itself".
//
// N is the number of buckets to draw from: up to 16 the number of endpoints, and beyond
// that the next of four steps between powers of two, so that there are few chains and a new
// endpoint seldom changes the dispatch key. A draw of an empty bucket is repeated. All
// endpoints are equally likely.
//
// A packet can meet a transaction between two look-ups and find that the target of the
// first is gone. The base chains nat-prerouting-again and nat-output-again, which come
// right behind, look at it again in the new state.
//
// The dispatch key travels in the packet's priority from nat-prerouting or nat-output to
// the filter chains, which reset it. This affects the first packet of a connection: a
// priority that a local process gave it (SO_PRIORITY) is lost. Later packets before the
// first answer lose theirs, too, if it is 0x80000000 or more, which no traffic class is. The
// kernel sets the priority of forwarded IPv4 packets after routing, and IPv6 packets have
// none.
//
// # Weights and hashes
//
// An endpoint has as many buckets as its share by weight (see [ruleset.Shares]). The shares
// are exact if they take at most 256 buckets, or 16 for each endpoint. Otherwise the error
// is about one bucket, at most a 256th of the connections. A weight that changes by one step
// changes as many buckets.
//
// A Service with a hash has its Maglev table in the map endpoints:
//
//	chain pool-by-port-509 {
//		dnat ip to meta priority & f:ffff . jhash ip saddr . th sport mod 509 seed 0x1 map @endpoints
//	}
//
// The table (see [ruleset.Service.Maglev]), the hash and its seed are the same on every node
// that has the same byte order, endpoints and [ruleset.Node] HashSeed, and
// [ruleset.Service.HashOf] computes the hash in Go. So a node that receives packets of a
// connection that another node forwarded sends them to the same endpoint: connection
// tracking takes them for a new connection (net.netfilter.nf_conntrack_tcp_loose, on by
// default). This has two conditions. The client must send before the server does, and the
// connection must not be masqueraded, since the other node chose the port that the endpoint
// sees.
//
// A bucket takes 105 to 127 bytes in the kernel. A table of 509 buckets, for up to 15
// endpoints, takes 56 kB in each family: 10,000 such tables take 640 MB. If one of 10
// endpoints goes, 68 of 509 buckets change, and no other Service is written
// (BenchmarkHashed). Connections are made as fast as with random draws
// (BenchmarkConnections).
//
// # Traffic
//
// The sets connections, refused-packets and dropped-packets count by destination, and
// [Backend.Traffic] and [Traffic] sum them up by Service port:
//
//	set connections {
//		elements = { 10.96.0.10 . udp . 53 counter packets 1234 bytes 92550 }
//	}
//
// Rules add an element for the first packet to a destination, so counting costs nothing when
// Services change, and a destination that nobody uses takes no memory. A counter takes about
// 95 bytes of kernel memory and 16 bytes for each CPU (BenchmarkTraffic). The sets stay in place
// when the table's contents are replaced. The second rule of each pool forwards a connection that
// cannot be counted.
//
// A connection that is counted costs as much as one that is not: the medians of 3,000 turns
// differ by 0.5 % with an error of 0.6 %, and by 0.2 % between two Services that both count
// (BenchmarkConnections). Reading the counters of 10,000 Services takes 50 to 150 ms on a busy
// machine. Apply waits while the backend reads them.
//
// # Refused connections of the node itself
//
// A process on the node gets the answer that a remote client gets, ECONNREFUSED, where
// a Service without endpoints is addressed by a NodePort, or by an external or
// load-balancer IP that is an address of the node. The kernel returns EPERM to a UDP
// socket whose packet is stopped in the output hook, so such a packet goes on to the
// loopback interface and is stopped in the input hook:
//
//	chain filter-input {
//		type filter hook input priority filter; policy accept;
//		iifname "lo" ct state new ct status ! dnat jump own-services
//	}
//
// own-services finds the dispatch key again. The map own-handlers has an element for each
// handler that ends connections, and leads to the same chains as the map handlers. A
// packet that is dropped is treated in the same way, and the socket gets no error.
//
// The socket's flow remains in connection tracking, untranslated, as it does with
// kube-proxy. Package conntrack deletes the flow when the Service has an endpoint.
//
// At cluster IPs, and at external and load-balancer IPs of other hosts, UDP sockets on the
// node get EPERM from sending and can read ECONNREFUSED next; TCP connections are refused
// at once. A source that is not allowed gets EPERM, too. See MayFailSend in
// [ruleset.Verdict].
//
// # Offload
//
// With [Config.Offload], established connections of Services that cross the node are put into
// a flowtable. The kernel then forwards their packets as they come in, translated, without
// netfilter's hooks and without a look-up of the route. The same connection as above:
//
//	flowtable fast-path {
//		hook ingress priority filter
//		devices = { eth0, veth1 }
//		counter
//	}
//	chain filter-forward {
//		ct state established ct status dnat iifname @fast-path-interfaces oifname @fast-path-interfaces ct packets > 20 jump to-fast-path
//	}
//	chain to-fast-path {
//		meta l4proto tcp meta priority set ct original ip daddr . meta l4proto . ct original proto-dst map @service-ips flow add @fast-path
//	}
//
// A connection is one of a Service if its destination was translated and the destination that
// its client chose is a frontend now: an entry of service-ips or, at an address of
// nodeport-ips, of service-nodeports. A connection that another program translated is offloaded
// only if that program's rules come before the backend's and its destination is a frontend of a
// Service, such as a node's address with the number of a NodePort. Connections of the node's own
// processes do not cross the node. TCP is offloaded, and UDP only with Offload.UDP; SCTP cannot
// be. Offload was tested in Debian's Linux 5.10, 6.1 and 6.12.
//
// What offload skips, for packets on the fast path:
//
//   - the prerouting, forward and postrouting hooks of every program, those of iptables
//     included. A network policy that was enforced there for a connection before is not
//     enforced again when it changes: a connection that was allowed lives on. Marks, limits,
//     logs and counters there see the first packets only;
//   - routing decisions. A connection whose route goes or whose interface goes down returns
//     to the usual path, but policy routing by mark is not repeated;
//   - for packets that come out of a bridge by a port that is chosen, the bridge.
//
// The queueing disciplines and filters (tc) of the interfaces see every packet. "conntrack -L"
// shows [OFFLOAD] and counts every packet. The last packets of a TCP connection, fragments,
// and packets that are too large for the next link take the usual path. A connection that is
// silent for 30 s (net.netfilter.nf_flowtable_tcp_timeout and _udp_timeout) returns to it, and
// its next packets may be offloaded again.
//
// A rule that looks at the number of packets has the kernel count them for all connections of
// the network namespace that begin from then on (net.netfilter.nf_conntrack_acct). Connections
// that began before are not offloaded. The packet that puts a connection on the fast path loses
// its priority, as a first packet does.
//
// An endpoint that is removed keeps its offloaded TCP connections, as it keeps others. Package
// conntrack deletes the entries of UDP flows to it; within about a second the kernel takes such
// a flow off the fast path, and the next packet goes to another endpoint. A restart and a full
// delta leave the flowtable as it is; where tables are swapped, connections take the usual path
// for a moment. [Backend.Watch] follows interfaces as they come and go, by notifications of the
// kernel; [Backend.SyncInterfaces] is for callers who know of them themselves. Without these, a
// connection over an interface that is new is forwarded in the usual way until the next full
// delta.
//
// # Differences from kube-proxy's nftables mode
//
// Packets are treated the same, except for the differences that package ruleset lists. The
// table has another name, so that both can be installed while one takes over from the other,
// and its own chains and maps. Client affinity is kept for each Service port and, under
// externalTrafficPolicy Local, separately for traffic that
// may use every endpoint and traffic that may use local ones. Each connection renews the time
// that a client is remembered for. After the timeout is shortened, a client that is already
// remembered may make one more connection within the old timeout. Hairpin connections are
// masqueraded only for endpoints that are on this node or whose node is not known, since
// those of other endpoints do not start here.
//
// # Requirements
//
// Linux 5.10 or later with nf_tables, NAT and connection tracking, and CAP_NET_ADMIN in the
// network namespace. [New] tries every feature and names what is missing. On other systems
// every function returns a [*ruleset.UnsupportedError].
//
// Replacing a table in one transaction needs a socket buffer for all of it, about 36 bytes
// for each endpoint and 110 for each Service port. Beyond net.core.wmem_max that needs
// CAP_NET_ADMIN in the initial user namespace, which a node agent has. Without it, a staging
// table "proxier-shadow" is filled in several transactions and then swapped in; the two names
// alternate. Tables of an older layout, and tables whose structure another process altered,
// are swapped twice, so that the name stays. A Service that is too large for any transaction
// fails alone, with [ErrTooLarge].
//
// Each family has room for 1257 combinations of an affinity timeout, a number of buckets and
// a way to the pool. Services with a cluster IP and a NodePort, one timeout and one number of
// endpoints take two. Services with affinity beyond that fail alone; Services without
// affinity always have room. A Service may have any number of ports. It may have 65,535
// endpoints with client affinity, and more without.
package nftables
