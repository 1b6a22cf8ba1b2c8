package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/reset"
)

// node is what Cleanup, SetParameters and LoadModules work on.
func node(c *Config, netns *os.File, log *slog.Logger) (*config.Config, *core.Options) {
	cfg := *c.c
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &cfg, &core.Options{Config: &cfg, NetNS: netns, Log: log}
}

// Cleanup removes the rules of all modes from a network namespace, or the calling thread's if netns is nil,
// and kube-proxy's rules if c has --adopt-from-kube-proxy. It continues after an error. Cleanup of package
// sockets removes the programs of --socket-lb.
func Cleanup(ctx context.Context, c *Config, netns *os.File, log *slog.Logger) error {
	cfg, o := node(c, netns, log)
	return o.Within(func() error {
		all, refused := modes.Cleanable(ctx, modes.All(cfg), cfg, o.Dial, o.Log)
		err := modes.Leftovers(ctx, all, cfg.Adopt, o.Log)
		if cfg.Adopt {
			// The rules of kube-proxy's modes refer to each other's chains and sets. The
			// first pass leaves out what is still in use.
			err = modes.Leftovers(ctx, all, cfg.Adopt, o.Log)
		}
		return errors.Join(err, refused, modes.Missing(reset.Cleanup(ctx, reset.Config{}), o.Log))
	})
}

// SetParameters sets all parameters of the kernel that an Agent with this configuration needs, in a
// network namespace, nil for the calling thread's. An Agent then needs no writable /proc/sys. It
// reports whether the mode needs any.
func SetParameters(ctx context.Context, c *Config, netns *os.File, log *slog.Logger) (needed bool, err error) {
	cfg, o := node(c, netns, log)
	m, err := modes.Find(modes.All(cfg), cfg.Mode)
	if err != nil || !m.TracksConnections {
		return false, err
	}
	return true, o.Within(func() error {
		flavor := modes.ChooseFlavor(ctx, cfg)
		cfg.Flavor = flavor.Name
		flavor.Log(o.Log)
		// Opening connection tracking loads its module, which has the parameters.
		if c, err := conntrack.New(ctx, conntrack.Config{}); err == nil {
			c.Close()
		}
		err := core.Tune(cfg, o.Log)
		if m.SetSysctls != nil {
			err = errors.Join(err, m.SetSysctls(ctx, modes.Settings{Config: cfg}))
		}
		return errors.Join(err, modes.ResetSysctls(ctx, cfg.Mode, o.Log))
	})
}

// LoadModules loads the modules of the kernel that are not loaded on demand: those of iptables-legacy.
// A program that drops CAP_SYS_MODULE calls it first. It applies to the calling thread's network namespace.
func LoadModules(ctx context.Context, c *Config, log *slog.Logger) {
	cfg, o := node(c, nil, log)
	if m, err := modes.Find(modes.All(cfg), cfg.Mode); err == nil {
		cfg.Flavor = modes.ChooseFlavor(ctx, cfg).Name
		m.LoadModules(ctx, cfg, o.Log)
	}
}
