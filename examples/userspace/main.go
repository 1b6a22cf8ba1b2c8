// Userspace is a Service proxy whose data plane is this process: it listens where
// Services are, dials their endpoints and copies. It is what kube-proxy's historic
// userspace mode was, and a third-party backend from beginning to end: it uses
// nothing of the library but what is exported.
//
//	userspace --manifests world.yaml --local     on any machine, without privileges
//	userspace --manifests /etc/world --node-name node-a --cluster-cidr 10.244.1.0/24
//
// The manifests are a file or folder of Services, EndpointSlices and Nodes, in YAML
// or JSON, such as
//
//	kubectl get services,endpointslices,nodes -A -o yaml > world.yaml
//
// writes. They are read again when they change.
//
// With --local, every port of every Service gets a port on 127.0.0.1 (or ::1, in
// IPv6), the same number where it is to be had, and a table of them is printed, and
// printed again when it changes: a developer's way into a cluster whose pods can be
// reached from the laptop. A port in the table is one that this program listens at;
// a Service without endpoints has none ("-"), and it may get another number if
// another program takes its port meanwhile. Traffic policies do not count there, as
// no endpoint is local.
//
// Without it, on Linux and with CAP_NET_ADMIN, the addresses of Services are made
// the own ones of the network namespace it runs in, and it serves that node: its
// processes, its pods, and whoever routes these addresses to it. See the packages
// vip and dataplane for what that means and how it differs from kernel data planes;
// above all, endpoints see the node's address in place of the client's. What it
// costs is in bench_linux_test.go and the project's README.
//
// The annotation proxier.example/balancer of a Service chooses another load
// balancer than --balancer does: see package balance. The annotations of nodeproxy
// (see package annotations) mean here what they mean there: weights of endpoints, and
// a hash that endpoints follow from, which goes before any load balancer. By it all
// nodes choose alike, those that run nodeproxy in mode nftables too.
//
// How to read the code: agent.go puts the parts together, local.go is all there is
// to --local, and balancer.go to the first annotation. They do it by hooks of the
// tracker.
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

	"github.com/go-proxier/proxier/examples/userspace/balance"
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
	maxServiceConnections     int
	maxSessions               int
}

// run does what the arguments say until ctx is done.
func run(ctx context.Context, args []string, out, diag io.Writer) error {
	var o options
	f := pflag.NewFlagSet("userspace", pflag.ContinueOnError)
	f.SetOutput(diag)
	f.SortFlags = false
	f.StringVar(&o.manifests, "manifests", "", "file or folder with Services, EndpointSlices and Nodes (required)")
	f.BoolVar(&o.local, "local", false, "serve on 127.0.0.1 and print a table")
	f.StringVar(&o.nodeName, "node-name", "", "name of this node (default: the host's name; none with --local)")
	f.StringVar(&o.zone, "zone", "", "zone of this node, if no Node of its name is in the manifests")
	f.StringVar(&o.balancer, "balancer", balance.Algorithm(0).String(), fmt.Sprintf("load balancer, one of %v", balance.Names()))
	f.StringSliceVar(&o.clusterCIDRs, "cluster-cidr", nil, "ranges that tell this node's pods from other clients")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", nil, `where NodePorts answer: CIDRs, or "primary" (default: all addresses)`)
	f.DurationVar(&o.drain, "drain", 30*time.Second, "how long connections may go on when their endpoint is gone, or the process told to stop")
	f.DurationVar(&o.dialTimeout, "dial-timeout", 5*time.Second, "how long one endpoint may take to answer")
	f.DurationVar(&o.udpTimeout, "udp-timeout", time.Minute, "how long an idle UDP session is kept")
	f.IntVar(&o.maxConnections, "max-connections", 20000, "most TCP connections at a time")
	f.IntVar(&o.maxServiceConnections, "max-service-connections", 0, "most TCP connections of one Service port at a time (0: no limit)")
	f.IntVar(&o.maxSessions, "max-sessions", 5000, "most UDP sessions at a time")
	f.BoolVar(&o.verbose, "verbose", false, "log endpoints that cannot be reached")
	if err := f.Parse(args); err != nil {
		return err
	}
	switch {
	case f.NArg() != 0:
		return fmt.Errorf("what is %q?", f.Arg(0))
	case o.manifests == "":
		return errors.New("--manifests is required")
	case o.drain < 0:
		return errors.New("--drain is negative")
	}
	if o.drain == 0 {
		o.drain = -1 // at once
	}
	a, err := newAgent(o, out, diag)
	if err != nil {
		return err
	}
	return a.run(ctx)
}
