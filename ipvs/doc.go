// Package ipvs forwards Service traffic with IPVS, the kernel's load balancer, as
// kube-proxy's ipvs mode does.
//
// A [Backend] is a [ruleset.Backend]: attach it to a [ruleset.Engine], and it keeps virtual
// servers, a dummy device, ipsets and a fixed set of iptables rules in agreement with the
// ruleset.
//
//	b, err := ipvs.New(ctx, ipvs.Config{})
//	...
//	defer b.Close()
//	cursor := engine.Attach("ipvs", b)
//	go b.Watch(ctx, time.Hour, func(error) { cursor.Resync(); runner.Trigger() })
//
// Without [Backend.Watch] or calls of [Backend.Retire], removed endpoints keep their real
// server with weight 0, and NodePorts follow the node's addresses only at the next change
// of a Service.
//
// The objects in the kernel, a packet's way through them, and the effects of damage by
// other programs are in [DESIGN.md].
//
// # Guarantees
//
//   - The cost of a change depends on the change alone: an endpoint of a Service with a
//     cluster IP takes one netlink request, and one more if it is on this node. Changes of
//     endpoints read nothing from the kernel. The number of netfilter rules does not depend
//     on the number of Services.
//   - A Backend adds before it removes, and changes each virtual server, real server, set
//     element and address by itself. A Service with endpoints never refuses a connection
//     because of a change.
//   - Connections outlive the removal of their endpoint and of their Service, until they
//     end or [Config].DrainLimit has passed. They also outlive a restart: the next process finds
//     the real server with weight 0 and continues to drain it.
//   - A Backend leaves other programs' virtual servers alone. It recognizes its own by
//     an element in one of its sets, and those of packet marks by a signature.
//   - Other programs may set bits of packets' marks, such as network policies do: see
//     [Config].Marks.
//   - If the kernel refuses an endpoint, that endpoint alone is missing. If a set is full, a new
//     frontend is. Removed endpoints always leave.
//
// # Differences from kube-proxy's ipvs mode
//
// Besides those that package ruleset lists:
//
//   - A policy of Local without local endpoints drops connections, as in every other mode.
//     kube-proxy sends them to other nodes' endpoints.
//   - Under externalTrafficPolicy Local, the node and its pods use all endpoints.
//   - Unless a [Scheduler] is configured, Services whose endpoints have weights get
//     [WeightedRoundRobin].
//   - [SourceHash] and [Maglev] choose another endpoint while the one that they hash to
//     drains; see [tracker.Hash].
//   - UDP and SCTP endpoints drain for a second before they are removed, so that answers
//     on their way arrive, unless they are the last. Virtual servers with TCP connections outlive
//     their Service.
//   - Where a Service has no endpoints, rules refuse connections before IPVS has them, so the kernel
//     logs none of them, and sockets on the node get ECONNREFUSED instead of EPERM. It has a virtual
//     server only while TCP connections are open.
//   - ExcludeCIDRs is only needed for foreign virtual servers that share an address and
//     port with a Service.
//   - NodePorts do not answer at IPv6 link-local addresses.
//   - Under externalTrafficPolicy Local, packets of the node itself are masqueraded. kube-proxy sends
//     them from the Service's address.
//
// # Differences from the other backends
//
//   - A Service that asks for a hash gets [Maglev] with the kernel's own table, which a
//     node's earlier changes affect a little; see DESIGN.md.
//   - [RoundRobin] and [WeightedRoundRobin] choose endpoints in turn, not at random, and
//     by reduced weights (see [ruleset.Shares]).
//   - An external or load-balancer IP that is not an address of the node is bound to the
//     dummy device as a whole. It answers pings, and its ports without a Service drop
//     packets; other backends leave them to the host that may have the address.
//   - [Config].Properties can make a Service's external and load-balancer IPs forward directly or
//     through a tunnel: endpoints see the client's address under every policy, and answer the client
//     themselves.
//   - Client affinity lasts until some time after the client's last connection ended, and
//     up to a minute longer than its timeout. It is kept by address and port, and survives switching
//     it off and on. With externalTrafficPolicy Local, a hash of
//     the client's address replaces it for internal traffic.
//   - Ranges of ports are not served ([ruleset.PortRangesNone]): a virtual server has one port.
//     One for a packet mark has all ports, but each range would need a mark and either a rule or
//     an ipset element for each of its ports. IPVS prefers a mark to a virtual server with the
//     port (ip_vs_service_find of net/netfilter/ipvs/ip_vs_ctl.c), so the rules would have to
//     spare the single ports in a range. A real server cannot shift ports.
//   - While an external or load-balancer IP lets packets pass ([ruleset.TargetPass]), it is
//     not bound unless another Service port at it has endpoints. Packets of the node and its
//     pods pass, too. When the address passes, and when it is bound again, open connections to
//     it end.
//   - The address of a deleted Service stays bound while the Service has connections. New
//     connections get no answer.
//   - Under externalTrafficPolicy Local, connections from this node's pods to an external or
//     load-balancer IP end when the IP is removed from the Service.
//
// # Limits
//
// These are all limits. None of them makes a Service that has rules lose them to another.
//
//   - Config.Marks, by default 4,095 packet marks in each family: one for each Service port that
//     treats internal traffic differently (see ruleset.Frontend.Internal). For a Service port
//     beyond that, internal traffic is treated like external traffic. A Service port keeps its
//     mark while it needs one, and after a restart gets the one that it had. Free
//     marks go to older Services first.
//   - 4,194,304 elements of each ipset. When a set is full, the Services that need further elements
//     do without them: an endpoint cannot reach itself through the Service, clients of a source
//     range are dropped, internal traffic is treated like external traffic, connections that are to
//     be dropped are refused, or a new frontend is left out. A frontend that exists stays, and its
//     endpoints are followed; while it cannot be restricted to source ranges it gets no further
//     endpoint. The Services are in the [*ruleset.PartialError]. Free room goes to older Services
//     first.
//   - The affinity timeout of a virtual server, 24 days. A longer one is shortened (see
//     [Backend.Limits]).
//   - The schedulers in Config.Schedulers that the kernel has. A Service for which Config.Properties
//     returns another is balanced as the other Services (see [Backend.Limits]).
//   - A change of a virtual server or of an endpoint that the kernel refuses, for want of memory
//     for example, fails alone. It is tried again with the next delta. Removed endpoints leave
//     even so, if the virtual server has another one that serves.
//
// # Requirements
//
// The package needs Linux 4.18 or later with IPVS, ipset, connection tracking and the
// modules of the schedulers in use, and iptables with either implementation. Without nf_tables,
// other programs must not alter packet marks in the table filter. It needs
// CAP_NET_ADMIN in the initial user namespace; CAP_NET_RAW, because the iptables tools look
// up sets by a raw socket; and CAP_SYS_ADMIN if [Config].NetNS is set, but not
// CAP_SYS_MODULE. The kernel parameters in [SetSysctls] must be writable or set. IPv6 must
// not be disabled, or [Config].Families must not have it. [New] and [Probe] return a
// [*dataplane.UnsupportedError] that names what is missing. On other systems than Linux the
// package compiles, and its functions return that error.
//
// [DESIGN.md]: https://github.com/go-proxier/proxier/blob/main/ipvs/DESIGN.md
package ipvs
