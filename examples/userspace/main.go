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
// How to read the code: this file combines the parts, local.go implements --local, and
// balancer.go implements the first annotation. Both use hooks of the tracker.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/examples/userspace/vip"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// poll is the interval for checking the manifests, which reads the files' times, and for retrying
	// what failed, for example because another program uses a port.
	poll = 500 * time.Millisecond
	// resync is the interval of full syncs: the node's addresses, which serve NodePorts,
	// may have changed.
	resync = 30 * time.Second
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

// run runs the program with the arguments until ctx is done, and then waits for connections to end.
func run(ctx context.Context, args []string, out, diag io.Writer) (err error) {
	var c dataplane.Config
	var node tracker.NodeInfo
	var rules ruleset.Config
	var clusterCIDRs, nodePortAddresses []string
	f := pflag.NewFlagSet("userspace", pflag.ContinueOnError)
	f.SetOutput(diag)
	f.SortFlags = false
	path := f.String("manifests", "", "file or folder with Services, EndpointSlices and Nodes (required)")
	local := f.Bool("local", false, "serve on 127.0.0.1 and print a table")
	f.StringVar(&node.Name, "node-name", "", "name of this node (default: the host's name; with --local no name)")
	f.StringVar(&node.Zone, "zone", "", "zone of this node, if no Node of its name is in the manifests")
	usual := f.String("balancer", balancers()[0], fmt.Sprintf("load balancer, one of %v", balancers()))
	f.StringSliceVar(&clusterCIDRs, "cluster-cidr", nil, "address ranges of this node's pods")
	f.StringSliceVar(&nodePortAddresses, "nodeport-addresses", nil, `addresses that serve NodePorts: CIDRs, or "primary" (default: all addresses)`)
	f.DurationVar(&c.Drain, "drain", 30*time.Second, "how long connections may continue after their endpoint is removed or the process is stopped")
	f.DurationVar(&c.DialTimeout, "dial-timeout", 5*time.Second, "timeout for connecting to one endpoint")
	f.DurationVar(&c.UDPTimeout, "udp-timeout", time.Minute, "lifetime of an idle UDP session")
	f.IntVar(&c.MaxConnections, "max-connections", 20000, "most TCP connections at a time")
	f.IntVar(&c.MaxSessions, "max-sessions", 5000, "most UDP sessions at a time")
	verbose := f.Bool("verbose", false, "log endpoints that cannot be reached")
	if err := f.Parse(args); err != nil {
		return err
	}
	switch {
	case f.NArg() != 0:
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	case *path == "":
		return errors.New("--manifests is required")
	case c.Drain < 0:
		return errors.New("--drain is negative")
	}
	drain := c.Drain
	if drain == 0 {
		c.Drain = -1 // immediately
	}
	for _, x := range clusterCIDRs {
		p, err := netip.ParsePrefix(x)
		if err != nil {
			return fmt.Errorf("--cluster-cidr: %w", err)
		}
		rules.LocalTraffic.CIDRs = append(rules.LocalTraffic.CIDRs, p)
	}
	if rules.NodePortAddresses, err = ruleset.ParseNodePortAddresses(nodePortAddresses); err != nil {
		return err
	}
	if err := checkBalancer(*usual); err != nil {
		return err
	}
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(diag, &slog.HandlerOptions{Level: level}))
	rules.Log, c.Log = log, log

	// The objects are the operator's own, so every annotation of this project is allowed.
	// Cilium's is not: it changes the weight of all endpoints without one to 100. Nor are those of
	// mode ipvs.
	choice, err := annotations.NewReader(slices.DeleteFunc(annotations.Known(), func(name string) bool {
		return name == annotations.CiliumWeight || strings.HasPrefix(name, "ipvs-")
	}))
	if err != nil {
		return err
	}
	// With --local a hook moves Service ports; otherwise the node gets their addresses.
	var ports *localPorts
	if *local {
		ports = newLocalPorts()
	} else {
		if node.Name == "" {
			if node.Name, err = os.Hostname(); err != nil {
				return err
			}
		}
		own, err := vip.New()
		if err != nil {
			return fmt.Errorf("%w (--local works everywhere)", err)
		}
		defer own.Close()
		c.Addresses = own
	}
	objects, err := tracker.New(tracker.Config{
		Node: node, OnEndpoint: choice.OnEndpoint, Log: log,
		OnService: func(s *v1.Service, port *v1.ServicePort, p *tracker.ServicePort) error {
			err := errors.Join(setBalancer(s, p, *usual), choice.OnService(s, port, p))
			if ports != nil {
				err = errors.Join(err, ports.place(p))
			}
			return err
		},
	})
	if err != nil {
		return err
	}
	rules.Source = objects
	engine, err := ruleset.NewEngine(rules)
	if err != nil {
		return err
	}
	c.Algorithm = algorithm
	backend, err := dataplane.New(c)
	if err != nil {
		return err
	}
	cursor := engine.Attach("userspace", backend)
	w := &world{
		Tracker: objects, reader: manifests.NewReader(*path), node: node.Name, log: log,
		services: map[types.NamespacedName]*v1.Service{},
	}
	if err := w.read(); err != nil {
		return err
	}
	objects.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	log.Info("serving", "manifests", *path, "node", node.Name, "local", *local)
	tick := time.NewTicker(poll)
	defer tick.Stop()
	full, failure, printed := time.Now().Add(resync), "", ""
	for ctx.Err() == nil {
		if time.Now().After(full) {
			cursor.Resync()
			full = time.Now().Add(resync)
		}
		err := cursor.Sync(ctx)
		if ports != nil {
			var again []types.NamespacedName
			if again, err = ports.avoid(err); len(again) != 0 {
				for _, name := range again {
					log.Info("port is in use by another program, choosing another port", "service", name)
					if s := w.services[name]; s != nil {
						objects.SetService(s) // calls the hook again
					}
				}
				continue
			}
			if t := table(engine.Snapshot(), backend.Listens); t != printed {
				fmt.Fprintln(out, t)
				printed = t
			}
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
			text := ""
			if err := errors.Join(err, w.read()); err != nil && ctx.Err() == nil { // the earlier objects stay in use
				if text = err.Error(); text != failure {
					log.Error("cannot follow the manifests", "error", err)
				}
			}
			failure = text
		}
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	if err := backend.Shutdown(end); err != nil {
		log.Info("reset the remaining connections")
	}
	return nil
}

// world holds the objects of the manifests.
type world struct {
	*tracker.Tracker
	reader   *manifests.Reader
	node     string
	services map[types.NamespacedName]*v1.Service
	log      *slog.Logger
}

// read passes changes of the manifests to the tracker.
func (w *world) read() error {
	c, err := w.reader.Read()
	if err != nil {
		return err
	}
	for _, p := range c.Problems {
		w.log.Warn("manifest skipped", "problem", p)
	}
	for _, o := range c.Set {
		switch v := o.Value.(type) {
		case *v1.Service:
			w.services[o.NamespacedName] = v
			w.SetService(v)
		case *discovery.EndpointSlice:
			w.SetSlice(v)
		case *v1.Node:
			if v.Name == w.node {
				w.SetNode(tracker.NodeInfoOf(v))
			}
		}
	}
	for _, gone := range c.Gone {
		switch gone.Kind {
		case manifests.Service:
			delete(w.services, gone.NamespacedName)
			w.DeleteService(gone.NamespacedName)
		case manifests.EndpointSlice:
			w.DeleteSlice(gone.NamespacedName)
		}
	}
	return nil
}
