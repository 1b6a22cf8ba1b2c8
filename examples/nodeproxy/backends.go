package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// mode is a data plane as the agent uses it: all there is to know about it is
// here.
type mode struct {
	name string
	// probe says why a family cannot be served on this node, if so. It changes
	// nothing.
	probe func(tracker.Family) error
	// open makes the data plane for the network namespace of the calling thread.
	open func(settings) (dataplane, error)
	// cleanup removes what the agent leaves in this mode.
	cleanup func(context.Context, *slog.Logger) error
	// cleanupKubeProxy removes what kube-proxy leaves in this mode, as far as
	// cleanup does not.
	cleanupKubeProxy func(context.Context, *slog.Logger) error
	// lookup tells what the kernel would do with a packet, and compares. It may be nil.
	lookup func(context.Context, io.Writer, ruleset.Packet, ruleset.Verdict) error
}

// settings is what a mode is told.
type settings struct {
	*config.Config
	families []tracker.Family
	log      *slog.Logger
}

// dataplane is a backend that can be watched over.
type dataplane interface {
	ruleset.Backend
	// Watch calls drifted with each thing that somebody else did to the rules, until
	// the context ends.
	Watch(ctx context.Context, interval time.Duration, drifted func(error)) error
	Close() error
}

// kubeProxyTable is the name of kube-proxy's table in its nftables mode.
const kubeProxyTable = "kube-proxy"

// allModes returns the modes there are.
func allModes() []mode {
	return []mode{
		{
			name:  config.ModeNFTables,
			probe: func(f tracker.Family) error { return nftables.Probe(nftables.Config{Families: []tracker.Family{f}}) },
			open: func(s settings) (dataplane, error) {
				return nftables.New(nftables.Config{Families: s.families, MasqueradeBit: &s.MasqueradeBit, Log: s.log})
			},
			cleanup: func(ctx context.Context, log *slog.Logger) error {
				return nftables.Cleanup(ctx, nftables.Config{Log: log})
			},
			cleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
				return nftables.Cleanup(ctx, nftables.Config{Table: kubeProxyTable, Log: log})
			},
		},
	}
}

// findMode returns the mode of a name.
func findMode(modes []mode, name string) (mode, error) {
	for _, m := range modes {
		if m.name == name {
			return m, nil
		}
	}
	return mode{}, fmt.Errorf("--proxy-mode %s is not supported by this build", name)
}

// leftovers removes the rules of every mode but the named one, and kube-proxy's if
// adopt is set. It tries all of them.
func leftovers(ctx context.Context, modes []mode, but string, adopt bool, log *slog.Logger) error {
	var errs []error
	for _, m := range modes {
		if m.name != but {
			if err := m.cleanup(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("rules of mode %s: %w", m.name, err))
			}
		}
		if adopt && m.cleanupKubeProxy != nil {
			if err := m.cleanupKubeProxy(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("kube-proxy's rules of mode %s: %w", m.name, err))
			}
		}
	}
	return errors.Join(errs...)
}
