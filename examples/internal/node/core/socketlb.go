package core

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// watchSocketsInterval is how often the maps and programs of --socket-lb are checked.
const watchSocketsInterval = 10 * time.Second

// SocketLB is the data plane of --socket-lb. With the zero value an agent refuses that flag.
type SocketLB struct {
	// Open opens the data plane. The calling thread is in the node's network namespace.
	Open func(ctx context.Context, c config.SocketLB, families []tracker.Family, log *slog.Logger) (SocketPlane, error)
	// Remove removes what an earlier run left in a folder, and reports whether it left something.
	Remove func(ctx context.Context, dir string) (bool, error)
}

// SocketPlane is an open data plane of --socket-lb.
type SocketPlane interface {
	ruleset.Backend
	dataplane.TrafficReader
	Watch(ctx context.Context, interval time.Duration, drifted func(error)) error
	Close() error
}

// openSockets opens the data plane of --socket-lb, if it is enabled. The part repairs the programs and their maps
// when another process altered them.
func (a *Agent) openSockets(ctx context.Context, p *part) (err error) {
	cfg := a.options.Config.SocketLB
	if !cfg.Enabled {
		p.run = a.removeSockets
		return nil
	}
	if a.options.SocketLB.Open == nil {
		return errors.New("this program has no data plane for --socket-lb: its Options.SocketLB is not set")
	}
	if a.Sockets, err = a.options.SocketLB.Open(ctx, cfg, a.families, a.options.Log); err != nil {
		return err
	}
	p.close = a.Sockets.Close
	p.run = func(ctx context.Context) error {
		return a.Sockets.Watch(ctx, watchSocketsInterval, a.drifted("socket programs", a.socketRules))
	}
	return nil
}

// removeSockets removes the socket programs of an earlier run, which would become outdated.
func (a *Agent) removeSockets(ctx context.Context) error {
	if a.options.SocketLB.Remove == nil || a.options.Foreign {
		return nil
	}
	switch removed, err := a.options.SocketLB.Remove(ctx, a.Config.SocketLB.Dir); {
	case err != nil:
		a.Log.Error("cannot remove the socket programs of an earlier run", "error", err)
	case removed:
		a.Log.Info("removed the socket programs of an earlier run")
	}
	return nil
}
