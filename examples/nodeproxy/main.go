// Nodeproxy is a complete Service proxy for one node, in place of kube-proxy, and
// the place to see how the library's packages are put together. It takes Services
// and EndpointSlices from an API server, or from files.
//
//	nodeproxy run [flags]             program the network namespace it runs in
//	nodeproxy run --cleanup           remove what run left there
//	nodeproxy run --init-only         set the kernel parameters that run needs
//	nodeproxy explain [flags] 10.0.0.10:80
//	                                  tell what must happen to a packet, why, and
//	                                  whether the kernel agrees
//	nodeproxy trace [flags] 10.0.0.10:80
//	                                  follow real connections through the kernel
//	nodeproxy top [flags]             show the traffic of each Service
//	nodeproxy demo                    show it all at work; needs no privileges
//	nodeproxy demo --socket-lb        the same with --socket-lb of run; needs root
//
// See "nodeproxy run --help" for its flags: they are kube-proxy's, and a few more;
// --config takes kube-proxy's configuration file. What kube-proxy would do and this
// does not is refused by name. A changed configuration file ends it, to be started
// anew by whoever runs it. It needs CAP_NET_ADMIN and Linux 5.10 or later, and
// CAP_NET_RAW in mode iptables with iptables-legacy. Other capabilities than these
// two, CAP_NET_BIND_SERVICE and CAP_DAC_READ_SEARCH it gives up before it serves, once
// the kernel modules that its mode needs are loaded.
//
// "nodeproxy run --init-only" does all that takes a writable /proc/sys for the
// configured mode: the parameters of connection tracking, those that
// [github.com/go-proxier/proxier/ipvs.SetSysctls] lists in mode ipvs, and route_localnet in
// mode iptables if NodePorts answer at loopback addresses. Afterwards run works with the
// same flags and configuration file where /proc/sys is read-only, as it does not write
// a parameter that has its value already. No mode writes
// net.ipv6.conf.all.forwarding: run warns if it is 0 and IPv6 is served.
//
// IPv6 is not served on a node where net.ipv6.conf.all.disable_ipv6 is 1, whatever the
// interfaces' own settings are, nor where the kernel has no IPv6. Run looks at this
// once, when it starts. If IPv6 is turned on later, run has to be started again to
// serve it. If it is turned off, the rules for IPv6 stay without effect, and IPv4 is
// served as before; in mode ipvs each IPv6 Service is reported as failed, and tried again,
// until run is started again.
//
// With --manifests, run writes one line to standard output for each change of the
// manifests that is in effect,
//
//	synced services=2 endpoints=5 changed=1 took=412.3µs waited=1.2ms
//
// also if nothing had to be changed in the kernel; with an API server, for each
// sync that had something to do. Services is the number of Services that have a
// port to serve, and endpoints the number of endpoints this node may send to, added
// up over their ports in each address family. Changed is the number of Service
// ports, in each address family, whose rules are different. Took is the time from the
// start of the sync to the kernel's commit. Waited is the time before that since the
// change was handed in (the last object of the manifests, the first change of an API
// server). A further field failed=N counts Service ports
// that could not be programmed, which is tried again. Everything else is logged to
// standard error, as kube-proxy's logging flags have it. Errors, warnings and what an
// operator wants to know are logged at any verbosity; -v=4 adds debugging messages.
//
// With an API server, /healthz answers 503 until the agent has seen the Node object
// of its own name, and again after that object was deleted. /livez does not depend
// on it, and the rules are in effect without it. With --manifests no Node is needed:
// without one, the node counts as eligible for load-balancer traffic.
//
// Annotations say what the API has no fields for:
//
//	go-proxier.github.io/balance        on a Service: "source" or "source-port" has
//	                                    its endpoints follow from the client's
//	                                    address, or from address and port, on all
//	                                    nodes alike; "random" is the default
//	go-proxier.github.io/balance-slots  on a Service: at least so many slots in the
//	                                    table for that, if it is to stay the same
//	                                    while the number of endpoints varies much
//	go-proxier.github.io/weight         on an EndpointSlice: its endpoints' weight,
//	                                    1 by default; 0 is no new connections
//	go-proxier.github.io/weights        on an EndpointSlice: those of some of its
//	                                    endpoints, "10.244.1.7=3,10.244.2.4=0"
//
// Mode iptables knows weights only. What an annotation says that cannot be read is
// logged and ignored.
//
// With --socket-lb, BPF programs translate TCP connections of the node's own processes and
// of its pods when they are made: see [github.com/go-proxier/proxier/examples/socketlb]. The
// rules of the mode stay behind them. It takes CAP_BPF, and in a container the host's
// /sys/fs/bpf and /sys/fs/cgroup. A run without it removes what one with it has left.
//
// If --proxy-mode changes between two runs, the new rules are in effect before those of
// the other mode are removed. With --adopt-from-kube-proxy the same holds for what
// kube-proxy has left. If another part of the process closes a netlink socket, the agent
// opens new ones and repairs everything.
//
// How to read the code: agent.go assembles the agent. source.go is where objects come
// from; world.go leads from objects to the ruleset; pipeline.go leads from the ruleset to
// the kernel, with the modes of backends.go and the sockets of kernelsockets.go;
// observers.go and servers.go are metrics, health checks and output; takeover.go removes
// what another mode or kube-proxy has left; socketlb.go is for --socket-lb. demo.go is a tour with real packets. deploy
// has what an operator needs to run it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
)

const usage = `Usage:
  nodeproxy run [flags]                       serve what the API server says, or,
                                              with --manifests PATH, what files say
  nodeproxy run --cleanup                     remove all rules and exit
  nodeproxy explain [flags] ADDR:PORT[/PROTOCOL]
                                              tell what happens to a packet
  nodeproxy trace [flags] ADDR:PORT[/PROTOCOL]
                                              follow real connections
  nodeproxy top [flags]                       show each Service's traffic
  nodeproxy demo                              a tour with real packets, without root
  nodeproxy version                           tell which version it is

"nodeproxy VERB --help" tells more. Without a verb, flags are those of run.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	p := &program{modes: allModes(), out: os.Stdout, diag: os.Stderr, restrict: dropPrivileges, process: true}
	code := p.dispatch(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// program is what the verbs have in common.
type program struct {
	modes     []mode
	out, diag io.Writer
	// restrict gives up all capabilities but those to keep. If there are any, it
	// calls prepare before, with whether one of them is to load kernel modules. Nil does
	// nothing; the process is not the program's alone.
	restrict func(log *slog.Logger, keep []int, prepare func(modules bool))
	// process allows the program to set up logging for the whole process.
	process bool
}

// logger returns the logger that the configuration asks for.
func (p *program) logger(c *config.Config) (*slog.Logger, error) {
	if p.process {
		return processLogger(c, p.out, p.diag)
	}
	return ownLogger(c, p.diag), nil
}

// dispatch runs the verb that args begin with and returns the exit status.
func (p *program) dispatch(ctx context.Context, args []string) int {
	defer klog.Flush() // what --log-text-info-buffer-size holds back
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
	switch {
	case err == nil || errors.Is(err, pflag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintf(p.diag, "nodeproxy %s: %v\n", verb, err)
		return 2
	}
	fmt.Fprintf(p.diag, "nodeproxy %s: %v\n", verb, err)
	return 1
}
