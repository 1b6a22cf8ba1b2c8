// Package nftables forwards Service traffic with the kernel's nf_tables, over
// netlink and without the nft tool. A [Backend] is a [ruleset.Backend]: attach it
// to a [ruleset.Engine] and it keeps one table a family, "proxier" unless told
// otherwise, in agreement with the ruleset.
//
// # What it promises
//
//   - A change costs what changed: one endpoint replaced is two to four set
//     elements in one transaction, whatever else there is. Nothing is read back.
//   - Every transaction is atomic, so a packet meets the rules of before or of
//     after. A full delta, at the start of a new process too, replaces everything
//     in one transaction: there is no moment in which a Service is missing, and
//     clients of Services with affinity keep their endpoints.
//   - Nothing outside its tables is touched, and of the packet mark only one bit.
//     Tables altered or deleted by somebody else are noticed by [Backend.Check] and
//     put right by the next full delta.
//
// # The layout
//
// There is no chain, rule or anonymous set for a Service or an endpoint. A fixed
// set of chains, and a few more for each number of endpoints in use, read named
// maps whose elements are the data. To follow a connection to 10.96.0.10 port 53
// through "nft list table ip proxier":
//
//	map service-ips {
//		elements = { 10.96.0.10 . udp . 53 comment "kube-system/dns:dns" : 8010:2 }
//	}
//
// The value is a dispatch key. Its handler, the first three digits, says what is done with
// the connection, and its last five which endpoints there are:
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
//		dnat ip to meta priority & f:ffff . numgen random mod 3 map @endpoints
//	}
//
// "nft get element ip proxier service-ips { 10.96.0.10 . udp . 53 }" finds the
// first of these at once. The other chains that dispatch keys lead to:
//
//   - external-N: masquerade, then pool-N;
//   - local-N: externalTrafficPolicy Local. Connections from this node's pods and
//     from the node itself take another dispatch key, from internal-service-ips, which leads
//     to the endpoints of every node; all others go to pool-N, of local ones;
//   - local-none: the same on a node without local endpoints: others are dropped;
//   - firewall-…: only sources in allowed-sources-LENGTH, a set for each prefix
//     length, go on to the chain behind the dash;
//   - sticky-N-Ts: like pool-N with client affinity: sticky-clients remembers a
//     client's endpoint for T seconds, sticky-endpoints says whether it still is
//     one, sticky-buckets is what is drawn from otherwise;
//   - pool-by-source-N and pool-by-port-N: the bucket is not drawn but follows from a
//     hash of the client's address, or of its address and port, and so in whatever
//     leads there, cluster-ip-by-port-N or sticky-by-source-N-Ts;
//   - no-endpoints rejects, no-local-endpoints drops.
//
// The last two let pass what the node sends to itself, and filter-input stops it: see
// "Refused connections of the node itself".
//
// N is the number of buckets to draw from. Up to 16 it is the number of endpoints;
// beyond, it is the next of four steps between powers of two, and a draw that hits
// none is repeated, so that there are few chains and an added endpoint seldom
// changes the dispatch key. The choice is uniform.
//
// # Weights and hashes
//
// Where endpoints have different weights, each has as many buckets as its share, see
// [ruleset.Shares]: exactly in proportion where that takes no more than 256 buckets, or
// 16 for each endpoint, and otherwise with an error of about one bucket, a 256th of the
// connections at the most. A weight that changes by one step changes as many buckets.
//
// A hashed Service has its Maglev table in the map endpoints, a bucket each:
//
//	chain pool-by-port-509 {
//		dnat ip to meta priority & f:ffff . jhash ip saddr . th sport mod 509 seed 0x1 map @endpoints
//	}
//
// The table (see [ruleset.Service.Maglev]), the hash and its seed are the same on
// every node of the same byte order with the same endpoints and [ruleset.Node]
// HashSeed, and [ruleset.Service.HashOf] makes the same hash in Go. So a node that
// an established connection's packets come to, though it never saw its beginning,
// sends them to the same endpoint: connection tracking takes them for a new
// connection (net.netfilter.nf_conntrack_tcp_loose, on by default), with two
// provisos. The client must send before the server does, and the connection must
// not be masqueraded, as the port that the endpoint sees was chosen by the node.
//
// A bucket costs the kernel 105 to 127 bytes, so a table of 509 buckets, which up to 15
// endpoints have, 56 kB in each family: 1,000 of them 55 MB, 10,000 640 MB. With 251
// buckets 10,000 take 320 MB and are programmed in 2.5 s, 1.5 times as long as bare
// elements of the same number. An endpoint of 10 that goes from 509 buckets changes 68
// of them, an element deleted and one added each, in 0.4 ms at the most; no other
// Service is written (BenchmarkHashed). Connections are made as fast as where endpoints
// are drawn at random: in 1,000 turns at each the medians differ by 0.3 % with an error
// of 1.5 %, and by 0.4 % between two Services that draw (BenchmarkConnections).
//
// A packet can meet a transaction between two look-ups and find that what the
// first led to is gone. It is then looked at again by nat-prerouting-again or
// nat-output-again, base chains that come right behind and begin with the new
// state.
//
// The dispatch key travels in the packet's priority, from nat-prerouting or nat-output to
// the filter chains, which set it back to none. Only a connection's first packet is
// affected: if a local process gave it a priority of its own (SO_PRIORITY) that
// packet loses it. (So do those that follow before there is an answer, if the
// priority is 0x80000000 or more, as no traffic class is.) Packets that are
// forwarded get theirs from the kernel after routing in any case (IPv4), or have
// none.
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
// At cluster IPs, and at external and load-balancer IPs of other hosts, UDP sockets on
// the node get EPERM from sending and can read ECONNREFUSED next; TCP connections
// are refused at once. kube-proxy has the same. These packets leave by the output hook
// and never come to the input hook. They could be translated to their own source
// address and refused there, which was tried and works. But then connection tracking
// holds the translation, and a socket that goes on sending is refused still when the
// Service has endpoints, until its flow is deleted; stopped in the output hook, the
// flow leaves nothing behind and the next packet is forwarded. A source that is not
// allowed gets EPERM, too, as with kube-proxy.
//
// # Differences from kube-proxy's nftables mode
//
// Packets are treated the same. The table has another name, so that both can be
// installed while one takes over from the other; chains and maps are those above.
// Client affinity is kept by Service port and, under externalTrafficPolicy Local,
// apart for traffic that may use every endpoint and traffic that may use local
// ones. The time that a client is remembered for starts anew with each connection.
// When the timeout is shortened, a client that is remembered already comes
// under the new one with its next connection, and may make that within the old
// one. Hairpin connections are masqueraded for endpoints that are on this node or
// whose node is not known: others' connections do not start here.
//
// # Needs
//
// Linux 5.15 or later with nf_tables, NAT and connection tracking, and
// CAP_NET_ADMIN in the network namespace. [New] tries everything that will be used
// and says what is missing.
//
// Replacing a table in one transaction needs a socket buffer for all of it, about
// 36 bytes an endpoint and 110 a Service port; beyond net.core.wmem_max that takes
// CAP_NET_ADMIN in the initial user namespace, which a node agent has. Without,
// a large table is replaced by another one, "proxier-shadow", which is written in
// steps and then takes over; the next time it is the other way round. A Service
// that even then is too large for one step fails alone, with [ErrTooLarge].
//
// There is room for 1257 combinations of an affinity timeout, a number of buckets
// and a way to the pool in each family: two for each timeout of Services with a
// cluster IP and a NodePort and one number of endpoints. Services with affinity
// beyond that fail alone; those without always have room.
//
// # Under fire
//
// What tests do to a Backend while connections are made through it, of which none
// may fail and none that is open may break ("go test", more of it by flags):
//
//   - its process killed at random points, 40 times and 200 with -kills 200 (180,000
//     connections); out of memory, out of files, interrupted by signals all the time;
//   - a transaction of hundreds of Services refused for one element, answers of the
//     kernel lost: the next sync puts it right; the socket closed by somebody else,
//     at any moment: the next Apply or Check opens another;
//   - a thousand objects changed a second among 10,000 Services, for 3 s, and for a
//     minute with -flood 60s: 60,000 changes in 2,600 syncs, 570,000 connections,
//     no change waited for longer than 0.4 s, on two cores that others used, too.
//     With 180,000 changes (-rate 3000) the heap went from 30 MB to 35, after
//     what was not in use had been collected;
//   - 1,000 endpoints replaced one after the other.
//
// Thousands of Services made and removed leave nothing behind, here or in the
// kernel, and objects handed in again as they were write nothing. Names that are
// anything change nothing but comments. A Service may have any number of ports;
// of endpoints, 65,535 with client affinity, and more without.
//
// TestRandomWorlds makes up 50 worlds and changes each of them step by step: packets
// meet what the oracle says, and the table is what a cold start makes. With -soak 10m
// it goes on with others.
//
// The package exists on Linux only; elsewhere it is empty.
package nftables
