package core

import (
	"context"
	"errors"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/reset"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// fullSyncPeriod is how often the agent compares and repairs everything, as kube-proxy
// does.
const fullSyncPeriod = time.Hour

// connect attaches the data plane and the followers to the engine. The runner syncs them
// when the engine has a change.
func (a *Agent) connect(_ context.Context, p *part) (err error) {
	var rules ruleset.Backend = a
	if a.cleaner != nil {
		rules = a.cleaner.Wrap(rules)
	}
	if a.resetter != nil {
		rules = a.resetter.Wrap(rules)
	}
	a.rules = a.Engine.Attach(a.Config.Mode, rules)
	a.rules.OnSync(a.onSync)
	a.followers = []*ruleset.Cursor{a.rules.Follow("health", a.ports), a.rules.Follow("metrics", a.metrics)}
	if a.Sockets != nil {
		a.socketRules = a.Engine.Attach("socketlb", a.Sockets)
		a.followers = append(a.followers, a.socketRules)
	}
	a.runner, err = runner.New(runner.Config{
		Min:    a.Config.MinSyncPeriod,
		Pace:   a.Config.Pace,
		Retry:  a.Config.SyncPeriod,
		Max:    max(fullSyncPeriod, a.Config.MinSyncPeriod, a.Config.Pace.Most),
		Resync: a.rules.Resync,
		Log:    a.Log,
		Hooks:  &runner.Hooks{Queued: a.queued, SyncStart: a.Starting},
	}, a.Sync)
	if err != nil {
		return err
	}
	a.retry = time.AfterFunc(time.Hour, a.runner.Trigger)
	a.retry.Stop()
	p.close = closing(func() { a.retry.Stop() })
	a.Engine.Notify(func() {
		if !a.manifests {
			a.handedIn()
		}
		a.takeOver.noticed(time.Now())
		a.runner.Trigger()
	})
	return nil
}

// changedTogether is called after each change of the manifests.
func (a *Agent) changedTogether() {
	a.handedIn()
	a.runner.Trigger() // even without a difference, for the line on standard output
}

// followNode reads the node's addresses regularly: for the Node while they come from the routing
// table, for health checks, and for Service CIDRs, which must not enclose them.
func (a *Agent) followNode(ctx context.Context) error {
	defer a.refresh.Stop()
	checks := time.NewTicker(max(time.Second, a.Config.SyncPeriod))
	defer checks.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.refresh.C:
			a.RefreshNode()
		case <-checks.C:
			a.RefreshServiceCIDRs()
			if err := a.ports.Refresh(ctx); err != nil {
				a.Log.Debug("health-check node ports are not open at all addresses", "error", err)
			}
		}
	}
}

// Starting is the SyncStart function of the [runner.Hooks]. Syncs before all objects are
// listed apply nothing and are not counted.
func (a *Agent) Starting(runner.RunInfo) {
	if a.Tracker.Synced() {
		a.metrics.Starting()
	}
}

// runRules syncs the rules. It first waits for a kube-proxy that uses the same objects.
func (a *Agent) runRules(ctx context.Context) error {
	if err := a.takeOver.waitTurn(ctx); err != nil {
		return err
	}
	return a.runner.Run(ctx)
}

// Sync brings the kernel up to date. An error makes the runner call it again.
func (a *Agent) Sync(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.upToDate = false
	a.begin()
	err := ruleset.SyncAll(ctx, a.rules, a.followers...)
	if errors.Is(err, ruleset.ErrNotSynced) {
		return err // the runner waits
	}
	failed := 0
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) && !runner.IsNotReady(err) { // not of a follower
		failed = len(p.Failed)
	}
	a.Proxy.Done(ruleset.InEffect(err)) // a Service that cannot be programmed does not make the node unhealthy
	if !ruleset.InEffect(err) {
		a.failures, a.failedAt = a.failures+1, time.Now()
		a.repairSoon()
	} else {
		first := !a.everInEffect
		if first || a.drift != nil {
			if err := a.takeOver.mark(); err != nil {
				a.Log.Warn("cannot make the tables for programs that look for kube-proxy's", "error", err)
			}
			select {
			case a.repaired <- struct{}{}:
			default:
			}
		}
		a.upToDate, a.everInEffect, a.failures, a.drift = true, true, 0, nil
		if a.localhost != nil {
			err = errors.Join(err, a.localhost.sync(ctx))
		}
		a.report(failed) // after the followers: everything must be in effect
		if first {
			close(a.inEffect)
		}
	}
	return err
}

// Limits returns the limits of the data plane.
func (a *Agent) Limits(f tracker.Family) ruleset.Limits { return a.plane.Limits(f) }

// Apply applies a delta to the data plane and reports it to the observers.
func (a *Agent) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := a.plane.Apply(ctx, d)
	a.takeOver.applied(d, err)
	a.appliedDelta(d, err)
	return err
}

// drifted returns the function that handles what a backend's Watch finds. what names the
// backend's objects in messages.
func (a *Agent) drifted(what string, c *ruleset.Cursor) func(error) {
	var last time.Time
	return func(err error) {
		needFull := errors.Is(err, ruleset.ErrNeedFull)
		if needFull {
			c.Resync()
		}
		// A sync that runs now may have applied its changes before the check, and then repairs
		// nothing. Wait for its end.
		a.mu.Lock()
		upToDate := a.upToDate
		first := a.drift == nil
		if needFull {
			a.drift = err
			if !upToDate {
				a.repairSoon()
			}
		}
		a.mu.Unlock()
		switch {
		case !upToDate:
			if needFull && first {
				a.Log.Warn("the "+what+" were altered, and the last sync has failed: another one follows soon", "error", err)
			}
			return
		case !needFull:
			a.Log.Warn("cannot check whether the "+what+" were altered", "error", err)
			return
		}
		a.Log.Warn("repairing the "+what, "error", err)
		if time.Since(last) < 10*time.Second {
			a.Log.Warn("another process keeps altering the " + what + ": another agent in this network namespace, or a firewall whose reload deletes all rules, such as firewalld and nftables.service")
		}
		last = time.Now()
		a.runner.Trigger()
	}
}

// repairSoon requests another sync after one has failed, if rules were found altered before or after it: a
// second after the failure, and twice as long after each further one. mu must be held.
func (a *Agent) repairSoon() {
	if a.failures == 0 || a.drift == nil {
		return
	}
	if d := (*dataplane.DriftError)(nil); errors.As(a.drift, &d) {
		a.Proxy.Missing(d.Family)
	}
	wait := min(time.Second<<min(a.failures-1, 10), a.Config.SyncPeriod)
	a.retry.Reset(time.Until(a.failedAt.Add(wait)))
}

// openResetter opens what ends connections to endpoints that vanished. Without the flag it removes the
// table of an earlier run.
func (a *Agent) openResetter(ctx context.Context, p *part) (err error) {
	cfg := a.options.Config
	if cfg.ResetVanished == 0 {
		p.run = a.removeResets
		return nil
	}
	ended, limited := a.metrics.CountResets()
	a.resetter, err = reset.New(ctx, reset.Config{
		NetNS: a.netns, Delay: cfg.ResetVanished, DestroySockets: true, Log: a.options.Log,
		// connect sets a.rules before the parts run.
		Exists: func(at netip.AddrPort) bool { return len(a.rules.LookupEndpoint(at, v1.ProtocolTCP)) != 0 },
		Hooks:  &reset.Hooks{Ended: ended, Limited: limited},
	})
	if err == nil {
		p.run, p.close = a.resetter.Run, a.resetter.Close
	}
	return err
}

func (a *Agent) removeResets(ctx context.Context) error {
	if a.options.Foreign {
		return nil
	}
	if err := reset.Cleanup(ctx, reset.Config{NetNS: a.netns}); err != nil {
		a.Log.Debug("cannot look for the table of an earlier run that ended connections", "error", err)
	}
	return nil
}
