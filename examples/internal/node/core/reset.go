package core

import (
	"context"
	"log/slog"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack/reset"
	"github.com/go-proxier/proxier/examples/internal/node/config"
)

// openResetter opens what ends connections to endpoints that vanished.
func (a *Agent) openResetter(ctx context.Context, cfg *config.Config, log *slog.Logger) (err error) {
	ended, limited := a.metrics.CountResets()
	a.resetter, err = reset.New(ctx, reset.Config{
		NetNS: a.netns, Delay: cfg.ResetVanished, DestroySockets: true, Log: log,
		// connect sets a.rules before the loops run.
		Exists: func(at netip.AddrPort) bool { return len(a.rules.LookupEndpoint(at, v1.ProtocolTCP)) != 0 },
		Hooks:  &reset.Hooks{Ended: func(i reset.Group) { ended(i.Endpoints, i.Sockets) }, Limited: limited},
	})
	if err == nil {
		a.closers = append(a.closers, func() { a.resetter.Close() })
	}
	return err
}

// resetConnections ends connections to endpoints that vanished. Without the flag it removes the
// table of an earlier run when the rules are in effect.
func (a *Agent) resetConnections(ctx context.Context) error {
	if a.resetter != nil {
		return a.resetter.Run(ctx)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-a.takeOver.inEffect:
	}
	if err := reset.Cleanup(ctx, reset.Config{NetNS: a.netns}); err != nil {
		a.Log.Debug("cannot look for the table of an earlier run that ended connections", "error", err)
	}
	return nil
}
