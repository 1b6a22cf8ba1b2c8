// Package ipvs forwards Service traffic with IPVS, the kernel's load balancer. A
// [Backend] is a ruleset.Backend: attach it to a ruleset.Engine and it keeps virtual
// servers, a dummy device, ipsets and a fixed set of iptables rules in agreement with
// the ruleset, as operators know them from kube-proxy's ipvs mode.
//
//	b, err := ipvs.New(ipvs.Config{})
//	...
//	defer b.Close()
//	cursor := engine.Attach("ipvs", b)
//	go b.Watch(ctx, time.Hour, func(error) { cursor.Resync(); runner.Trigger() })
//
// Without [Backend.Watch], or calls of [Backend.Tend] in its place, endpoints that
// were removed keep their real server with weight 0, and NodePorts do not follow the
// node's addresses before the next change of a Service.
//
// # What it promises
//
//   - A change costs what changed: an endpoint of a Service with a cluster IP is one
//     netlink request, and one more if it is on this node. Nothing is read back but
//     at the start, in a full delta, and by Backend.Check. The netfilter rules are as
//     many with no Service as with all.
//   - What is new is brought in before what is gone is taken away, each virtual
//     server, real server, set element and address by itself, so that a Service that
//     has endpoints never refuses a connection because of a change.
//   - Connections outlive their endpoint's removal, and their Service's, until they
//     end or [Drain].Limit has passed. So they do a restart: a real server with weight 0
//     is found and goes on draining.
//   - Nothing of others' is touched: a virtual server is the backend's if an element in
//     one of its sets, or the mark, says so.
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
// and three more that kube-proxy does not need, because it does not do what they are
// for:
//
//	KUBE-NO-LOCAL-ENDPOINTS    frontends that drop, as only other nodes have endpoints
//	KUBE-SHORT-CIRCUIT         frontends under externalTrafficPolicy Local, with a mark
//	KUBE-IPVS-EXTERNAL-IPS     addresses on kube-ipvs0 that are not cluster IPs
//
// IPVS has one virtual server for an address and port, but under
// externalTrafficPolicy Local pods of this node and the node itself may use every
// endpoint and others only local ones. What comes from near gets the mark, which names
// a second virtual server ("FWM" in ipvsadm's list), on its way to IPVS and loses it
// behind. IPVS wants the mark to be the whole of a packet's; 0x3001 to 0x3fff are used
// for that unless [Config].Marks says otherwise, in the first packet of such a
// connection alone. Should somebody else set a mark in between, it is treated as if
// from outside.
//
// A packet to an address that is missing on kube-ipvs0, as somebody has deleted it or
// the device, is dropped (KUBE-IPVS-ASTRAY). It would be routed elsewhere, and of a
// masqueraded connection that would be the end: the kernel does not track one any more
// that leaves by another device than before.
//
// The rules are iptables', as the sets can only be matched there, and are written by
// iptables-restore when the backend starts and when [ruleset.Node] changes. Chains
// that kube-proxy's iptables mode has as well go by another name: KUBE-IPVS-SERVICES,
// -MARK-MASQ, -POSTROUTING and -FORWARD. A backend of another kind may be put in
// place before [Cleanup] removes this one, and the other way round.
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
//   - Virtual servers of others need no ExcludeCIDRs unless they use a Service's address
//     and port.
//   - NodePorts do not answer at IPv6 link-local addresses.
//
// # Differences from the other backends
//
// These are IPVS's own:
//
//   - A Service that asks for a hash gets [Maglev], with a table of the kernel's making
//     (net/netfilter/ipvs/ip_vs_mh.c). Nodes that were started with the same endpoints
//     choose alike. What a node has been through before changes the order of the
//     servers in the kernel, and with it one or two flows in a hundred. A server that
//     drains keeps its place in the table, and what would be sent to it goes elsewhere;
//     when it has drained the table is made anew, and most of that moves once more, as
//     do up to two in a hundred of the other flows. Packets of TCP connections that it
//     does not know it takes up only with net.ipv4.vs.sloppy_tcp. Where the kernel has
//     no Maglev the scheduler is [SourceHash], by which a change moves most flows.
//   - Weights are reduced to small numbers (see ruleset.Shares): the kernel gives a
//     server many connections in a row while its weight is ahead of the others'.
//   - An external or load-balancer IP that is no address of the node is bound to
//     kube-ipvs0 in all, so its ports that are no Service's get no answer; other
//     backends leave them to the host that may have the address. It answers pings.
//   - A client is remembered (sessionAffinity) as long as it has connections that IPVS
//     knows of, which is some time beyond their end, and after that for up to a minute
//     longer than its timeout.
//   - With externalTrafficPolicy Local and sessionAffinity together, connections from
//     near are kept with an endpoint by the same sort of table, since IPVS does not
//     translate ports for clients that it remembers by a mark (ip_vs_sched_persist).
//     A client moves when its endpoint goes, often once more when that has drained, and
//     one or two in a hundred move because of other endpoints.
//   - While connections of a Service that was deleted last, its address is still bound:
//     new ones get no answer, whether the address is in a Service CIDR or not.
//   - The choice among endpoints is in turn, not at random.
//   - Where a Service has no endpoints, a UDP socket on the node gets EPERM from sending,
//     at NodePorts too, and can read ECONNREFUSED next: IPVS refuses the node's own
//     packets in the output hook.
//
// # What it costs
//
// Measured in the virtual machine in which the tests run, beside bare netlink requests
// that make the same virtual and real servers, in the same run (BenchmarkKernel). With
// 1,000 and 10,000 Services of 10 endpoints each, a cold start takes 3.9 and 3.6 times
// as long, with the sets, the addresses and the rules. One endpoint changed is one
// request, and takes 6.4 and 9.0 times as long as that alone, of which what is above
// the backend has 1.0 and 1.8. Connections take 0.94 times as long as to the endpoint's
// own address with 10 Services, and 1.19 times with 10,000; runs differ by a quarter.
//
// # Needs
//
// Linux 4.18 or later with IPVS, ipset and connection tracking; iptables with its
// legacy or nf_tables kernel side; the scheduler's module, whichever is configured;
// CAP_NET_ADMIN in the initial user namespace, and
// CAP_NET_RAW, as the iptables tools look up sets by a raw socket (and CAP_SYS_ADMIN to
// enter the namespace of [Config].NetNS, if set). CAP_SYS_MODULE is not needed: the
// kernel loads the modules ip_vs, ip_vs_rr and so on by itself where they are
// installed. [New] and [Probe] say what is missing.
//
// A full delta writes the kernel parameters that [Sysctls] lists, those only that have
// another value. Where /proc/sys is read-only, as in a container, [SetSysctls] in a
// privileged process has to come first. The backend never writes
// net.ipv6.conf.all.forwarding, which IPv6 Services need: see Sysctls.
//
// IPv6 is not to be had where net.ipv6.conf.all.disable_ipv6 is 1 or the kernel was
// booted with ipv6.disable=1, as the Services' addresses cannot be bound: New then
// refuses the family, which is to be left out of [Config].Families. If IPv6 is disabled
// later, the kernel removes the addresses, and IPv6 Services fail, each by name in a
// [*ruleset.PartialError]; IPv4 Services are served on.
//
// github.com/moby/ipvs, by which IPVS is reached, runs "modprobe ip_vs" once in a
// process, and writes a line to standard error if there is no such program, which has
// no consequence.
//
// # Under fire
//
// What TestUnderFire does in a virtual machine to a Backend through which connections
// are made, of which none may fail and none that is open may break unless it is said
// otherwise ("go test", more of it by flags):
//
//   - its process killed with SIGKILL at random points of its work, 5 times, or as often
//     as -kills says (-run TestUnderFire/killed/killed -kills 200, in 17 minutes: 86,298
//     connections, none failed). The next process finds everything and writes nothing;
//   - virtual servers, real servers, sets, addresses, the device and the iptables rules
//     altered or deleted by others. What depends on them does not serve new connections
//     until the next full delta; [Backend.Check] says what is missing. Open connections
//     live, those on which there is traffic meanwhile too, but for two kinds. Those to a
//     virtual or real server that was deleted ("ipvsadm -C") the kernel ends at once, since
//     Linux 5.9. Masqueraded ones with traffic while nobody has a chain of nat break: the
//     kernel then translates no addresses, and the endpoint, which is sent a packet from
//     the client's own, resets the connection. Deleting rules ("iptables -t nat -F") does
//     not come to that, "-X" of iptables-nft does, which deletes the tables' own chains,
//     too. The kernel does not let go of a set that the rules use. Virtual servers, rules,
//     sets and devices of others stay as they are;
//   - an endpoint among those of 30 Services that the kernel refuses, and a set without
//     room: only that endpoint is missing, or that one Service;
//   - its sockets closed by a mistake elsewhere in the process, before a delta and in the
//     middle of one, or another file put in their place: they are opened anew, nothing
//     fails, and nothing is written to the other file, nor is it closed. News of addresses
//     lost, signals all the time, no file descriptor to spare: nothing fails either;
//   - UDP endpoints that come and go while requests are made: none is lost whose answer
//     is sent while its endpoint lingers, a second at least after it was removed. A later
//     answer is lost, as it comes from an address that the client does not know, and the
//     client's next request from the same port goes to another endpoint;
//   - addresses of the node that go and come back, kernel parameters that cannot be
//     written, a table of connection tracking that is full (new connections get no
//     answer, open ones live, and syncs go on), lists read while others change them;
//   - changes of 200 objects a second of 40 Services for 2 s, a rolling restart, and
//     objects handed in again as they were, which costs no request. With -run
//     TestUnderFire/UDP/flood -flood 60s -rate 1000 -services 200 there were 31,616 changes
//     in a minute, for which a busy emulated machine made 4 syncs; of 5,854 connections
//     none failed, and the heap was at 1.7 MB after 1.1 MB.
//
// Services made and removed leave nothing behind, here or in the kernel (32 of them; two
// thousand, and forty processes, with -run TestUnderFire/leaks -thorough, in two
// minutes). Names get nowhere: neither virtual servers nor sets have any. Of 150
// connections by [Maglev] each of 6 endpoints had its share (chi-square 2.5, with 35.9
// allowed), and [RoundRobin] is exact.
//
// A list of virtual servers that is longer than one message may lack some, without a
// word from the kernel, if others of any network namespace come or go while it is read.
// The Backend reads it until it is the same twice; ipvsadm does not.
//
// The package exists on Linux only; elsewhere it is empty.
//
// [ruleset.Node]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Node
package ipvs
