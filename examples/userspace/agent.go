package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/examples/userspace/vip"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// poll is the interval for checking the manifests. A check reads the files' times.
	poll = 500 * time.Millisecond
	// resync is the interval of full syncs: the node's addresses, which serve NodePorts,
	// may have changed.
	resync = 30 * time.Second
	// retry is the delay before a failed sync is retried, for example because another
	// program uses a port.
	retry = 5 * time.Second
)

// agent programs a data plane according to the manifests.
type agent struct {
	options options
	out     io.Writer
	log     *slog.Logger
	reader  *manifests.Reader
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *dataplane.Backend
	runner  *runner.Runner
	close   func()

	// With --local: the ports, the last Service objects, and the last printed table.
	ports    *localPorts
	updating sync.Mutex // held while objects are passed to the tracker
	services map[types.NamespacedName]*v1.Service
	printed  string
}

func newAgent(o options, out, diag io.Writer) (_ *agent, err error) {
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	a := &agent{
		options: o, out: out, close: func() {},
		log:    slog.New(slog.NewTextHandler(diag, &slog.HandlerOptions{Level: level})),
		reader: manifests.NewReader(o.manifests),
	}
	if err := checkBalancer(o.balancer); err != nil {
		return nil, err
	}
	nodePorts, err := ruleset.ParseNodePortAddresses(o.nodePortAddresses)
	if err != nil {
		return nil, err
	}
	var pods ruleset.LocalTraffic
	for _, c := range o.clusterCIDRs {
		p, err := netip.ParsePrefix(c)
		if err != nil {
			return nil, fmt.Errorf("--cluster-cidr: %w", err)
		}
		pods.CIDRs = append(pods.CIDRs, p)
	}

	// The objects are the operator's own, so every annotation of this project is allowed.
	// Cilium's is not: it changes the weight of all endpoints without one to 100. Nor are those of
	// mode ipvs.
	choice, err := annotations.NewReader(slices.DeleteFunc(annotations.Known(), func(name string) bool {
		return name == annotations.CiliumWeight || strings.HasPrefix(name, "ipvs-")
	}))
	if err != nil {
		return nil, err
	}
	hook := func(s *v1.Service, port *v1.ServicePort, p *tracker.ServicePort) error {
		return errors.Join(setBalancer(s, p, o.balancer), choice.OnService(s, port, p))
	}
	// With --local a hook moves Service ports; otherwise the node gets their addresses.
	var addresses dataplane.Addresses
	if o.local {
		a.ports, a.services = newLocalPorts(), map[types.NamespacedName]*v1.Service{}
		inCluster := hook
		hook = func(s *v1.Service, port *v1.ServicePort, p *tracker.ServicePort) error {
			return errors.Join(inCluster(s, port, p), a.ports.place(p))
		}
	} else {
		if o.nodeName == "" {
			if o.nodeName, err = os.Hostname(); err != nil {
				return nil, err
			}
		}
		own, err := vip.New()
		if err != nil {
			return nil, fmt.Errorf("%w (--local works everywhere)", err)
		}
		a.close = func() { own.Close() }
		addresses = own
	}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	a.options = o

	a.tracker, err = tracker.New(tracker.Config{
		Node:      tracker.NodeInfo{Name: o.nodeName, Zone: o.zone},
		OnService: hook, OnEndpoint: choice.OnEndpoint,
		Log: a.log,
	})
	if err != nil {
		return nil, err
	}
	a.engine, err = ruleset.NewEngine(ruleset.Config{
		Source: a.tracker, LocalTraffic: pods, NodePortAddresses: nodePorts, Log: a.log,
	})
	if err != nil {
		return nil, err
	}
	a.backend, err = dataplane.New(dataplane.Config{
		Addresses: addresses, Algorithm: algorithm,
		DialTimeout: o.dialTimeout, Drain: o.drain, UDPTimeout: o.udpTimeout,
		MaxConnections: o.maxConnections, MaxSessions: o.maxSessions,
		Log: a.log,
	})
	if err != nil {
		return nil, err
	}
	a.cursor = a.engine.Attach("userspace", a.backend)
	a.runner, err = runner.New(runner.Config{Retry: retry, Max: resync, Resync: a.cursor.Resync, Log: a.log}, a.sync)
	if err != nil {
		return nil, err
	}
	a.engine.Notify(a.runner.Trigger)

	if err := a.read(); err != nil {
		return nil, err
	}
	a.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return a, nil
}

// run serves until ctx is done, and then waits for connections to end.
func (a *agent) run(ctx context.Context) error {
	defer a.close()
	a.log.Info("serving", "manifests", a.options.manifests, "node", a.options.nodeName, "local", a.options.local)
	var wg sync.WaitGroup
	wg.Go(func() { a.follow(ctx) })
	a.runner.Run(ctx) // returns when ctx is done
	wg.Wait()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(0, a.options.drain))
	defer cancel()
	if err := a.backend.Shutdown(end); err != nil {
		a.log.Info("reset the remaining connections")
	}
	return nil
}

// follow reads the manifests after each change.
func (a *agent) follow(ctx context.Context) {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	last := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		text := ""
		if err := a.read(); err != nil { // the earlier objects stay in use
			if text = err.Error(); text != last {
				a.log.Error("cannot read the manifests", "error", err)
			}
		}
		last = text
	}
}

// read passes changes of the manifests to the tracker.
func (a *agent) read() error {
	c, err := a.reader.Read()
	if err != nil {
		return err
	}
	for _, p := range c.Problems {
		a.log.Warn("manifest skipped", "problem", p)
	}
	a.updating.Lock()
	defer a.updating.Unlock()
	for _, o := range c.Set {
		switch v := o.Value.(type) {
		case *v1.Service:
			if a.services != nil {
				a.services[types.NamespacedName{Namespace: v.Namespace, Name: v.Name}] = v
			}
			a.tracker.SetService(v)
		case *discovery.EndpointSlice:
			a.tracker.SetSlice(v)
		case *v1.Node:
			if v.Name == a.options.nodeName {
				a.tracker.SetNode(tracker.NodeInfoOf(v))
			}
		}
	}
	for _, gone := range c.Gone {
		switch gone.Kind {
		case manifests.Service:
			delete(a.services, gone.NamespacedName)
			a.tracker.DeleteService(gone.NamespacedName)
		case manifests.EndpointSlice:
			a.tracker.DeleteSlice(gone.NamespacedName)
		}
	}
	return nil
}

// sync brings the data plane up to date.
func (a *agent) sync(ctx context.Context) error {
	err := a.cursor.Sync(ctx)
	if a.ports == nil {
		return err
	}
	again, err := a.ports.avoid(err)
	for _, name := range again {
		a.log.Info("port is in use by another program, choosing another port", "service", name)
		a.updating.Lock()
		if s := a.services[name]; s != nil {
			a.tracker.SetService(s) // calls the hook again, and requests another sync
		}
		a.updating.Unlock()
	}
	if len(again) == 0 {
		a.show()
	}
	return err
}

// show prints the table if it changed.
func (a *agent) show() {
	if t := table(a.engine.Snapshot(), a.backend.Listens); t != a.printed {
		fmt.Fprintln(a.out, t)
		a.printed = t
	}
}
