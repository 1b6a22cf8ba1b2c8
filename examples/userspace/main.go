// Userspace serves the Services of a cluster on a developer's machine: every port of every Service gets a port on
// 127.0.0.1 (or ::1 for IPv6), with the same number if possible. Its own process listens there, dials the endpoints
// and copies bytes, so it needs no privileges, only a way to the pods. It runs on every system.
//
//	kubectl get services,endpointslices -A -o yaml > world.yaml
//	userspace --manifests world.yaml
//
// Userspace reads the manifests, a file or folder in YAML or JSON, again when they change. It prints a table of the
// ports, and prints it again when it changes. A Service without endpoints has no port ("-"), and may get another number
// if another program takes its port. Traffic policies do not apply, because no endpoint is local. Package dataplane
// documents the differences from kernel data planes; above all, endpoints see this machine's address.
//
// The annotation proxier.example/balancer of a Service overrides --balancer. The annotations of nodeproxy (see package
// annotations) have the same meaning here: weights of endpoints, and a hash that overrides any load balancer. With a
// hash, or source-hash, all machines choose the same endpoints, including nodes with nodeproxy in mode nftables.
//
// To serve a node in this way, use nodeproxy run --proxy-mode userspace.
//
// This is a whole program on the library's exported API: a hook of the tracker chooses ports and load balancers.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// annotation chooses a Service's load balancer.
	annotation = "proxier.example/balancer"
	// sourceHash is the load balancer that sends a client to one endpoint.
	sourceHash = "source-hash"
	// poll is the interval for checking the manifests, which reads the files' times, and for retrying
	// what failed.
	poll = 500 * time.Millisecond
)

// balancers are the names of the load balancers, the default first.
var balancers = []string{string(dataplane.WeightedRoundRobin), string(dataplane.RoundRobin), string(dataplane.LeastConnections), sourceHash}

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
func run(ctx context.Context, args []string, out, diag io.Writer) error {
	f := pflag.NewFlagSet("userspace", pflag.ContinueOnError)
	f.SetOutput(diag)
	path := f.String("manifests", "", "file or folder with Services and EndpointSlices (required)")
	usual := f.String("balancer", balancers[0], fmt.Sprintf("load balancer, one of %v", balancers))
	drain := f.Duration("drain", 30*time.Second, "how long connections may continue after their endpoint is removed or the process is stopped")
	verbose := f.Bool("verbose", false, "log endpoints that cannot be reached")
	if err := f.Parse(args); err != nil {
		return err
	}
	switch {
	case f.NArg() != 0:
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	case *path == "":
		return errors.New("--manifests is required")
	case *drain < 0:
		return errors.New("--drain is negative")
	case !slices.Contains(balancers, *usual):
		return fmt.Errorf("unknown load balancer %q, want one of %v", *usual, balancers)
	}
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(diag, &slog.HandlerOptions{Level: level}))
	// The objects are the operator's own, so every annotation of this project is allowed.
	// Cilium's is not: it changes the weight of all endpoints without one to 100. Nor are those of
	// mode ipvs.
	choice, err := annotations.NewReader(slices.DeleteFunc(annotations.Known(), func(name string) bool {
		return name == annotations.CiliumWeight || strings.HasPrefix(name, "ipvs-")
	}))
	if err != nil {
		return err
	}
	w := &world{
		reader: manifests.NewReader(*path), services: map[types.NamespacedName]*v1.Service{}, log: log,
		ports: map[tracker.ServicePortName]uint16{}, taken: map[port]bool{},
	}
	w.Tracker, err = tracker.New(tracker.Config{OnEndpoint: choice.OnEndpoint, Log: log,
		OnService: func(s *v1.Service, sp *v1.ServicePort, p *tracker.ServicePort) error {
			err := errors.Join(w.place(p, cmp.Or(s.Annotations[annotation], *usual)), choice.OnService(s, sp, p))
			if p.Ext.(settings).balancer == sourceHash {
				p.Hash = tracker.HashSource
			}
			return err
		}})
	if err != nil {
		return err
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: w.Tracker, Log: log})
	if err != nil {
		return err
	}
	backend := dataplane.New(dataplane.Config{
		Drain: cmp.Or(*drain, -1), // immediately
		Log:   log,
		Algorithm: func(s *ruleset.Port) dataplane.Algorithm {
			return dataplane.Algorithm(s.Spec.Ext.(settings).balancer)
		},
	})
	cursor := engine.Attach("userspace", backend)
	if err := w.read(); err != nil {
		return err
	}
	w.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for failure, printed := "", ""; ctx.Err() == nil; {
		err := cursor.Sync(ctx)
		if w.avoid(err) {
			continue
		}
		if t := table(engine.Snapshot(), backend.Listens); t != printed {
			fmt.Fprintln(out, t)
			printed = t
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
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), *drain)
	defer cancel()
	if err := backend.Shutdown(end); err != nil {
		log.Info("reset the remaining connections")
	}
	return nil
}

// settings is this program's extension of a Service port: its load balancer, and its own port.
type settings struct {
	balancer string
	port     uint16
}

// Equal implements [tracker.Extension].
func (s settings) Equal(o tracker.Extension) bool { return o == s }

// port is a port of the loopback addresses.
type port struct {
	proto  v1.Protocol
	number uint16
}

// world holds the objects of the manifests, and assigns Service ports their ports on the loopback addresses. Only a
// listen call shows whether another program uses a port.
type world struct {
	*tracker.Tracker
	reader   *manifests.Reader
	services map[types.NamespacedName]*v1.Service
	log      *slog.Logger
	ports    map[tracker.ServicePortName]uint16
	// taken holds the ports that a Service port or another program uses.
	taken map[port]bool
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

// place moves a Service port to the loopback address of its family. It removes all other addresses and the traffic
// policies. The tracker logs the error and leaves the Service out.
func (w *world) place(p *tracker.ServicePort, balancer string) error {
	p.Ext = settings{balancer, p.Port}
	if !slices.Contains(balancers, balancer) {
		return fmt.Errorf("unknown load balancer %q, want one of %v", balancer, balancers)
	}
	number, err := w.assign(p.Key.ServicePortName, p.Port)
	p.ClusterIP = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if p.Key.Family == tracker.IPv6 {
		p.ClusterIP = netip.IPv6Loopback()
	}
	p.Port, p.NodePort, p.HealthCheckNodePort = number, 0, 0
	p.ExternalIPs, p.LoadBalancerIPs, p.SourceRanges = nil, nil, nil
	p.InternalLocal, p.ExternalLocal = false, false
	return err
}

// assign returns a Service port's port: its own if that is free and needs no privileges, or else the next free one from
// there or, for 80, from 10080. It stays the same until avoid finds that another program uses it.
func (w *world) assign(name tracker.ServicePortName, own uint16) (uint16, error) {
	if n, ok := w.ports[name]; ok {
		return n, nil
	}
	first := int(own)
	if own < 1024 {
		first += 10000
	}
	for n := first; n < min(first+2000, 65536); n++ {
		if p := (port{name.Protocol, uint16(n)}); !w.taken[p] {
			w.taken[p], w.ports[name] = true, p.number
			return p.number, nil
		}
	}
	return 0, fmt.Errorf("no free port on the loopback address from %d on", first)
}

// avoid gives Services another port if another program uses theirs, which is an error of a sync. It reports whether
// there are any.
func (w *world) avoid(err error) (again bool) {
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) {
		return false
	}
	for key, err := range partial.Failed {
		// On Windows the error has another number, so every failure to listen counts.
		if !errors.Is(err, syscall.EADDRINUSE) && runtime.GOOS != "windows" {
			continue
		}
		again = true
		w.log.Info("port is in use by another program, choosing another port", "service", key.NamespacedName)
		delete(w.ports, key.ServicePortName)
		if s := w.services[key.NamespacedName]; s != nil {
			w.SetService(s) // calls the hook again
		}
	}
	return again
}

// table returns a table of Service ports with their addresses. A Service port without a
// socket has no address, because another program may listen there.
func table(s *ruleset.Snapshot, listens func(netip.AddrPort, v1.Protocol) bool) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "SERVICE\tPORT\tLOCAL ADDRESS\tENDPOINTS")
	for _, c := range s.Delta().Changes { // in the order of the keys
		svc := c.New
		if svc.Key.Protocol == v1.ProtocolSCTP {
			continue
		}
		for _, f := range svc.Frontends {
			at := netip.AddrPortFrom(f.Addr, f.Port)
			where := "-"
			if listens(at, svc.Key.Protocol) {
				where = at.String()
			}
			fmt.Fprintf(w, "%s\t%d/%s\t%s\t%d\n", svc.Key.ServicePortName, svc.Spec.Ext.(settings).port, svc.Key.Protocol, where, len(svc.Pool(f.Internal)))
		}
	}
	w.Flush()
	return b.String()
}
