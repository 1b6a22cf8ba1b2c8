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

// takeOver removes, once the rules of the agent's mode are in effect, those that another
// mode or, if adopt is set, kube-proxy has left. Until then they carry the traffic.
type takeOver struct {
	modes []mode
	inUse string // the agent's mode
	adopt bool
	// retry is how long to wait after a failure.
	retry time.Duration
	// failed is called for each failure.
	failed func()
	log    *slog.Logger

	// tidied reports that everything is removed that can be removed at once. inEffect is
	// closed then.
	tidied   bool
	inEffect chan struct{}
}

// tidy removes what can be removed at once, the first time that it succeeds.
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

// retireOthers retires, after tidy, each mode that needs it, and tries again what fails.
// It returns when ctx is done.
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
				// Rules that only the retired mode's rules led to can be removed now, and then
				// the sets that those matched.
				err = errors.Join(leftovers(ctx, t.modes, t.inUse, true, t.log), m.cleanupKubeProxy(ctx, t.log))
			}
			if err == nil {
				break
			}
			t.log.Warn("cannot remove rules of another mode yet", "mode", m.name, "error", err)
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

// leftovers removes the rules of every mode except the one in use, "" for none, and
// kube-proxy's if adopt is set. It goes on after an error. It leaves out modes that retire
// unless none is in use.
func leftovers(ctx context.Context, modes []mode, inUse string, adopt bool, log *slog.Logger) error {
	var errs []error
	for _, m := range modes {
		if inUse != "" && inUse != m.name && m.retire != nil {
			continue
		}
		if m.name != inUse {
			if err := m.cleanup(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("rules of mode %s: %w", m.name, err))
			}
		}
		if adopt && !(m.takesOver && m.name == inUse) {
			if err := m.cleanupKubeProxy(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("kube-proxy's rules of mode %s: %w", m.name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// drainInterval is how often retireIPVS checks whether connections have ended.
const drainInterval = time.Second

// retireIPVS removes mode ipvs without breaking connections. In other modes the kernel's
// connection tracking keeps them, but IPVS keeps them itself. Endpoints get no new
// connections, and everything is removed when the last connection has ended.
func retireIPVS(ctx context.Context, m mode, adopt bool, log *slog.Logger) error {
	families := ipvsFamilies(ctx)
	if len(families) == 0 {
		return nil // there can be nothing
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
			log.Info("mode ipvs goes when its last connections have ended", "endpoints", n)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// ipvsFamilies returns the address families in which IPVS may have connections: those in
// which it can be used.
func ipvsFamilies(ctx context.Context) []tracker.Family {
	var out []tracker.Family
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if ipvs.Probe(ctx, ipvs.Config{Families: []tracker.Family{f}}) == nil {
			out = append(out, f)
		}
	}
	return out
}
