// Userspace is a Service proxy whose data plane is its own process: it listens at the
// addresses of Services, dials their endpoints and copies bytes, like kube-proxy's former
// userspace mode. It is a complete third-party backend: it uses only the library's exported
// API.
//
//	userspace --manifests world.yaml --local     on any machine, without privileges
//	userspace --manifests /etc/world --node-name node-a --cluster-cidr 10.244.1.0/24
//
// The manifests are a file or folder of Services, EndpointSlices and Nodes, in YAML or
// JSON. This command writes such a file:
//
//	kubectl get services,endpointslices,nodes -A -o yaml > world.yaml
//
// Userspace reads the manifests again when they change.
//
// With --local, every port of every Service gets a port on 127.0.0.1 (or ::1 for IPv6), with
// the same number if possible. Userspace prints a table of the ports, and prints it again
// when it changes. A developer's laptop can so use the Services of a cluster whose pods it
// can reach. Userspace listens at every port in the table. A Service without endpoints has
// no port ("-"), and may get another number if another program takes its port. Traffic
// policies do not apply, because no endpoint is local.
//
// Without --local, on Linux and with CAP_NET_ADMIN, userspace adds the addresses of Services
// to its network namespace and serves that node: its processes, its pods, and clients that
// route these addresses to the node. Packages vip and dataplane document the differences
// from kernel data planes; above all, endpoints see the node's address in place of the
// client's. bench_linux_test.go and the project's README show the costs.
//
// The annotation proxier.example/balancer of a Service overrides --balancer. The
// annotations of nodeproxy (see package annotations) have the same meaning here: weights of
// endpoints, and a hash that overrides any load balancer. With a hash, or source-hash, all nodes
// choose the same endpoints, including nodes with nodeproxy in mode nftables.
//
// How to read the code: agent.go combines the parts, local.go implements --local, and
// balancer.go implements the first annotation. Both use hooks of the tracker.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, pflag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "userspace:", err)
		}
		os.Exit(1)
	}
}

// options is the command line.
type options struct {
	manifests, nodeName, zone string
	local, verbose            bool
	balancer                  string
	clusterCIDRs              []string
	nodePortAddresses         []string
	drain, dialTimeout        time.Duration
	udpTimeout                time.Duration
	maxConnections            int
	maxSessions               int
}

// run runs the program with the arguments until ctx is done.
func run(ctx context.Context, args []string, out, diag io.Writer) error {
	var o options
	f := pflag.NewFlagSet("userspace", pflag.ContinueOnError)
	f.SetOutput(diag)
	f.SortFlags = false
	f.StringVar(&o.manifests, "manifests", "", "file or folder with Services, EndpointSlices and Nodes (required)")
	f.BoolVar(&o.local, "local", false, "serve on 127.0.0.1 and print a table")
	f.StringVar(&o.nodeName, "node-name", "", "name of this node (default: the host's name; with --local no name)")
	f.StringVar(&o.zone, "zone", "", "zone of this node, if no Node of its name is in the manifests")
	f.StringVar(&o.balancer, "balancer", balancers()[0], fmt.Sprintf("load balancer, one of %v", balancers()))
	f.StringSliceVar(&o.clusterCIDRs, "cluster-cidr", nil, "address ranges of this node's pods")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", nil, `addresses that serve NodePorts: CIDRs, or "primary" (default: all addresses)`)
	f.DurationVar(&o.drain, "drain", 30*time.Second, "how long connections may continue after their endpoint is removed or the process is stopped")
	f.DurationVar(&o.dialTimeout, "dial-timeout", 5*time.Second, "timeout for connecting to one endpoint")
	f.DurationVar(&o.udpTimeout, "udp-timeout", time.Minute, "lifetime of an idle UDP session")
	f.IntVar(&o.maxConnections, "max-connections", 20000, "most TCP connections at a time")
	f.IntVar(&o.maxSessions, "max-sessions", 5000, "most UDP sessions at a time")
	f.BoolVar(&o.verbose, "verbose", false, "log endpoints that cannot be reached")
	if err := f.Parse(args); err != nil {
		return err
	}
	switch {
	case f.NArg() != 0:
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.manifests == "":
		return errors.New("--manifests is required")
	case o.drain < 0:
		return errors.New("--drain is negative")
	}
	if o.drain == 0 {
		o.drain = -1 // immediately
	}
	a, err := newAgent(o, out, diag)
	if err != nil {
		return err
	}
	return a.run(ctx)
}
