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

// openSockets opens the data plane of --socket-lb, if it is enabled.
func (a *Agent) openSockets(ctx context.Context) (_ func(), err error) {
	cfg := a.options.Config.SocketLB
	if !cfg.Enabled {
		return nil, nil
	}
	if a.options.SocketLB.Open == nil {
		return nil, errors.New("this program has no data plane for --socket-lb: its Options.SocketLB is not set")
	}
	if a.Sockets, err = a.options.SocketLB.Open(ctx, cfg, a.families, a.options.Log); err != nil {
		return nil, err
	}
	return func() { a.Sockets.Close() }, nil
}

// watchSockets repairs the socket programs and their maps when another process altered
// them. Without --socket-lb it removes the programs of an earlier run, which would become
// outdated.
func (a *Agent) watchSockets(ctx context.Context) error {
	if a.Sockets != nil {
		return a.Sockets.Watch(ctx, watchSocketsInterval, a.drifted("socket programs", a.socketRules))
	}
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
