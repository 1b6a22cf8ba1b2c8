// Package sockets gives an [agent.Agent] the data plane of --socket-lb, which is package
// socketlb. It is a separate package because it depends on github.com/cilium/ebpf:
//
//	a, err := agent.New(ctx, agent.Options{Config: c, SocketLB: sockets.LB()})
//
// An Agent without it refuses --socket-lb. One with it also removes the programs that an earlier run
// with --socket-lb left, after its rules are in effect.
//
// Like package agent, this package is meant to be imported.
package sockets

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/ruleset/dataplane"
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
	err := socketlb.Cleanup(ctx, socketlb.Config{})
	if errors.Is(err, dataplane.ErrUnsupported) && !errors.Is(err, fs.ErrPermission) {
		return nil // this system has none
	}
	return err
}
