package sockets

import (
	"context"
	"log/slog"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/tracker"
)

// LB returns the data plane of --socket-lb for [agent.Options].
func LB() agent.SocketLB {
	return agent.SocketLB{
		Open: func(ctx context.Context, c config.SocketLB, families []tracker.Family, log *slog.Logger) (core.SocketPlane, error) {
			b, err := socketlb.New(ctx, socketlb.Config{Cgroup: c.Cgroup, Dir: c.Dir, NodeOnly: c.NodeOnly, Families: families, Log: log})
			if err != nil {
				return nil, err
			}
			return b, nil
		},
		Remove: func(ctx context.Context, dir string) (bool, error) {
			c := socketlb.Config{Dir: dir}
			if owned, err := socketlb.Owned(ctx, c); !owned || err != nil {
				return false, nil
			}
			return true, socketlb.Cleanup(ctx, c)
		},
	}
}

// Cleanup removes the programs that a run with --socket-lb left. [agent.Cleanup] does not
// remove them. Cleanup does nothing without such programs.
func Cleanup(ctx context.Context) error {
	return socketlb.Cleanup(ctx, socketlb.Config{})
}
