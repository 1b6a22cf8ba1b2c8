// The Go runtime reads the CPU limit of its cgroup at the start. By default it would also wake up
// each second to read the limit again (runtime.SetDefaultGOMAXPROCS).

//go:debug updatemaxprocs=0

// Nodeproxy is a complete Service proxy for one node. It replaces kube-proxy and shows how
// the library's packages fit together. It reads Services and EndpointSlices from an API
// server or from files.
//
//	nodeproxy run [flags]             program the network namespace it runs in
//	nodeproxy run --cleanup           remove what run left there
//	nodeproxy run --init-only         set the kernel parameters that run needs
//	nodeproxy explain [flags] 10.0.0.10:80
//	                                  print what must happen to a packet, why, and
//	                                  whether the kernel agrees
//	nodeproxy trace [flags] 10.0.0.10:80
//	                                  follow real connections through the kernel
//	nodeproxy top [flags]             show the traffic of each Service
//	nodeproxy demo                    show all of this with real packets, without privileges
//	nodeproxy demo --socket-lb        the same with --socket-lb of run, as root
//	nodeproxy completion SHELL        print completions for bash, zsh, fish or powershell
//	nodeproxy man DIR                 write manual pages
//
// "nodeproxy run --help" lists the flags in groups: nodeproxy's own, kube-proxy's, and those of
// logging. --config reads kube-proxy's configuration file. Options of kube-proxy that nodeproxy
// does not support are rejected by name. Run exits when the configuration in its file changes; its
// supervisor restarts it. If the changed file is invalid, run logs an error, sets the metric
// proxier_configuration_file_invalid to 1, and goes on with the previous content.
//
// # Requirements
//
// Run needs Windows (below), or Linux 5.10 or later and, except in mode userspace,
// CAP_NET_ADMIN. Mode iptables with iptables-legacy also needs CAP_NET_RAW. Run loads the kernel
// modules of its mode and then, before it serves, gives up all capabilities except these two,
// CAP_NET_BIND_SERVICE, CAP_DAC_READ_SEARCH and the capabilities of --socket-lb.
//
// "nodeproxy run --init-only" does everything that needs a writable /proc/sys in the
// configured mode. It sets the parameters of connection tracking, in mode ipvs also the
// parameters of [github.com/go-proxier/proxier/ipvs.SetSysctls], and in mode iptables
// route_localnet if NodePorts answer at loopback addresses, after the rules that guard
// these. In the other modes it sets route_localnet back to 0 if mode iptables has set it. A
// page lists [all parameters]. Afterwards run works with the
// same flags and configuration file where /proc/sys is read-only: it does not write a
// parameter that already has its value. No mode writes net.ipv6.conf.all.forwarding; run
// warns if it is 0 and IPv6 is served.
//
// IPv6 is not served if net.ipv6.conf.all.disable_ipv6 is 1, whatever the settings of the
// interfaces are, or if the kernel has no IPv6. Run checks this once, when it starts. If
// IPv6 is turned on later, run must be restarted to serve it. If IPv6 is turned off later,
// its rules have no effect and IPv4 is served as before. Mode ipvs then reports every IPv6
// Service as failed, and retries it, until run is restarted.
//
// # Output
//
// With --manifests, run writes a line to standard output for each change of the manifests
// that is in effect, even if the kernel needed no change. With an API server, it writes a
// line for the first sync that had something to do, and then at most one a minute, for all
// syncs since the last line (--log-every-sync: one for each):
//
//	synced services=2 endpoints=5 changed=1 took=412.3µs waited=1.2ms
//
// "nodeproxy run --help" explains the fields. With --logging-format=json the line is an entry
// of the log with the same fields, so that every line is JSON. Run logs everything else to
// standard error, as kube-proxy's logging flags select. It logs errors, warnings and infos at any verbosity,
// and debugging messages at -v=4.
//
// /healthz answers 503 until the first sync has succeeded, since load balancers ask it (KEP-3458);
// kube-proxy's answers 200 before that. With an API server, it also answers 503 until the agent has
// received the Node object of its own name, and again after that object is deleted. /livez and the
// rules do not depend on the Node. With --manifests no Node is needed: without one, the node counts as
// eligible for load-balancer traffic.
//
// # What is left out
//
// "nodeproxy explain ADDR:PORT" names what the agent leaves out of the Service that has the address, or
// would have it, and of its EndpointSlices, with the reason, such as ProxyOtherProxy for the label
// service.kubernetes.io/service-proxy-name. "explain --all" does so for all Services that cannot work.
// The log, Events and the metric proxier_left_out_total have the same reasons. The documentation of
// tracker.Reason lists them with the fields that they come from. Headless Services, those of another
// proxy, and load-balancer IPs with ipMode Proxy are left out on purpose: only explain and the metric
// show them.
//
// With --manifests no API server checks or completes the objects. The log and explain name each object,
// by file and line, that an API server would refuse or in which it would set a field: a Service without
// clusterIP or with the type "nodePort", a protocol in lower case, an EndpointSlice without addressType.
// The agent uses what it can of such an object. A Service without clusterIP is not served.
//
// # Under kube-proxy's name
//
// A program that is called as kube-proxy, as by a link with this name, takes kube-proxy's
// place with the same command line. It runs without a verb, and --adopt-from-kube-proxy is on
// by default. The image of the folder deploy has such a link, so that "kubectl set image"
// replaces kube-proxy in kubeadm's DaemonSet.
//
// # Annotations
//
// --budget bounds Services: port=20000 is the number of endpoints of a port in one address family,
// service=500000 that of endpoints and frontends of all ports of a Service, namespace=1250000 and
// total=5000000 those of elements in the rules for a namespace and for all, slots=4093 and
// slots-per-endpoint=256 the sizes of hash tables, and delta=1000 that of one change of the rules.
// If only total is given, the bound of a namespace is a quarter of it. Beyond a bound a Service is
// served in part, with an Event, and "explain" names the parts that are left out.
//
// Annotations configure what the API has no fields for. They are in force only if
// --allow-annotations names them, because anyone who may write a Service or an
// EndpointSlice can use them:
//
//	go-proxier.github.io/balance        on a Service: "source" or "source-port" chooses
//	                                    endpoints by a hash of the client's address, or
//	                                    of its address and port, equally on all nodes;
//	                                    "random" is the default
//	go-proxier.github.io/balance-slots  on a Service: the least number of slots in the
//	                                    hash table, which keeps its size stable while
//	                                    the number of endpoints varies much
//	go-proxier.github.io/prefer-local   on a Service: "true" makes traffic to NodePorts, external
//	                                    and load-balancer IPs use the node's own endpoints while
//	                                    it has any. The policy stays Cluster: the source is
//	                                    replaced, and there is no health check (KEP-3015 leaves
//	                                    external traffic out)
//	go-proxier.github.io/pass-without-endpoints
//	                                    on a Service: "true" makes packets to external and
//	                                    load-balancer IPs pass while the node has no endpoint for
//	                                    them; see below
//	go-proxier.github.io/port-ranges    on a Service: "rtp=10000-20000" makes its port rtp a
//	                                    range; see below
//	go-proxier.github.io/weight         on an EndpointSlice: the weight of its endpoints,
//	                                    1 by default; 0 means no new connections
//	go-proxier.github.io/weights        on an EndpointSlice: the weights of some of its
//	                                    endpoints, "10.244.1.7=3,10.244.2.4=0"
//	service.cilium.io/weight            on an EndpointSlice: the weight of its endpoints, as
//	                                    Cilium reads it (cilium/cilium#46061). Where it is
//	                                    allowed, an endpoint without a weight has 100. The
//	                                    two above override it
//
// The API has no weights: the types of k8s.io/api v0.37 lack the field that KEP-6315 proposes.
//
// With pass-without-endpoints, a packet to an external or load-balancer IP for which this node
// has no endpoint, or under externalTrafficPolicy Local none on this node, is neither translated
// nor answered. It is routed on, so that several nodes or clusters can announce one address by
// BGP and a connection finds one that has an endpoint (kubernetes/kubernetes#59869). The node
// needs a route for the address that leads to another node; if two nodes without endpoints send
// a packet to each other, it goes round until its hop limit ends it. NodePorts and cluster IPs
// never pass.
//
//   - An open connection that a node has translated keeps its endpoint until one of them ends,
//     even if the address passes by now. If the router turns to another node, that node sends
//     the connection to an endpoint of its own, which resets it, unless the packet passes there.
//   - A connection that has passed a node goes on passing when the node gets an endpoint. UDP
//     packets go to the endpoint immediately.
//   - Mode ipvs: the node has the address only while it serves it, so open connections end when
//     the address begins to pass, and those that have passed when the node gets an endpoint.
//     Under externalTrafficPolicy Local, the node and its pods pass as well while it has none;
//     the other modes send them to endpoints of other nodes. An address passes when no Service
//     port at it has an endpoint.
//   - Mode iptables: if answers return by another way than through this node, set
//     conntrack.tcpBeLiberal. Otherwise the rules drop the packets of connections of which the
//     node sees one direction, as kube-proxy's do.
//   - Modes userspace and kernelspace, and --socket-lb: passing means that the address is not
//     bound, has no load balancer, or is not translated at the socket.
//
// With port-ranges, a port of a Service is a range of ports or all ports of its protocol, at the
// cluster IP and the load-balancer IPs. The API has no field for it (kubernetes/kubernetes#23864,
// open since 2016, and KEP-2610). The value has an item for each such port, separated by commas:
//
//	rtp=10000-20000          the port named rtp; endpoints see the port that the client used
//	rtp=10000-20000:30000    the same, but endpoints see 30000 for 10000, 30001 for 10001, ...
//	game=all                 the ports 1 to 65535
//	30000-30100              a port without a name
//
// There are at most eight items. The range must contain the port itself, and endpoints must listen
// at its ports: the target port of the Service does not matter for it. Where a mode has no ranges,
// the port is served alone, to its target port, with a log line and an Event.
//
//   - Modes nftables and iptables have ranges. Mode nftables does not count their connections without
//     --nftables-count-packets, and does not send them through the fast path. It cannot shift some
//     long ranges downwards, for example 2-65535 to 1: such a Service fails.
//   - Modes ipvs, userspace and kernelspace have none: a virtual server, a socket or a load balancer
//     has one port. --socket-lb has none either and leaves them to the rules of the mode, with an
//     Event.
//   - A single port of any Service at the same address wins over a range, unless it is that of an
//     external IP. Of ranges that overlap at one address, the older Service's wins, and the other
//     one gets nothing at this address, not even its own port; an Event names the winner.
//   - NodePorts and health-check node ports stay single ports. A Service with external IPs gets no
//     range: its author may write any address there, and with that of a node would take over the
//     node's servers. Do not allow the annotation where a controller gives Services the addresses
//     of nodes as load-balancer IPs, as k3s's ServiceLB does: a range there takes the packets to
//     every server of the node, such as sshd and kubelet.
//   - Each connection chooses an endpoint, unless the Service has client affinity. Affinity is
//     kept for each Service port: all ports of a range share it, but a client may reach
//     different pods through two Service ports, such as FTP's control port and a range for its
//     data, or SIP over TCP and RTP. Use one range for both ports (21-30100) if they have one
//     protocol. Or set balance to "source", in mode nftables, and give both ports the same
//     targetPort: a client then reaches the same pod through both while the endpoints stay.
//   - Servers of FTP and SIP write addresses and ports into their messages: configure them with the
//     Service's address, and do not shift the range.
//
// Mode iptables ignores balance. An annotation that is not allowed or cannot be parsed
// is ignored, and a log line and an Event name it.
//
// # Connections to endpoints that vanished
//
// When a node fails, or a pod is deleted by force, nothing closes the connections of
// clients. They hang until the client's kernel gives up, after 15 minutes
// (kubernetes/kubernetes#46753, #98700, #104098). With
// --reset-connections-of-vanished-endpoints=10s, in modes nftables and iptables, the node answers
// the next packet of such a client by RST, 10 s after the endpoint is gone, and destroys the sockets
// of the node's own processes, which then need not send. An endpoint that terminates and serves
// keeps its connections to the end, as does one that returns, or that another Service has. See
// [github.com/go-proxier/proxier/conntrack/reset] for how it works and what it does not notice.
//
//   - An endpoint of a failed node is gone when its Pod object is. Kubernetes keeps it in its
//     EndpointSlice, as not ready and later as terminating, until the Pod is deleted by force, its
//     node gets the taint node.kubernetes.io/out-of-service, or the Node object is deleted. Until
//     then the connections hang.
//   - Do not use it where operators take a pod out of its Service by a change of its labels and
//     expect its connections to live on.
//   - Connections through --socket-lb have no translation that could be recognized, and connections
//     on the fast path of --nftables-offload hang until they leave it.
//   - The table proxier-reset of nf_tables keeps ending connections for 20 minutes, even if the agent
//     is restarted. A run without the flag, and run --cleanup, remove it.
//   - proxier_vanished_endpoints_total counts the endpoints. At most 65,536 addresses of Services with an
//     endpoint that is gone are treated at a time. proxier_vanished_endpoints_limited_total counts those
//     beyond, whose connections hang.
//
// # Pods that start before Services work
//
// Nothing in Kubernetes keeps pods from a new node until its proxy has written the rules: their first
// connections to Services fail (kubernetes/kubernetes#75890, gardener/gardener#10407). With
// --remove-startup-taint=KEY, nodes register with a taint of that key, and the agent removes it from
// its Node when the first full sync is in the kernel, which is when /readyz begins to answer 200. It
// removes the taint again from a Node that was deleted and registers again. It tries until the API
// server has accepted the change, with pauses of 1 s to 2 min. An Event of the node tells that the
// taint is gone, or that the agent lacks the right.
//
// The right is to patch nodes. The component startup-taint in the folder deploy has it, with a policy
// by which the agent may remove taints of its own Node and change nothing else, and the kubelet's
// flag.
//
// # Packets and bytes
//
// The rules of mode nftables see the first packet of each connection only, so they count connections.
// With --nftables-count-packets, a table of its own, proxier-packets, counts the packets and bytes of
// each Service, in both directions, for top and --service-traffic-metrics. Each packet of a connection to a
// Service then costs a look-up, and each other packet one test: BenchmarkPacketCounters of
// [github.com/go-proxier/proxier/nftables] measures it. Packets count as the kernel forwards them: it may
// have merged several. Not counted are packets on the fast path of --nftables-offload, and connections
// that --socket-lb translates or that the agent's process forwards. A run without the flag, and
// run --cleanup, remove the table. Mode ipvs counts packets and bytes without a flag, and the
// other modes do not count them.
//
// # NodePorts at loopback addresses
//
// A packet from a loopback address cannot leave the node, so the rules of modes nftables and
// ipvs do not serve NodePorts there, and those of mode iptables only in IPv4. If
// nodePortAddresses has the keyword localhost, or a CIDR in the loopback range, the agent's
// process serves them instead: it listens at 127.0.0.1 and ::1, over TCP and UDP, connects to
// an endpoint and copies the data. "all" and 0.0.0.0/0 do not include loopback addresses. The
// feature gate KubeProxyNFTablesLocalhostNodePorts, which is on by default, turns this off.
//
//   - Affinity, weights and both traffic policies apply as for other connections from the
//     node. Connections to a Service without endpoints are refused.
//   - Connections end with the process, and between two runs of the agent they are refused.
//   - If another process uses a port, the agent logs that once and tries again every
//     --sync-period. Other Services are not affected.
//   - Sockets, connections and sessions are limited by the number of files that the process
//     may open (RLIMIT_NOFILE). Up to 128 are for the agent alone. Of the rest, half are for
//     listening sockets, together with the health-check node ports, a quarter for connections,
//     at most 20,000, and an eighth for UDP sessions, at most 5,000. A further connection or
//     session ends the oldest one of the namespace that has most, of its Service and of that
//     Service's client address that have most.
//   - SCTP is not served.
//   - --service-traffic-metrics includes these connections. "nodeproxy top" does not: it reads
//     the kernel's counters.
//
// # Mode userspace
//
// With --proxy-mode userspace the kernel has no rules. The agent's process listens at the
// addresses of Services, connects to an endpoint for each connection, and copies the data, with
// the data plane of [github.com/go-proxier/proxier/examples/userspace/dataplane]. Mode nftables
// is faster, keeps the client's address, and serves on without the agent. Mode userspace is for
// nodes without CAP_NET_ADMIN or without netfilter. TCP and UDP are served; SCTP is not.
//
//   - With CAP_NET_ADMIN the agent adds the addresses of Services to the node, as local routes
//     with the protocol number 112 ("ip route show table local proto 112"). It removes them
//     when it ends. A later run in another mode, or run --cleanup, removes those that a killed
//     agent left.
//   - Without CAP_NET_ADMIN the agent serves the addresses that the node already has: NodePorts
//     at its own addresses, and the cluster IPs, external and load-balancer IPs that are its
//     own. If an operator adds a local route for the Service CIDR before the agent starts
//     ("ip route add local 10.96.0.0/12 dev lo"), all cluster IPs are its own. The agent
//     cannot remove the rules of other modes, and ignores --adopt-from-kube-proxy.
//   - Without CAP_NET_BIND_SERVICE it does not serve ports below
//     net.ipv4.ip_unprivileged_port_start (1024 by default).
//   - It logs at the start what it cannot serve. These Services do not count as failed.
//   - Endpoints see an address of the node as the client. Pods are recognized by
//     --cluster-cidr alone, not by interface.
//   - Connections end with the process, and the Services are not served between two runs.
//   - The limits on files are those of NodePorts at loopback addresses, above.
//   - The agent notices a change of the node's addresses within ten seconds.
//   - explain prints what the objects require and has no rules to compare with; top and trace
//     return an error. /metrics, with --service-traffic-metrics, counts connections.
//     --socket-lb is not supported, and the parameters of connection tracking stay unchanged.
//
// # Windows
//
// On Windows the only mode is kernelspace, which programs the Host Networking Service (HNS): see
// [github.com/go-proxier/proxier/examples/winkernel], which also lists what it cannot do. No packet has been seen
// on Windows yet. Windows Server 2019 and later, and the networks l2bridge and overlay are
// supported, as with kube-proxy.
//
//		nodeproxy.exe --kubeconfig C:\k\config --network-name cluster --log-file C:\k\nodeproxy.log
//		sc.exe create nodeproxy binPath= "C:\k\nodeproxy.exe --windows-service --kubeconfig ..." start= auto
//
//	  - The flags are kube-proxy's: --network-name, --source-vip, --enable-dsr,
//	    --forward-healthcheck-vip, --root-hnsendpoint-name and --windows-service. The section winkernel
//	    of a configuration file has the same settings.
//	  - A Windows service writes to the event log, with the source nodeproxy and without the lines of
//	    syncs, or to --log-file. The file grows without limit.
//	  - The agent waits until HNS runs and the network plugin has made the network.
//	  - The agent waits for the address of its Node object, unless --bind-address is given. If the
//	    node's addresses change, it must be restarted.
//	  - While a kube-proxy runs on the node, the agent waits: both would program the same objects. It
//	    then adopts the load balancers that kube-proxy left. --cleanup removes load balancers of both.
//	  - demo, top and trace need Linux. explain compares the objects with the load balancers, if it
//	    gets the flags of run.
//	  - /metrics has kube-proxy's counters of load balancers that could not be created, updated or
//	    deleted, with its labels.
//	  - A Service's annotation preserve-destination is followed, as by kube-proxy on Windows.
//
// # Data planes
//
// kube-proxy has deprecated its mode ipvs and removes it in Kubernetes 1.43 (KEP-5495). Mode
// ipvs stays here. Run repeats the deprecation, and says that the mode stays, in its log and
// in an Event of the node. The page IPVS.md in the folder deploy is for operators of that mode.
//
// Modes iptables and ipvs write to one flavor of iptables, nft or legacy, which must be that of the
// host: a packet passes both, and a drop in one is final. Run chooses at its start, for both address
// families, as kube-proxy's image does (kubernetes-sigs/iptables-wrappers): the flavor in which kubelet
// has made the chain KUBE-IPTABLES-HINT or KUBE-KUBELET-CANARY in table mangle, nft first; or else the
// flavor with more rules; or else that of the program iptables-restore, which is nft in the image. It uses the
// other flavor if one cannot be used. The log has the choice with its reason, and a warning if the chain FORWARD of
// the other flavor drops packets. --iptables-flavor replaces the choice; give it to --init-only, too. If the
// flavor differs from that of the last run, the old rules are removed when the new ones are in effect.
// README.md lists the other facts about a host that an image cannot contain.
//
// With --socket-lb, BPF programs translate TCP connections and UDP datagrams of the node's own
// processes and of its pods at the socket: see [github.com/go-proxier/proxier/examples/socketlb].
// The rules of the mode serve all other traffic. --socket-lb needs CAP_BPF and CAP_PERFMON, and
// in a container the host's /sys/fs/bpf and /sys/fs/cgroup. A run without --socket-lb
// removes what an earlier run with it left.
//
// A pod's connected UDP socket stays with its endpoint when that is gone, and run logs that once.
// Ending the socket needs hostPID, CAP_SYS_ADMIN and CAP_SYS_PTRACE. The manifests in the folder
// deploy do not give them, and a run with CAP_SETPCAP, such as one in a privileged container, gives
// both capabilities up. Processes that open a new socket for each question, as resolvers do, and
// those with unconnected sockets reach another endpoint. Connected sockets in the node's own network
// namespace are ended.
//
// If --proxy-mode changes between two runs, the new rules are in effect before the rules of
// the other mode are removed. With --adopt-from-kube-proxy the same holds for the rules of
// kube-proxy; "Taking over" below has the details.
//
// # Taking over
//
// A proxy that ends leaves its rules in the kernel, where they no longer follow the endpoints,
// and may come before others. So run looks for the rules of other proxies for as long as it
// runs: for those of kube-proxy, and of nodeproxy's other modes. Kube-proxy and nodeproxy may
// be started and stopped in any order; every connection is forwarded meanwhile.
//
// While another proxy runs, its rules stay. Run asks the loopback addresses at ports 10249 and
// 10256 whether one runs, and the addresses and ports of its own metrics-bind-address and
// healthz-bind-address: a kube-proxy that it replaces often has the same configuration. If no proxy
// answers, run looks in /proc for a process named kube-proxy in its network namespace. Run sees the
// node's processes as a service of systemd, and in a pod with hostPID. A pod of the manifests in the
// folder deploy sees only its own: add "hostPID: true" for the time of the take-over if kube-proxy's
// ports are not the default ones and not in the agent's configuration. Run asks no other ports, because
// a request to an unknown server may have effects.
//
// A proxy that is not found in these ways runs if its rules appear or change, and follow each change of
// the endpoints within 40 s. When it has ended, run removes its rules within seconds, those of
// kube-proxy only with --adopt-from-kube-proxy. The metric proxier_other_proxy_rules, a line of the log
// for each change, and explain report them.
//
// Modes iptables and ipvs use the chains and virtual servers of kube-proxy's same mode. There run
// writes nothing while that kube-proxy answers, or while its process is found: then its mode is not
// known. A kube-proxy that is not found writes the same rules at the same time, and each removes what
// the other writes: stop it first. One inside of another program, as in k3s, is found by its ports only.
//
// /readyz, at the address of /healthz, answers 200 when the rules are in effect. kube-proxy has no
// such page, so a probe of /readyz does not take a kube-proxy that still holds the port for nodeproxy.
//
// Other programs find out by kube-proxy's tables whether Services are in nftables: Calico's Felix,
// with nftablesMode Auto, looks for chains in the tables kube-proxy of families ip and ip6 every
// 15 s, and restarts with another data plane when they come or go. So when mode nftables has
// removed the rules of kube-proxy's nftables mode, it keeps tables of this name with the chain
// nodeproxy-marker, which no packet enters. With --adopt-from-kube-proxy a node without any rules,
// which is new or was booted, gets them, too. --kube-proxy-table=always makes them on every node, and
// never leaves them out. Another mode, and --cleanup, remove them. A kube-proxy that starts again
// adds its own chains.
//
// Clients of Services with client affinity keep their endpoint if mode nftables takes over from
// kube-proxy's modes nftables or iptables, or mode iptables from mode iptables. Otherwise they
// may get another endpoint: xt_recent of mode iptables has no way to set the time of a client's
// last connection, and IPVS keeps its memory for virtual servers only. A Service whose name is so
// long that kube-proxy cuts the names of its sets also loses it.
//
// Modes iptables, kube-proxy's and nodeproxy's, drop TCP packets that connection tracking considers
// invalid, such as those outside of the TCP window. Modes nftables do not. Such a packet of an endpoint
// reaches the client untranslated, and the client's answer resets the connection
// (kubernetes/kubernetes#74839). Whether a node has such packets shows in the metric
// kubeproxy_iptables_ct_state_invalid_dropped_packets_total before the take-over. conntrack.tcpBeLiberal
// makes the kernel translate them; without it, a take-over from a mode iptables to mode nftables writes
// a warning.
//
// Modes iptables accept connections to Services in the chain FORWARD of iptables, and modes nftables do
// not: a drop there is final for them. If a host drops in FORWARD, as docker makes it do, it needs rules that accept
// packets to and from pods, which most network plugins write (k3s-io/k3s#8706). Mode nftables warns
// of such a chain at its start.
//
// To go back, stop nodeproxy, start kube-proxy, wait until its rules are in effect, and run
// "nodeproxy run --cleanup". The answer 200 of kube-proxy's /healthz does not mean that: wait
// for its first connection, or for its table or its rules in KUBE-SERVICES. In that order no
// connection is lost, except from mode iptables to kube-proxy's nftables mode: that kube-proxy
// deletes all chains with its names when it starts, before its own rules are in effect. Run
// nodeproxy in mode nftables first. --cleanup leaves what kube-proxy has written. With
// --adopt-from-kube-proxy, --cleanup removes the rules of kube-proxy, too, even if it runs.
//
// Nothing proves whose the virtual servers of mode ipvs are. So --cleanup refuses to remove them
// while a kube-proxy in mode ipvs runs. To go back from mode ipvs, run nodeproxy in mode nftables
// first. It removes mode ipvs when its last connection has ended.
//
// # Code
//
// Everything is in the folder internal. Package program starts the verbs. Package objects reads
// objects and turns them into the ruleset; agent brings the ruleset into the kernel, with the
// data planes of package modes, and serves metrics, health checks and the page of the
// configuration. Package takeover finds the rules of other proxies. Package inspect has explain,
// trace and top, with follow and toptable; demo is a tour with real packets, in the network of
// package lab. Package config reads kube-proxy's flags and file. The folder deploy has what an
// operator needs to run nodeproxy.
//
// [all parameters]: https://github.com/go-proxier/proxier/blob/main/.github/PARAMETERS.md
package main

import (
	"os"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
)

func main() { os.Exit(program.Main()) }
