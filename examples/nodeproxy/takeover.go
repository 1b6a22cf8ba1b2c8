package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// takeOver removes the rules that another mode or, if adopt is set, kube-proxy left. It
// waits until the rules of the agent's mode are in effect; until then the old rules carry
// the traffic.
type takeOver struct {
	modes []mode
	inUse string // the agent's mode
	adopt bool
	// retry is how long to wait after a failure.
	retry time.Duration
	// failed is called for each failure.
	failed func()
	log    *slog.Logger

	// tidied reports that tidy has removed everything. inEffect is closed then.
	tidied   bool
	inEffect chan struct{}
}

// tidy removes the rules that can be removed at once. After it has succeeded, it does
// nothing.
func (t *takeOver) tidy(ctx context.Context) error {
	if t.tidied {
		return nil
	}
	if err := leftovers(ctx, t.modes, t.inUse, t.adopt, t.log); err != nil {
		t.failed()
		return err
	}
	t.tidied = true
	close(t.inEffect)
	return nil
}

// retireOthers waits for tidy and then retires each mode that has a retire function. It
// retries after failures and returns when ctx is done.
func (t *takeOver) retireOthers(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.inEffect:
	}
	for _, m := range t.modes {
		if m.name == t.inUse || m.retire == nil {
			continue
		}
		for {
			err := m.retire(ctx, m, t.adopt, t.log)
			if err == nil && t.adopt {
				// Chains that only the retired mode's rules used can be removed now, and then
				// the sets that they used.
				err = errors.Join(leftovers(ctx, t.modes, t.inUse, true, t.log), m.cleanupKubeProxy(ctx, t.log))
			}
			if err == nil {
				break
			}
			t.log.Warn("cannot remove the rules of another mode yet", "mode", m.name, "error", err)
			t.failed()
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(t.retry):
			}
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// leftovers removes the rules of every mode except inUse, and kube-proxy's rules if adopt is
// set. It continues after an error. If inUse is "", it removes the rules of all modes;
// otherwise it leaves out modes that have a retire function.
func leftovers(ctx context.Context, modes []mode, inUse string, adopt bool, log *slog.Logger) error {
	var errs []error
	for _, m := range modes {
		if inUse != "" && inUse != m.name && m.retire != nil {
			continue
		}
		if m.name != inUse {
			if err := m.cleanup(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("cannot remove the rules of mode %s: %w", m.name, err))
			}
		}
		if adopt && !(m.takesOver && m.name == inUse) {
			if err := m.cleanupKubeProxy(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("cannot remove kube-proxy's rules of mode %s: %w", m.name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// drainInterval is how often retireIPVS checks whether connections have ended.
const drainInterval = time.Second

// retireIPVS removes mode ipvs without breaking connections. In other modes connection
// tracking keeps established connections; IPVS keeps them itself. Endpoints get no new
// connections, and everything is removed when the last connection has ended.
func retireIPVS(ctx context.Context, m mode, adopt bool, log *slog.Logger) error {
	families := ipvsFamilies(ctx)
	if len(families) == 0 {
		return nil // without IPVS there can be no rules
	}
	if owned, err := m.owned(ctx, log); err != nil || !owned && !adopt {
		return err
	}
	b, err := ipvs.New(ctx, ipvs.Config{Families: families, Log: log, KeepSysctls: true})
	if err != nil {
		return err
	}
	defer b.Close()
	if err := b.Apply(ctx, &ruleset.Delta{Full: true, Node: &ruleset.Node{}}); err != nil {
		return err
	}
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for logged := false; ; logged = true {
		if err := b.Tend(ctx, time.Now()); err != nil {
			return err
		}
		n := b.Draining()
		if n == 0 {
			return m.cleanupKubeProxy(ctx, log) // in every flavour of iptables
		}
		if !logged {
			log.Info("waiting for the last connections of mode ipvs before its rules are removed", "endpoints", n)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// ipvsFamilies returns the address families in which the kernel has IPVS.
func ipvsFamilies(ctx context.Context) []tracker.Family {
	var out []tracker.Family
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if ipvs.Probe(ctx, ipvs.Config{Families: []tracker.Family{f}}) == nil {
			out = append(out, f)
		}
	}
	return out
}
