package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
)

// fullSyncPeriod is how often the agent compares and repairs everything, as kube-proxy
// does.
const fullSyncPeriod = time.Hour

// connect attaches the data plane and the followers to the engine. The runner syncs them
// when the engine has a change.
func (a *agent) connect() (err error) {
	a.rules = a.engine.Attach(a.cfg.Mode, ruleset.WithLimitsOf(a.kernel.get().plane, ruleset.BackendFunc(a.applyAndFlush)))
	a.rules.OnSync(a.onSync)
	a.followers = []*ruleset.Cursor{a.engine.Attach("health", a.ports), a.engine.Attach("metrics", a.metrics)}
	if a.sockets != nil {
		a.socketRules = a.engine.Attach("socketlb", a.sockets)
		a.followers = append(a.followers, a.socketRules)
	}
	a.runner, err = runner.New(runner.Config{
		Min:    a.cfg.MinSyncPeriod,
		Pace:   a.cfg.Pace,
		Retry:  a.cfg.SyncPeriod,
		Max:    max(fullSyncPeriod, a.cfg.MinSyncPeriod, a.cfg.Pace.Most),
		Resync: a.rules.Resync,
		Log:    a.log,
		Trace:  &runner.Trace{Queued: a.queued, SyncStart: a.starting},
	}, a.sync)
	if err != nil {
		return err
	}
	a.engine.Notify(func() {
		now := time.Now()
		a.asked.CompareAndSwap(nil, &now)
		a.runner.Trigger()
	})
	return nil
}

// followSource hands in the objects of the source.
func (a *agent) followSource(ctx context.Context) error { return a.source.follow(ctx, a.world) }

// handIn calls feed, which hands in objects that must be synced together.
func (a *agent) handIn(feed func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	feed()
	a.handedIn()
	a.runner.Trigger() // even without a difference, for the line on standard output
}

// followNode reads the node's addresses regularly while they come from the routing table.
func (a *agent) followNode(ctx context.Context) error {
	defer a.refresh.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.refresh.C:
			a.refreshNode()
		}
	}
}

// starting is the SyncStart function of the [runner.Trace]. Syncs before all objects are
// listed apply nothing and are not counted.
func (a *agent) starting(runner.Info) {
	if a.tracker.Synced() {
		a.metrics.Starting()
	}
}

// runRules syncs the rules. It first waits for a kube-proxy that uses the same objects.
func (a *agent) runRules(ctx context.Context) error {
	if err := a.takeOver.waitTurn(ctx); err != nil {
		return err
	}
	return a.runner.Run(ctx)
}

// sync brings the kernel up to date. An error makes the runner call it again.
func (a *agent) sync(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.upToDate.Store(false)
	asked := a.begin()
	err := ignoreNotSynced(a.rules.Sync(ctx))
	failed := 0
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) {
		failed = len(p.Failed)
	}
	inEffect, listed := err == nil || failed != 0, a.tracker.Synced()
	if listed {
		a.done(inEffect)
	}
	if inEffect {
		a.upToDate.Store(listed)
		for _, c := range a.followers {
			err = errors.Join(err, ignoreNotSynced(c.Sync(ctx)))
		}
		if a.localhost != nil {
			err = errors.Join(err, a.localhost.sync(ctx))
		}
		a.report(listed, failed, asked) // after the followers: everything must be in effect
		if listed {
			a.takeOver.done()
		}
	}
	return errors.Join(err, a.flush(ctx)) // if the flush in applyAndFlush failed
}

// ignoreNotSynced returns err, or nil if the source has not listed all objects yet. Another
// sync follows then.
func ignoreNotSynced(err error) error {
	if errors.Is(err, ruleset.ErrNotSynced) {
		return nil
	}
	return err
}

// applyAndFlush applies a delta and then deletes stale UDP flows.
func (a *agent) applyAndFlush(ctx context.Context, d *ruleset.Delta) error {
	if cleaner := a.kernel.get().cleaner; cleaner != nil {
		return conntrack.After(ruleset.BackendFunc(a.apply), cleaner).Apply(ctx, d)
	}
	return a.apply(ctx, d)
}

// apply applies a delta to the data plane. If a socket is closed, apply replaces the
// backends and requests a full delta.
func (a *agent) apply(ctx context.Context, d *ruleset.Delta) error {
	k := a.kernel.get()
	err := k.plane.Apply(ctx, d)
	if errors.Is(err, os.ErrClosed) && ctx.Err() == nil {
		if failed := a.kernel.replace(ctx, k); failed != nil {
			err = errors.Join(err, failed)
		} else {
			err = fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
	}
	a.appliedDelta(d, err)
	if err == nil && !d.Full && a.observers.changed != 0 {
		a.takeOver.changed()
	}
	return err
}

// flush deletes stale UDP flows. If a socket is closed, flush replaces the backends, and
// the new cleaner takes the Services from a full delta. It does not find the flows of
// Services that were deleted since the last successful flush; those expire.
func (a *agent) flush(ctx context.Context) error {
	k := a.kernel.get()
	if k.cleaner == nil {
		return nil
	}
	err := k.cleaner.Flush(ctx)
	if !errors.Is(err, os.ErrClosed) || ctx.Err() != nil {
		return err
	}
	if failed := a.kernel.replace(ctx, k); failed != nil {
		return errors.Join(err, failed)
	}
	a.resync()
	return nil
}

// resync makes the next sync compare and repair all rules.
func (a *agent) resync() {
	a.rules.Resync()
	a.runner.Trigger()
}

// watchRules repairs the rules when another process altered them.
func (a *agent) watchRules(ctx context.Context) error {
	for {
		k := a.kernel.get()
		err := k.plane.Watch(ctx, a.mode.watch, a.drifted("rules", a.rules))
		if !errors.Is(err, os.ErrClosed) || ctx.Err() != nil {
			return err
		}
		if err := a.kernel.replace(ctx, k); err != nil {
			a.log.Warn("cannot watch the rules", "error", err)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(a.mode.watch):
			}
		}
		a.resync()
	}
}

// drifted returns the function that handles what a backend's Watch finds. what names the
// backend's objects in messages.
func (a *agent) drifted(what string, c *ruleset.Cursor) func(error) {
	var last time.Time
	return func(err error) {
		switch {
		case !a.upToDate.Load():
			return // a sync runs, or failed and will be retried
		case !errors.Is(err, ruleset.ErrNeedFull):
			a.log.Warn("cannot check whether the "+what+" were altered", "error", err)
			return
		}
		a.log.Warn("repairing the "+what, "error", err)
		if time.Since(last) < 10*time.Second {
			a.log.Warn("another process keeps altering the " + what + ": does another agent run in this network namespace?")
		}
		last = time.Now()
		c.Resync()
		a.runner.Trigger()
	}
}
