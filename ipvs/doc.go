// Package ipvs forwards Service traffic with IPVS, the kernel's load balancer. A
// [Backend] is a ruleset.Backend: attach it to a ruleset.Engine and it keeps virtual
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
// # What it promises
//
//   - The cost is proportional to the change: an endpoint of a Service with a cluster IP
//     is one netlink request, and one more if it is on this node. Only full deltas,
//     [Backend.Check] and [Lookup] read from the kernel. The number of netfilter rules
//     does not depend on the number of Services.
//   - A Backend adds before it removes, and changes each virtual server, real server, set
//     element and address by itself. A Service with endpoints never refuses a connection
//     because of a change.
//   - Connections outlive the removal of their endpoint and of their Service, until they
//     end or [Drain].Limit has passed. They also outlive a restart: the next process finds
//     the real server with weight 0, and it goes on draining.
//   - A Backend leaves other programs' virtual servers alone. It recognises its own by
//     their mark or by an element in one of its sets.
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
// These are IPVS's own:
//
//   - A Service that asks for a hash gets [Maglev], with a table of the kernel's making
//     (net/netfilter/ipvs/ip_vs_mh.c). Nodes that were started with the same endpoints
//     choose alike. What a node has been through before changes the order of the
//     servers in the kernel, and with it one or two flows in a hundred. A server that
//     drains keeps its place in the table, and its flows go to other servers. When it
//     has drained, the kernel rebuilds the table, and most of these flows move once
//     more, as do up to two in a hundred of the other flows. IPVS accepts packets of
//     unknown TCP connections only with net.ipv4.vs.sloppy_tcp. Where the kernel has
//     no Maglev the scheduler is [SourceHash], by which a change moves most flows.
//   - Weights are reduced to small numbers (see ruleset.Shares): the kernel gives a
//     server many connections in a row while its weight is ahead of the others'.
//   - An external or load-balancer IP that is no address of the node is bound to
//     kube-ipvs0 in all, so its ports that are no Service's get no answer; other
//     backends leave them to the host that may have the address. It answers pings.
//   - A client is remembered (sessionAffinity) as long as it has connections that IPVS
//     knows of, which is some time beyond their end, and after that for up to a minute
//     longer than its timeout.
//   - With externalTrafficPolicy Local and sessionAffinity together, a table of the same
//     kind keeps internal connections with an endpoint, since IPVS does not
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
// kernel itself loads the modules ip_vs, ip_vs_rr and so on if they are installed. [New]
// and [Probe] return a [*ruleset.UnsupportedError] that names what is missing.
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
//   - its sockets closed by another part of the process: the next delta returns an error
//     that wraps [os.ErrClosed], and a new Backend takes over without interrupting
//     connections. Lost events about addresses, continuous signals and a lack of file
//     descriptors do not make anything fail;
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
// A list of virtual servers that is longer than one message may lack some, without an
// error, if virtual servers of any network namespace are added or deleted while it is
// read. The Backend reads it until two results in a row are equal; ipvsadm does not.
//
// On other systems than Linux the package compiles, and its functions return a
// [*ruleset.UnsupportedError].
//
// [ruleset.Node]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Node
package ipvs
