package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
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
	probe func(context.Context, tracker.Family) error
	// open makes the data plane for the network namespace of the calling thread.
	open func(context.Context, settings) (dataplane, error)
	// cleanup removes what the agent has left in this mode, if it has.
	cleanup func(context.Context, *slog.Logger) error
	// cleanupKubeProxy removes what kube-proxy has left in this mode.
	cleanupKubeProxy func(context.Context, *slog.Logger) error
	// retire, if not nil, is called in place of the two when the agent changes to
	// another mode: it takes as long as connections need that would be ended.
	retire func(ctx context.Context, adopt bool, log *slog.Logger) error
	// watch is how often to look whether somebody altered the rules.
	watch time.Duration
	// takesOver tells that the data plane's objects have the names of kube-proxy's
	// own, so that its first sync replaces those.
	takesOver bool
	// lookup tells what the kernel would do with a packet, and compares. It may be nil.
	lookup func(context.Context, io.Writer, question) error
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
func allModes() []mode { return []mode{nftablesMode(), iptablesMode(), ipvsMode()} }

func nftablesMode() mode {
	return mode{
		name: config.ModeNFTables,
		probe: func(_ context.Context, f tracker.Family) error {
			return nftables.Probe(nftables.Config{Families: []tracker.Family{f}})
		},
		open: func(_ context.Context, s settings) (dataplane, error) {
			return nftables.New(nftables.Config{Families: s.families, MasqueradeBit: &s.MasqueradeBit, Log: s.log})
		},
		cleanup: func(ctx context.Context, log *slog.Logger) error {
			return nftables.Cleanup(ctx, nftables.Config{Log: log})
		},
		cleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return nftables.Cleanup(ctx, nftables.Config{Table: kubeProxyTable, Log: log})
		},
		watch:  250 * time.Millisecond, // one question to the kernel
		lookup: lookupNFTables,
	}
}

func iptablesMode() mode {
	return mode{
		name: config.ModeIPTables,
		probe: func(ctx context.Context, f tracker.Family) error {
			b, err := iptables.New(ctx, iptables.Config{Families: []tracker.Family{f}})
			if err != nil {
				return err
			}
			return b.Close()
		},
		open: func(ctx context.Context, s settings) (dataplane, error) {
			return iptables.New(ctx, iptables.Config{
				Families: s.families, MasqueradeBit: &s.MasqueradeBit, Log: s.log, LocalhostNodePorts: localhostNodePorts(s.Config),
			})
		},
		cleanup: func(ctx context.Context, log *slog.Logger) error {
			return eachIPTables([]iptables.Flavour{iptables.AnyFlavour}, log, func(c iptables.Config) error {
				if owned, err := iptables.Owned(ctx, c); err != nil || !owned {
					return err
				}
				return iptables.Cleanup(ctx, c)
			})
		},
		// Kube-proxy's image chooses between the two flavours by itself.
		cleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return eachIPTables([]iptables.Flavour{iptables.NFT, iptables.Legacy}, log, func(c iptables.Config) error {
				return iptables.Cleanup(ctx, c)
			})
		},
		watch:     5 * time.Second, // a program for each table and family
		takesOver: true,
		lookup:    lookupIPTables,
	}
}

func ipvsMode() mode {
	return mode{
		name: config.ModeIPVS,
		probe: func(_ context.Context, f tracker.Family) error {
			return ipvs.Probe(ipvs.Config{Families: []tracker.Family{f}})
		},
		open: func(_ context.Context, s settings) (dataplane, error) {
			e := s.Effective.IPVS
			c := ipvs.Config{
				Families: s.families, MasqueradeBit: &s.MasqueradeBit, Log: s.log,
				Scheduler: ipvs.Scheduler(e.Scheduler), StrictARP: e.StrictARP,
				Timeouts: ipvs.Timeouts{TCP: e.TCPTimeout.Duration, TCPFin: e.TCPFinTimeout.Duration, UDP: e.UDPTimeout.Duration},
			}
			for _, cidr := range e.ExcludeCIDRs {
				p, err := netip.ParsePrefix(cidr)
				if err != nil {
					return nil, err
				}
				c.ExcludeCIDRs = append(c.ExcludeCIDRs, p.Masked())
			}
			return ipvs.New(c)
		},
		cleanup: func(ctx context.Context, log *slog.Logger) error {
			c := ipvs.Config{Log: log}
			if owned, err := ipvs.Owned(ctx, c); err != nil || !owned {
				return err
			}
			return ipvs.Cleanup(ctx, c)
		},
		cleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return ipvs.Cleanup(ctx, ipvs.Config{Log: log})
		},
		retire: func(ctx context.Context, adopt bool, log *slog.Logger) error {
			if ipvs.Probe(ipvs.Config{}) != nil {
				return nil // there can be nothing
			}
			owned, err := ipvs.Owned(ctx, ipvs.Config{})
			if err != nil || !owned && !adopt {
				return err
			}
			return retireIPVS(ctx, log)
		},
		watch:     30 * time.Second, // reads everything there is
		takesOver: true,
	}
}

// eachIPTables calls f for each flavour and family that there are programs for.
func eachIPTables(flavours []iptables.Flavour, log *slog.Logger, f func(iptables.Config) error) error {
	var errs []error
	for _, flavour := range flavours {
		for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			err := f(iptables.Config{Flavour: flavour, Families: []tracker.Family{family}, Log: log})
			if errors.Is(err, iptables.ErrUnsupported) {
				log.Debug("not looked for in iptables", "flavour", flavour, "family", family, "error", err)
				continue
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// localhostNodePorts reports whether NodePorts answer at IPv4 loopback addresses:
// if that is asked for, and such an address is among those they answer at.
func localhostNodePorts(c *config.Config) bool {
	if !*c.Effective.IPTables.LocalhostNodePorts {
		return false
	}
	within, given := false, false
	for _, s := range c.Effective.NodePortAddresses {
		switch p, err := netip.ParsePrefix(s); {
		case s == "all" || s == "localhost":
			within = true
		case s == "primary":
			given = true
		case err == nil && p.Addr().Is4():
			given = true
			within = within || p.Overlaps(netip.MustParsePrefix("127.0.0.0/8"))
		}
	}
	return within || !given
}

// findMode returns the mode of a name.
func findMode(modes []mode, name string) (mode, error) {
	i := slices.IndexFunc(modes, func(m mode) bool { return m.name == name })
	if i < 0 {
		return mode{}, fmt.Errorf("--proxy-mode %s is not supported by this build", name)
	}
	return modes[i], nil
}

// leftovers removes the rules of every mode but the one in use, "" for none, and
// kube-proxy's if adopt is set. It tries all of them. Modes that retire are left to
// that if another is in use.
func leftovers(ctx context.Context, modes []mode, inUse string, adopt bool, log *slog.Logger) error {
	var errs []error
	for _, m := range modes {
		if inUse != "" && inUse != m.name && m.retire != nil {
			continue
		}
		if m.name != inUse {
			if err := m.cleanup(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("rules of mode %s: %w", m.name, err))
			}
		}
		if adopt && !(m.takesOver && m.name == inUse) {
			if err := m.cleanupKubeProxy(ctx, log); err != nil {
				errs = append(errs, fmt.Errorf("kube-proxy's rules of mode %s: %w", m.name, err))
			}
		}
	}
	return errors.Join(errs...)
}
