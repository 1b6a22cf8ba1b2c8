package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// drainInterval is how often to look whether connections have ended.
const drainInterval = time.Second

// retireIPVS takes mode ipvs out of service without ending connections, which other
// modes leave to the kernel's connection tracking but IPVS keeps itself: endpoints
// get no new ones, and when the last has ended everything is removed. It may take
// as long as somebody keeps a connection.
func retireIPVS(ctx context.Context, families []tracker.Family, log *slog.Logger) error {
	b, err := ipvs.New(ipvs.Config{Families: families, Log: log, KeepSysctls: true})
	if err != nil {
		return err
	}
	defer b.Close()
	if err := b.Apply(ctx, &ruleset.Delta{Full: true, Node: &ruleset.Node{}}); err != nil {
		return err
	}
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for said := false; ; said = true {
		if err := b.Tend(ctx, time.Now()); err != nil {
			return err
		}
		n := b.Draining()
		if n == 0 {
			return cleanupIPVS(ctx, log)
		}
		if !said {
			log.Info("mode ipvs goes when its last connections have ended", "endpoints", n)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// retireOthers does so, once the rules are in effect, for each mode that was in use
// before and needs it, and tries again what fails.
func (a *agent) retireOthers(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-a.inEffect:
	}
	for _, m := range a.modes {
		if m.name == a.cfg.Mode || m.retire == nil {
			continue
		}
		for {
			err := m.retire(ctx, a.cfg.Adopt, a.log)
			if err == nil && a.cfg.Adopt {
				// What only its rules led to can go now, and then the sets that this matched.
				err = errors.Join(leftovers(ctx, a.modes, a.cfg.Mode, true, a.log), m.cleanupKubeProxy(ctx, a.log))
			}
			if err == nil {
				break
			}
			a.log.Warn("cannot remove rules of another mode yet", "mode", m.name, "error", err)
			a.metrics.CleanupFailed()
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(a.cfg.SyncPeriod):
			}
		}
	}
	<-ctx.Done()
	return ctx.Err()
}
