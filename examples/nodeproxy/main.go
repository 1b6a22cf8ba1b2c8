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
//
// "nodeproxy run --help" lists the flags: kube-proxy's and a few more. --config reads
// kube-proxy's configuration file. Options of kube-proxy that nodeproxy does not support
// are rejected by name. Run exits when its configuration file changes; its supervisor
// restarts it.
//
// # Requirements
//
// Run needs Linux 5.10 or later and, except in mode userspace, CAP_NET_ADMIN. Mode iptables with iptables-legacy also
// needs CAP_NET_RAW. Run loads the kernel modules of its mode and then, before it serves,
// gives up all capabilities except these two, CAP_NET_BIND_SERVICE, CAP_DAC_READ_SEARCH and
// the capabilities of --socket-lb.
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
// line for each sync that had something to do:
//
//	synced services=2 endpoints=5 changed=1 took=412.3µs waited=1.2ms
//
// "nodeproxy run --help" explains the fields. With --logging-format=json the line is an entry
// of the log with the same fields, so that every line is JSON. Run logs everything else to
// standard error, as kube-proxy's logging flags select. It logs errors, warnings and infos at any verbosity,
// and debugging messages at -v=4.
//
// With an API server, /healthz answers 503 until the agent has received the Node object
// of its own name, and again after that object is deleted. /livez and the rules do not
// depend on the Node. With --manifests no Node is needed: without one, the node counts as
// eligible for load-balancer traffic.
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
// --budget bounds what a Service may cost, in elements of the rules: port=6000 for a port of
// a Service in one address family, service=500000, total=5000000, slots=4093 and
// slots-per-endpoint=256 for hash tables, and delta=2000 for one change of the rules. Beyond
// a bound a Service is served in part, with an Event. A Service with a hash,
// externalTrafficPolicy Local and more than 15 endpoints needs port=9000.
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
//	go-proxier.github.io/weight         on an EndpointSlice: the weight of its endpoints,
//	                                    1 by default; 0 means no new connections
//	go-proxier.github.io/weights        on an EndpointSlice: the weights of some of its
//	                                    endpoints, "10.244.1.7=3,10.244.2.4=0"
//
// Mode iptables supports weights only. An annotation that is not allowed or cannot be parsed
// is ignored, and a log line and an Event name it.
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
//     may open (RLIMIT_NOFILE): half of the files for listening sockets, a quarter for
//     connections, at most 20,000, of which a Service port gets a quarter, and an eighth for
//     UDP sessions, at most 5,000. Further connections are reset. Further UDP sessions replace
//     the least recently used ones.
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
//   - Endpoints see an address of the node as the client. Pods are recognised by
//     --cluster-cidr alone, not by interface.
//   - Connections end with the process, and the Services are not served between two runs.
//   - The limits on files are those of NodePorts at loopback addresses, above.
//   - The agent notices a change of the node's addresses within ten seconds.
//   - explain prints what the objects require and has no rules to compare with; top and trace
//     return an error. /metrics, with --service-traffic-metrics, counts connections.
//     --socket-lb is not supported, and the parameters of connection tracking stay unchanged.
//
// # Data planes
//
// kube-proxy has deprecated its mode ipvs and removes it in Kubernetes 1.43 (KEP-5495). Mode
// ipvs stays here. Run repeats the deprecation, and says that the mode stays, in its log and
// in an Event of the node. The page IPVS.md in the folder deploy is for operators of that mode.
//
// With --socket-lb, BPF programs translate TCP connections of the node's own processes and
// of its pods when they connect: see [github.com/go-proxier/proxier/examples/socketlb]. The
// rules of the mode serve all other traffic. --socket-lb needs CAP_BPF and CAP_PERFMON, and
// in a container the host's /sys/fs/bpf and /sys/fs/cgroup. A run without --socket-lb
// removes what an earlier run with it left.
//
// If --proxy-mode changes between two runs, the new rules are in effect before the rules of
// the other mode are removed. With --adopt-from-kube-proxy the same holds for the rules of
// kube-proxy; "Taking over" below has the details. If another part of the process closes a netlink socket, the agent opens new
// sockets and repairs all rules.
//
// # Taking over
//
// A proxy that ends leaves its rules in the kernel, where they no longer follow the endpoints,
// and may come before others. So run looks for the rules of other proxies for as long as it
// runs: for those of kube-proxy, and of nodeproxy's other modes. Kube-proxy and nodeproxy may
// be started and stopped in any order; every connection is forwarded meanwhile.
//
// While another proxy runs, its rules stay. Run asks the loopback addresses at ports 10249 and
// 10256 whether one runs. A proxy that does not answer there runs if its rules appear or change,
// and follow each change of the endpoints within 40 s. When it has ended, run removes its rules
// within seconds, those of kube-proxy only with --adopt-from-kube-proxy. The metric
// proxier_other_proxy_rules, a line of the log for each change, and explain report them.
//
// Modes iptables and ipvs use the chains and virtual servers of kube-proxy's same mode. There
// run writes nothing while that kube-proxy answers. /readyz, at the address of /healthz,
// answers 200 when the rules are in effect. kube-proxy has no such page, so a probe of /readyz
// does not take a kube-proxy that still holds the port for nodeproxy.
//
// Other programs find out by kube-proxy's tables whether Services are in nftables: Calico's Felix,
// with nftablesMode Auto, looks for chains in the tables kube-proxy of families ip and ip6 every
// 15 s, and restarts with another data plane when they come or go. So when mode nftables has
// removed the rules of kube-proxy's nftables mode, it keeps tables of this name with the chain
// nodeproxy-marker, which no packet enters. --kube-proxy-table=always makes them on every node, and
// never leaves them out. Another mode, and --cleanup, remove them. A kube-proxy that starts again
// adds its own chains.
//
// Clients of Services with client affinity keep their endpoint if mode nftables takes over from
// kube-proxy's modes nftables or iptables, or mode iptables from mode iptables. Otherwise they
// may get another endpoint: xt_recent of mode iptables has no way to set the time of a client's
// last connection, and IPVS keeps its memory for virtual servers only. A Service whose name is so
// long that kube-proxy cuts the names of its sets also loses it.
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
// agent.go assembles the agent. source.go reads objects; world.go turns them into the
// ruleset; pipeline.go brings the ruleset into the kernel, with the modes of backends.go and
// the sockets of kernelsockets.go. observers.go and servers.go are metrics, health checks
// and output. takeover.go and internal/takeover find and remove the rules of other proxies.
// socketlb.go serves --socket-lb, localhost.go NodePorts at loopback addresses, and userspace.go
// mode userspace. demo.go is a tour with real packets. The folder deploy has what an
// operator needs to run nodeproxy.
//
// [all parameters]: https://github.com/go-proxier/proxier/blob/main/.github/PARAMETERS.md
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
)

const usage = `Usage:
  nodeproxy run [flags]                       serve the objects of an API server or,
                                              with --manifests PATH, of files
  nodeproxy run --cleanup                     remove all rules and exit
  nodeproxy explain [flags] ADDR:PORT[/PROTOCOL]
                                              print what happens to a packet
  nodeproxy trace [flags] ADDR:PORT[/PROTOCOL]
                                              follow real connections
  nodeproxy top [flags]                       show each Service's traffic
  nodeproxy demo                              take a tour with real packets, without root
  nodeproxy version                           print the version

"nodeproxy VERB --help" prints the details. If the first argument is a flag, the verb is run.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	p := newProgram(os.Args[0])
	code := p.dispatch(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// program holds what the verbs share.
type program struct {
	modes     []mode
	out, diag io.Writer
	// restrict gives up all capabilities except keep. If there are any to give up, it
	// first calls prepare and reports whether CAP_SYS_MODULE is one of them. It is nil if
	// the program shares its process, as in tests.
	restrict func(log *slog.Logger, keep []int, prepare func(modules bool))
	// process allows the program to set up logging for the whole process.
	process bool
	// asKubeProxy reports that the program was called as kube-proxy, in whose place it then
	// is: the verb is run even without flags, and kube-proxy's rules are adopted.
	asKubeProxy bool
}

// newProgram returns the program of this process, which was called by a name.
func newProgram(name string) *program {
	return &program{
		modes: allModes(), out: os.Stdout, diag: os.Stderr, restrict: dropPrivileges, process: true,
		asKubeProxy: filepath.Base(name) == "kube-proxy",
	}
}

// logger returns the logger that the configuration selects.
func (p *program) logger(c *config.Config) (*slog.Logger, error) {
	if p.process {
		return processLogger(c, p.out, p.diag)
	}
	return ownLogger(c, p.diag), nil
}

// dispatch runs the verb that args begin with and returns the exit status.
func (p *program) dispatch(ctx context.Context, args []string) int {
	defer klog.Flush() // --log-text-info-buffer-size buffers messages
	if len(args) == 0 && p.asKubeProxy {
		args = []string{"run"}
	}
	if len(args) == 0 {
		fmt.Fprint(p.diag, usage)
		return 2
	}
	verb, rest := args[0], args[1:]
	if strings.HasPrefix(verb, "-") && verb != "-h" && verb != "--help" && verb != "--version" {
		verb, rest = "run", args
	}
	var err error
	switch verb {
	case "run":
		err = p.run(ctx, rest)
	case "explain":
		err = p.explain(ctx, rest)
	case "trace":
		err = p.trace(ctx, rest)
	case "top":
		err = p.top(ctx, rest)
	case "demo":
		return demo(ctx, rest, p.out, p.diag)
	case "help", "-h", "--help":
		fmt.Fprint(p.out, usage)
		return 0
	case "version", "--version":
		fmt.Fprintln(p.out, "nodeproxy", version())
		return 0
	default:
		fmt.Fprintf(p.diag, "nodeproxy: no verb %q\n%s", verb, usage)
		return 2
	}
	if err == nil || errors.Is(err, pflag.ErrHelp) {
		return 0
	}
	if !errors.As(err, new(loggedError)) {
		fmt.Fprintf(p.diag, "nodeproxy %s: %v\n", verb, err)
	}
	if errors.Is(err, errUsage) {
		return 2
	}
	return 1
}
