// Package ipvs forwards Service traffic with IPVS, the kernel's load balancer. A
// [Backend] is a ruleset.Backend: attach it to a ruleset.Engine, and it keeps virtual
// servers, a dummy device, ipsets and a fixed set of iptables rules in agreement with
// the ruleset, as operators know them from kube-proxy's ipvs mode.
//
//	b, err := ipvs.New(ctx, ipvs.Config{})
//	...
//	defer b.Close()
//	cursor := engine.Attach("ipvs", b)
//	go b.Watch(ctx, time.Hour, func(error) { cursor.Resync(); runner.Trigger() })
//
// Without [Backend.Watch] or calls of [Backend.Tend], removed endpoints keep their real
// server with weight 0, and NodePorts follow the node's addresses only at the next change
// of a Service.
//
// # Guarantees
//
//   - The cost is proportional to the change: an endpoint of a Service with a cluster IP
//     takes one netlink request, and one more if it is on this node. Only full deltas,
//     [Backend.Check] and [Lookup] read from the kernel. The number of netfilter rules
//     does not depend on the number of Services.
//   - A Backend adds before it removes, and changes each virtual server, real server, set
//     element and address by itself. A Service with endpoints never refuses a connection
//     because of a change.
//   - Connections outlive the removal of their endpoint and of their Service, until they
//     end or [Drain].Limit has passed. They also outlive a restart: the next process finds
//     the real server with weight 0 and continues to drain it.
//   - A Backend leaves other programs' virtual servers alone. It recognises its own by
//     their mark or by an element in one of its sets.
//   - If the kernel refuses an endpoint or a set has no room, only that endpoint or that
//     Service is missing.
//
// # What is in the kernel
//
// "ipvsadm -Ln" shows a virtual server for each frontend: cluster IPs, external IPs
// and load-balancer IPs with the Service's port, and each of the node's addresses with
// the NodePort. Addresses that are not the node's own are bound to kube-ipvs0. The
// sets have kube-proxy's names, types and contents, KUBE-6-… for IPv6:
//
//	KUBE-CLUSTER-IP, KUBE-EXTERNAL-IP[-LOCAL], KUBE-LOAD-BALANCER[-LOCAL],
//	KUBE-NODE-PORT[-LOCAL]-…   by which the source address is replaced
//	KUBE-LOOP-BACK             endpoints that reach themselves (hairpin)
//	KUBE-LOAD-BALANCER-FW, -SOURCE-IP, -SOURCE-CIDR
//	                           loadBalancerSourceRanges
//	KUBE-HEALTH-CHECK-NODE-PORT, KUBE-IPVS-IPS
//
// and three more for what kube-proxy does not do:
//
//	KUBE-NO-LOCAL-ENDPOINTS    frontends that drop because only other nodes have endpoints
//	KUBE-SHORT-CIRCUIT         frontends under externalTrafficPolicy Local, with a mark
//	KUBE-IPVS-EXTERNAL-IPS     addresses on kube-ipvs0 that are not cluster IPs
//
// IPVS has one virtual server for an address and port. Under externalTrafficPolicy Local,
// however, internal traffic (from this node and its pods) may use every endpoint, and
// external traffic only local ones. Rules therefore set a mark on internal traffic before
// it reaches IPVS, which selects a second virtual server ("FWM" in ipvsadm's list), and
// clear it afterwards. IPVS compares the whole mark of a packet. The marks are 0x3001 to
// 0x3fff unless [Config].Marks has others, and only the first packet of a connection gets
// one. If another program sets a mark in between, the connection counts as external.
//
// A packet to an address that another program deleted from kube-ipvs0 is dropped
// (KUBE-IPVS-ASTRAY). Otherwise it would be routed elsewhere, and the kernel stops
// tracking a masqueraded connection that leaves by another device than before.
//
// The rules are iptables rules because only iptables matches ipsets. iptables-restore
// writes them in full deltas and when [ruleset.Node] changes. Chains that kube-proxy's
// iptables mode has, too, have other names here: KUBE-IPVS-SERVICES, -MARK-MASQ,
// -POSTROUTING and -FORWARD. A backend of another kind can therefore take over before
// [Cleanup] removes this one, and the other way round.
//
// # Differences from kube-proxy's ipvs mode
//
// Besides those that package ruleset lists:
//
//   - A policy of Local without local endpoints drops connections, as in every other
//     mode. kube-proxy sends them to other nodes' endpoints.
//   - externalTrafficPolicy Local short-circuits for the node and its pods.
//   - Unless a [Scheduler] is configured, Services whose endpoints have weights get
//     [WeightedRoundRobin].
//   - The schedulers [SourceHash] and [Maglev] choose another endpoint while the one
//     that they hash to drains; see [Hash]. Both hash what kube-proxy has them hash.
//   - A second passes before UDP and SCTP endpoints are removed, in which they get no
//     new flows: an answer on its way would be lost with them. Virtual servers with TCP
//     connections outlive their Service.
//   - ExcludeCIDRs is only needed for foreign virtual servers that share an address and
//     port with a Service.
//   - NodePorts do not answer at IPv6 link-local addresses.
//
// # Differences from the other backends
//
//   - A Service that asks for a hash gets [Maglev], with a table that the kernel computes
//     (net/netfilter/ipvs/ip_vs_mh.c). Nodes that started with the same endpoints choose
//     alike. Earlier changes on a node affect the order of the servers in the kernel, and
//     with it one or two flows in a hundred. A draining server keeps its place in the
//     table, and its flows go to other servers. When it has drained, the kernel rebuilds
//     the table: most of these flows move again, and up to two in a hundred of the others.
//     IPVS accepts packets of unknown TCP connections only with net.ipv4.vs.sloppy_tcp. A
//     kernel without Maglev uses [SourceHash], where a change moves most flows.
//   - Weights are reduced to small numbers (see ruleset.Shares), because the kernel gives a
//     server many connections in a row while its weight exceeds the others'.
//   - An external or load-balancer IP that is not an address of the node is bound to
//     kube-ipvs0 as a whole. It answers pings, and ports without a Service do not answer;
//     other backends leave them to the host that may have the address.
//   - Session affinity lasts as long as IPVS remembers a connection of the client, which is
//     some time after the connection ended, and then up to a minute longer than its
//     timeout.
//   - With externalTrafficPolicy Local and sessionAffinity together, a hash keeps internal
//     connections with an endpoint, because IPVS does not translate ports for clients that
//     it remembers by a mark (ip_vs_sched_persist). A client moves when its endpoint goes,
//     often again when that endpoint has drained, and one or two clients in a hundred move
//     because of other endpoints.
//   - The address of a deleted Service stays bound while the Service has connections. New
//     connections get no answer, whether the address is in a Service CIDR or not.
//   - [RoundRobin] and [WeightedRoundRobin] choose endpoints in turn, not at random.
//   - Where a Service has no endpoints, a UDP socket on the node gets EPERM from sending,
//     at NodePorts too, and can read ECONNREFUSED next: IPVS refuses the node's own
//     packets in the output hook.
//
// # Requirements
//
// The package needs Linux 4.18 or later with IPVS, ipset, connection tracking and the
// modules of the schedulers in use, and iptables with either implementation. It needs
// CAP_NET_ADMIN in the initial user namespace; CAP_NET_RAW, because the iptables tools
// look up sets by a raw socket; and CAP_SYS_ADMIN if [Config].NetNS is set. It does not
// need CAP_SYS_MODULE: the kernel loads the modules. [New] and [Probe] return a
// [*ruleset.UnsupportedError] that names what is missing. On other systems than Linux the
// package compiles, and its functions return that error.
//
// A full delta sets the kernel parameters that [SetSysctls] lists, if their values
// differ. If /proc/sys is read-only, as in a container, a privileged process has to call
// SetSysctls first. The backend never writes net.ipv6.conf.all.forwarding, which IPv6
// Services need: see SetSysctls.
//
// IPv6 cannot be served if net.ipv6.conf.all.disable_ipv6 is 1 or the kernel was booted
// with ipv6.disable=1, because Services' addresses cannot be bound. New then rejects the
// family, and [Config].Families must not have it. If IPv6 is disabled later, the kernel
// removes the addresses, and each IPv6 Service is in the [*ruleset.PartialError] of the
// next delta; IPv4 Services are not affected.
//
// The package uses github.com/moby/ipvs, which runs "modprobe ip_vs" once in a process
// and writes a line to standard error if that fails. The failure has no consequence.
//
// # Damage by other programs
//
// [Backend.Check] notices virtual servers, real servers, sets, addresses, devices and
// rules that another program altered or deleted, and the next full delta repairs them.
// Open connections survive, with two exceptions. Since Linux 5.9 the kernel ends the
// connections of a deleted virtual or real server ("ipvsadm -C"). Masqueraded connections
// with traffic break while the kernel has no chain of table nat, as after "-X" of
// iptables-nft: the endpoint then gets a packet from the client's own address and resets
// the connection.
//
// A list of virtual servers that is longer than one message may lack some, without an
// error, if virtual servers of any network namespace are added or deleted while it is
// read. The Backend reads it until two results in a row are equal; ipvsadm does not.
//
// [ruleset.Node]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Node
package ipvs
