package core

import (
	"context"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/socketlb"
)

// watchSocketsInterval is how often the maps and programs of --socket-lb are checked.
const watchSocketsInterval = 10 * time.Second

// openSockets opens the backend of --socket-lb, if it is enabled. The calling thread must be
// in the node's network namespace.
func (a *Agent) openSockets(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	c := cfg.SocketLB
	if !c.Enabled {
		return nil
	}
	b, err := socketlb.New(ctx, socketlb.Config{
		Cgroup: c.Cgroup, Dir: c.Dir, NodeOnly: c.NodeOnly, Families: a.families, Log: log,
	})
	if err != nil {
		return err
	}
	a.Sockets = b
	a.closers = append(a.closers, func() { b.Close() })
	return nil
}

// watchSockets repairs the socket programs and their maps when another process altered
// them. Without --socket-lb it removes the programs of an earlier run, which would become
// outdated.
func (a *Agent) watchSockets(ctx context.Context) error {
	if a.Sockets == nil {
		return a.removeSockets(ctx)
	}
	return a.Sockets.Watch(ctx, watchSocketsInterval, a.drifted("socket programs", a.socketRules))
}

// removeSockets waits until the rules are in effect and then removes the socket programs.
func (a *Agent) removeSockets(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-a.takeOver.inEffect:
	}
	c := socketlb.Config{Dir: a.Config.SocketLB.Dir}
	if owned, err := socketlb.Owned(ctx, c); !owned || err != nil {
		return nil
	}
	if err := socketlb.Cleanup(ctx, c); err != nil {
		a.Log.Error("cannot remove the socket programs of an earlier run", "error", err)
		return nil
	}
	a.Log.Info("removed the socket programs of an earlier run")
	return nil
}
