package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/ruleset"
)

// watchSocketsInterval is how often everything that the socket programs use is read.
const watchSocketsInterval = 10 * time.Second

// openSockets makes the follower that translates connections at the socket, with
// --socket-lb. The calling thread must be in the node's network namespace.
func (a *agent) openSockets(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
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
	a.sockets = b
	a.closers = append(a.closers, b)
	return nil
}

// watchSockets repairs the socket programs and their maps when another process altered
// them. Without --socket-lb it removes, once the rules are in effect, what a run with it has
// left: nothing would keep that up to date.
func (a *agent) watchSockets(ctx context.Context) error {
	if a.sockets == nil {
		return a.removeSockets(ctx)
	}
	return a.sockets.Watch(ctx, watchSocketsInterval, func(err error) {
		switch {
		case !a.upToDate.Load():
			return // a sync runs, or failed and will be tried again
		case !errors.Is(err, ruleset.ErrNeedFull):
			a.log.Warn("cannot check whether the socket programs were altered", "error", err)
			return
		}
		a.log.Warn("repairing the socket programs", "error", err)
		a.socketRules.Resync()
		a.runner.Trigger()
	})
}

func (a *agent) removeSockets(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-a.takeOver.inEffect:
	}
	c := socketlb.Config{Dir: a.cfg.SocketLB.Dir}
	if owned, err := socketlb.Owned(ctx, c); !owned || err != nil {
		return nil
	}
	if err := socketlb.Cleanup(ctx, c); err != nil {
		a.log.Error("cannot remove the socket programs of an earlier run", "error", err)
		return nil
	}
	a.log.Info("removed the socket programs of an earlier run")
	return nil
}
