package core

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

type part struct {
	name string
	// needs names the parts that open uses. They stand before this one.
	needs []string
	// open opens what can fail, on a thread in the agent's network namespace. It changes no rule and no
	// parameter. It may set run and close, which closes the part.
	open  func(context.Context, *part) error
	close func() error
	// run runs until its context ends or an error ends the agent. With inside, it runs on a thread in the
	// agent's network namespace. With later, it starts when the rules are in effect.
	run           func(context.Context) error
	inside, later bool
}

// parts returns the parts of the agent in the order in which they are opened. They are closed in the
// reverse order. What may fail because privileges or features of the kernel are missing, or because
// another agent runs, comes before what waits for the API server, except in modes that need the Node.
func (a *Agent) parts() []part {
	e, need := a.options.Config.Effective, func(names ...string) []string { return names }
	return []part{
		{name: "configuration file", run: a.watchConfig},
		{name: "addresses", open: a.openAddresses},
		{name: "source", open: a.openSource},
		{name: "node", needs: need("addresses", "source"), open: a.openNode},
		{name: "observers", needs: need("node"), open: a.openObservers},
		{name: "events", needs: need("source", "observers"), open: a.openEvents},
		a.server(healthzServer, e.HealthzBindAddress, reasonHealthzFailed, a.HealthzHandler),
		a.server(metricsServer, e.MetricsBindAddress, reasonMetricsFailed, a.MetricsHandler),
		a.server(readyzServer, a.options.Config.ReadyzBindAddress, reasonHealthzFailed, a.HealthzHandler),
		{name: "namespace", open: a.openNamespace},
		{name: "data plane", needs: need("node", "observers", "namespace"), open: a.openPlane, inside: true},
		{name: "stale flows", needs: need("observers", "namespace"), open: a.openCleaner},
		{name: "unanswered connections", needs: need("stale flows"), run: a.endUnanswered},
		{name: "resets", needs: need("observers", "namespace"), open: a.openResetter, inside: true, later: true},
		{name: "socket programs", needs: need("observers"), open: a.openSockets, inside: true, later: true},
		{name: "objects", needs: need("addresses", "source", "events"), open: a.openWorld, run: a.followNode, inside: true},
		{name: "startup taint", needs: need("objects"), open: a.openTaint, later: true},
		{name: "take-over", needs: need("namespace", "data plane", "objects"), open: a.openTakeOver, inside: true, later: true},
		{name: "rules", needs: need("data plane", "stale flows", "resets", "socket programs", "objects", "take-over"), open: a.connect, run: a.runRules, inside: true},
		{name: "loopback NodePorts", needs: need("objects", "rules"), open: a.openLocalhost},
		{name: "registry", needs: need("data plane", "resets", "loopback NodePorts"), open: a.register},
	}
}

// open opens the parts. The caller closes those that are open after an error, too.
func (a *Agent) open(ctx context.Context) (err error) {
	if a.mode, err = modes.Find(a.options.Modes, a.options.Config.Mode); err != nil {
		return err
	}
	a.list = a.parts()
	for i := range a.list {
		if p := &a.list[i]; p.open != nil {
			if err := p.open(ctx, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// loop runs a part as its fields require.
func (a *Agent) loop(ctx context.Context, p *part) error {
	if p.later {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.inEffect:
		}
	}
	if !p.inside {
		return p.run(ctx)
	}
	return a.options.Within(func() error { return p.run(ctx) })
}

// Close closes everything and leaves the rules in place.
func (a *Agent) Close() {
	for i := range slices.Backward(a.list) {
		if p := &a.list[i]; p.close != nil {
			func() {
				defer recovered(func(err error) { a.options.Log.Error("cannot close", "error", err) }) // of a Backend, or a Registerer
				_ = p.close()
				p.close = nil
			}()
		}
	}
}

func (a *Agent) openAddresses(_ context.Context, p *part) (err error) {
	var stop func()
	if a.own, a.ranges, stop, err = objects.OpenAddresses(); err == nil {
		p.close = closing(stop)
	}
	return err
}

func (a *Agent) openSource(_ context.Context, p *part) (err error) {
	a.source, a.client = a.options.Source, a.options.Client
	if a.source == nil {
		if a.source, a.client, err = objects.NewSource(a.options.Config, a.client, a.options.Log); err != nil {
			return err
		}
	}
	p.run = func(ctx context.Context) error { return a.source.Follow(ctx, a.World) }
	p.close = closing(a.source.Close)
	return nil
}

// openNode reads what a mode with NeedsNode needs, and finds the families that the node can serve.
func (a *Agent) openNode(ctx context.Context, _ *part) (err error) {
	cfg := a.options.Config
	if a.mode.NeedsNode {
		if a.node, err = a.source.Node(ctx, objects.NeedOf(cfg)); err != nil {
			return err
		}
		if a.nodeIPs = objects.NodeInfo(cfg, a.node).Addresses; len(a.nodeIPs) == 0 {
			if a.nodeIPs, err = a.own(); err != nil {
				return err
			}
		}
	}
	a.families, err = modes.ServedFamilies(ctx, a.mode, modes.Settings{Config: cfg, NodeIPs: a.nodeIPs}, a.options.Log)
	return err
}

func (a *Agent) openObservers(context.Context, *part) (err error) {
	a.observers, err = newObservers(&a.options, a.families)
	return err
}

func (a *Agent) openEvents(_ context.Context, p *part) error {
	switch {
	case a.options.Events != nil:
		a.events = &guardedEvents{EventSink: a.options.Events, log: a.options.Log}
	case a.client != nil:
		r := kubeapi.NewRecorder(a.client.Core, a.options.Component, a.options.Config.NodeName, a.options.Log)
		a.events = r
		p.close = closing(r.Shutdown)
	}
	return nil
}

// closing returns f as a part's close.
func closing(f func()) func() error {
	return func() error {
		f()
		return nil
	}
}

// server returns the part of a server that listens at an address, if there is one. If it must not fail, it
// listens before the kernel's rules change: an agent that is started beside another one, which has the
// ports, fails before it has changed a rule.
func (a *Agent) server(name, addr, reason string, handler func() http.Handler) part {
	out := part{name: name, needs: []string{"events"}}
	if addr == "" || !a.options.Serve {
		return out
	}
	out.open = func(ctx context.Context, p *part) (err error) {
		s := &server{
			name: name, addr: addr, connections: a.limits.Requests, hardFail: a.options.Config.Effective.BindAddressHardFail,
			listen: a.options.listen, log: a.options.Log, failed: func(err error) { a.nodeEvent(true, reason, err.Error()) },
		}
		p.run = func(ctx context.Context) error {
			s.handler = handler()
			return s.run(ctx)
		}
		if !s.hardFail {
			return nil
		}
		if s.listener, err = s.listen(ctx, "tcp", addr); err != nil {
			err = fmt.Errorf("%s at %s: %w", name, addr, err)
			s.failed(err)
			return err
		}
		p.close = s.listener.Close
		return nil
	}
	return out
}

func (a *Agent) openNamespace(_ context.Context, p *part) (err error) {
	if a.netns, err = openNetNS(); err == nil {
		p.close = a.netns.Close
	}
	return err
}

func (a *Agent) openPlane(ctx context.Context, p *part) (err error) {
	a.clients = sync.OnceValue(func() takeover.Clients {
		c, err := takeover.ReadClients(a.netns)
		if err != nil {
			a.options.Log.Warn(unknownClients, "error", err)
		}
		return c
	})
	a.plane, err = a.mode.Open(ctx, modes.Settings{
		Config: a.options.Config, Families: a.families, NodeIPs: a.nodeIPs, NetNS: a.netns, Limits: a.limits,
		Clients: func(k tracker.Key, at netip.AddrPort) map[netip.Addr]time.Duration { return a.clients().Of(k, at) },
		Dial:    a.options.dialTo, Rules: a.metrics.Rules, LoadBalancerFailed: a.metrics.LoadBalancerFailed, LimitExceeded: a.limitExceeded, Log: a.options.Log,
	})
	if err != nil {
		return err
	}
	p.run = func(ctx context.Context) error { return a.plane.Watch(ctx, a.mode.Watch, a.drifted("rules", a.rules)) }
	p.close = a.plane.Close
	if a.plane.Counters != nil {
		a.metrics.WatchCounters(a.plane.Counters)
	}
	if a.options.Config.TrafficMetrics {
		a.watchTraffic()
	}
	return nil
}

// openCleaner opens what deletes stale UDP flows after syncs, which do not wait for it.
func (a *Agent) openCleaner(ctx context.Context, p *part) (err error) {
	if !a.mode.TracksConnections {
		return nil
	}
	c, err := conntrack.New(ctx, conntrack.Config{NetNS: a.netns, Log: a.options.Log, Hooks: &conntrack.Hooks{FlushedFamily: a.metrics.Flushed}})
	if err != nil {
		return optional("cannot delete stale UDP flows", err, a.options.Log)
	}
	a.cleaner, p.run, p.close = c, c.Run, c.Close
	return nil
}

// optional logs an error about what the system lacks, which the agent does without, and returns any
// other. It may pass, so that the next start has the feature.
func optional(message string, err error, log *slog.Logger) error {
	if !errors.Is(err, dataplane.ErrUnsupported) {
		return err
	}
	log.Warn(message, "error", err)
	return nil
}

// openWorld opens the objects and the engine.
func (a *Agent) openWorld(ctx context.Context, _ *part) (err error) {
	cfg, log := a.options.Config, a.options.Log
	if !a.mode.NeedsNode {
		if a.node, err = a.source.Node(ctx, objects.NeedOf(cfg)); err != nil {
			return err
		}
	}
	if cfg.Manifests == "" || a.options.Source != nil || a.node != nil {
		// With an API server /healthz waits for the Node object, as kube-proxy's does.
		a.Proxy.SetIneligible(health.WhyIneligible(a.node))
	}
	hooks := objects.WorldHooks{
		Own:    a.own,
		Ranges: a.ranges,
		OwnInUse: func(err error) {
			wait := time.Second
			if err == nil {
				wait = max(wait, cfg.SyncPeriod)
			}
			a.refresh.Reset(wait)
		},
		Overlap:        func(message string) { a.nodeEvent(true, reasonServiceCIDROverlap, message) },
		OnService:      a.mode.OnService,
		Events:         a.events,
		ReceiveService: a.metrics.ReceiveService,
		ReceiveSlice:   a.metrics.ReceiveSlice,
		APIServer:      objects.FindAPIAddresses(ctx, a.client, log),
		Contact:        a.metrics.Contact,
		Ineligible:     a.Proxy.SetIneligible,
		OverBudget:     a.metrics.OverBudget,
		LeftOut:        a.metrics.LeftOut,
		HandedIn:       a.changedTogether,
		Panicked:       func(p any) { a.Failed(panicError(p)) },
	}
	if a.client != nil && cfg.StartupTaint != "" {
		a.taint = &startupTaint{key: cfg.StartupTaint, remove: a.client.RemoveTaint, event: a.nodeEvent, log: log, wake: make(chan struct{}, 1)}
		hooks.Node = a.taint.observe
	}
	a.World, err = objects.New(cfg, a.families, a.node, hooks, log)
	return err
}

func (a *Agent) openTaint(_ context.Context, p *part) error {
	if a.taint != nil {
		p.run = a.taint.run
	}
	return nil
}

func (a *Agent) openTakeOver(_ context.Context, p *part) error {
	a.takeOver = newTakeOver(a)
	p.run = a.takeOver.run
	if a.plane.Powerless && a.options.Config.Adopt {
		a.options.Log.Warn("--adopt-from-kube-proxy has no effect without CAP_NET_ADMIN")
	}
	return nil
}

// register adds the metrics to the program's registry. All of them exist by now.
func (a *Agent) register(_ context.Context, p *part) error {
	if a.options.Registerer == nil {
		return nil
	}
	to := prometheus.WrapRegistererWith(a.options.Labels, a.options.Registerer)
	if err := to.Register(a.metrics.Registry()); err != nil {
		return fmt.Errorf("cannot register metrics: %w", err)
	}
	p.close = closing(func() { to.Unregister(a.metrics.Registry()) })
	return nil
}
