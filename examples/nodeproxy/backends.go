package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/takeover"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// dataplane is a backend that can watch its own rules.
type dataplane interface {
	ruleset.Backend
	// Watch calls drifted with each alteration by another process, until the context
	// ends or the backend's sockets are closed.
	Watch(ctx context.Context, interval time.Duration, drifted func(error)) error
	Close() error
}

// settings determine the configuration of a backend.
type settings struct {
	*config.Config
	families []tracker.Family
	// clients returns the clients that kube-proxy remembers for an endpoint, each with the time
	// since its last connection. It may be nil.
	clients func(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration
	// netns is the network namespace, nil for the calling thread's.
	netns *os.File
	// rules is called with the number of rules in a table of iptables, and the number that
	// the last sync wrote.
	rules func(f tracker.Family, table string, total, written int)
	log   *slog.Logger
}

// mode is a data plane as the agent uses it.
type mode struct {
	name string
	// watch is the interval of the data plane's Watch.
	watch time.Duration
	// takesOver reports that the data plane's objects have the names of kube-proxy's own
	// objects, so that the first sync replaces kube-proxy's.
	takesOver bool
	// noEntry is what explain prints if the kernel has no entry for a packet.
	noEntry string
	// probe returns an error if the families of the settings cannot be served on this node.
	// It changes nothing.
	probe func(context.Context, settings) error
	// setSysctls, if not nil, sets the kernel parameters that otherwise the first sync
	// sets. Neither writes a parameter that already has its value.
	setSysctls func(context.Context, settings) error
	// resetSysctls, if not nil, sets the kernel parameters back that this mode has set and
	// that other modes do not need.
	resetSysctls func(context.Context, *slog.Logger) error
	// open opens the data plane.
	open func(context.Context, settings) (dataplane, error)
	// owned reports whether the agent has left rules in this mode.
	owned func(context.Context, *slog.Logger) (bool, error)
	// cleanup removes the rules that the agent has left in this mode.
	cleanup func(context.Context, *slog.Logger) error
	// cleanupKubeProxy removes the rules that kube-proxy has left in this mode.
	cleanupKubeProxy func(context.Context, *slog.Logger) error
	// retire, if not nil, replaces cleanup and cleanupKubeProxy when the agent changes to
	// another mode. It waits until the connections that cleanup would break have ended.
	retire func(ctx context.Context, m mode, adopt bool, log *slog.Logger) error
	// lookup reads from the kernel where it sends a packet. It is nil if the mode has no rules
	// in the kernel.
	lookup func(context.Context, ruleset.Query) (ruleset.Found, error)
}

// contract holds the functions that the package of every kernel backend has. C is its
// Config and B its Backend.
type contract[C any, B dataplane] struct {
	new        func(context.Context, C) (B, error)
	probe      func(context.Context, C) error
	setSysctls func(context.Context, C) error // may be nil
	owned      func(context.Context, C) (bool, error)
	cleanup    func(context.Context, C) error
	// cleanupOwn, if not nil, is like cleanup, but removes nothing that kube-proxy wrote. It
	// does nothing if the agent has left nothing.
	cleanupOwn func(context.Context, C) error
	lookup     func(context.Context, C, ruleset.Query) (ruleset.Found, error)
	// config returns the configuration of the backend.
	config func(settings) (C, error)
	// left returns the configurations with which the agent, or kube-proxy, may have left
	// rules.
	left func(kubeProxy bool, log *slog.Logger) []C
}

// mode completes m with the functions of the contract.
func (p contract[C, B]) mode(m mode) mode {
	m.probe = func(ctx context.Context, s settings) error {
		c, err := p.config(s)
		if err != nil {
			return err
		}
		return p.probe(ctx, c)
	}
	m.open = func(ctx context.Context, s settings) (dataplane, error) {
		c, err := p.config(s)
		if err != nil {
			return nil, err
		}
		b, err := p.new(ctx, c)
		if err != nil {
			return nil, err // returning b would make a non-nil dataplane of a nil B
		}
		return b, nil
	}
	if p.setSysctls != nil {
		m.setSysctls = func(ctx context.Context, s settings) error {
			c, err := p.config(s)
			if err != nil {
				return err
			}
			return p.setSysctls(ctx, c)
		}
	}
	m.lookup = func(ctx context.Context, q ruleset.Query) (ruleset.Found, error) {
		var c C
		return p.lookup(ctx, c, q)
	}
	m.owned = func(ctx context.Context, log *slog.Logger) (bool, error) {
		list, err := p.ownedOf(ctx, log)
		return len(list) != 0, err
	}
	m.cleanup = func(ctx context.Context, log *slog.Logger) error {
		if p.cleanupOwn != nil {
			return p.cleanupAll(ctx, p.cleanupOwn, p.left(false, log), log)
		}
		list, err := p.ownedOf(ctx, log)
		return errors.Join(err, p.cleanupAll(ctx, p.cleanup, list, log))
	}
	m.cleanupKubeProxy = func(ctx context.Context, log *slog.Logger) error {
		return p.cleanupAll(ctx, p.cleanup, p.left(true, log), log)
	}
	return m
}

// ownedOf returns the configurations with which the agent has left rules.
func (p contract[C, B]) ownedOf(ctx context.Context, log *slog.Logger) (out []C, err error) {
	for _, c := range p.left(false, log) {
		owned, e := p.owned(ctx, c)
		if owned {
			out = append(out, c)
		}
		err = errors.Join(err, missing(e, log))
	}
	return out, err
}

// cleanupAll calls cleanup for each configuration. It retries once after a failure, because rules of
// one flavour of iptables can refer to sets of the other.
func (p contract[C, B]) cleanupAll(ctx context.Context, cleanup func(context.Context, C) error, list []C, log *slog.Logger) (err error) {
	for range 2 {
		err = nil
		for _, c := range list {
			err = errors.Join(err, missing(cleanup(ctx, c), log))
		}
		if err == nil {
			break
		}
	}
	return err
}

// missing returns err, or nil if the node lacks a feature or program without which no rules
// can exist.
func missing(err error, log *slog.Logger) error {
	if errors.Is(err, ruleset.ErrUnsupported) && !errors.Is(err, fs.ErrPermission) {
		log.Debug("skipped looking for rules", "error", err)
		return nil
	}
	return err
}

// kubeProxyTable is the name of kube-proxy's table in its nftables mode.
const kubeProxyTable = "kube-proxy"

// allModes returns all modes.
func allModes() []mode { return []mode{nftablesMode(), iptablesMode(), ipvsMode(), userspaceMode()} }

func nftablesMode() mode {
	m := contract[nftables.Config, *nftables.Backend]{
		new: nftables.New, probe: nftables.Probe, owned: nftables.Owned, cleanup: nftables.Cleanup, lookup: nftables.Lookup,
		config: func(s settings) (nftables.Config, error) {
			c := nftables.Config{Families: s.families, MasqueradeMark: s.mark(), Clients: s.clients, NetNS: s.netns, Log: s.log}
			if len(s.Offload) != 0 {
				chosen, err := nftables.InterfacesMatching(s.Offload...)
				if err != nil {
					return c, err
				}
				c.Offload = &nftables.Offload{Interfaces: chosen}
			}
			return c, nil
		},
		left: func(kubeProxy bool, log *slog.Logger) []nftables.Config {
			if kubeProxy {
				return []nftables.Config{{Table: kubeProxyTable, Log: log}}
			}
			return []nftables.Config{{Log: log}}
		},
	}.mode(mode{
		name:    config.ModeNFTables,
		watch:   250 * time.Millisecond, // after transactions only
		noEntry: "no entry for it",
	})
	cleanup := m.cleanup
	m.cleanup = func(ctx context.Context, log *slog.Logger) error {
		return errors.Join(cleanup(ctx, log), unmark(ctx, log))
	}
	return m
}

// unmark deletes the agent's markers, if the kernel has nf_tables.
func unmark(ctx context.Context, log *slog.Logger) error {
	found, err := nftables.Owned(ctx, nftables.Config{Table: kubeProxyTable, Log: log})
	if err != nil || !found {
		return missing(err, log)
	}
	return takeover.Unmark(ctx)
}

func iptablesMode() mode { return iptablesModeWith(func(*iptables.Config) {}) }

// iptablesModeWith returns mode iptables with a function that edits each configuration.
func iptablesModeWith(edit func(*iptables.Config)) mode {
	p := contract[iptables.Config, *iptables.Backend]{
		new: iptables.New, probe: iptables.Probe, setSysctls: iptables.SetSysctls, owned: iptables.Owned, cleanup: iptables.Cleanup, cleanupOwn: iptables.CleanupOwn, lookup: iptables.Lookup,
		config: func(s settings) (iptables.Config, error) {
			c := iptables.Config{
				Families: s.families, MasqueradeMark: s.mark(), NetNS: s.netns, Log: s.log, LocalhostNodePorts: localhostNodePorts(s.Config), CountTraffic: s.TrafficMetrics,
				Trace: &iptables.Trace{Applied: func(i iptables.Info) { s.rules(i.Family, i.Table, i.Rules, i.Written) }},
			}
			edit(&c)
			return c, nil
		},
		left: func(_ bool, log *slog.Logger) (out []iptables.Config) {
			for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				for _, flavour := range flavours() {
					if flavour != iptables.Legacy || legacyInUse(family) {
						out = append(out, iptables.Config{Flavour: flavour, Families: []tracker.Family{family}, Log: log})
					}
				}
			}
			return out
		},
	}
	return p.mode(mode{
		name:      config.ModeIPTables,
		watch:     5 * time.Second, // one request to the kernel for each table
		takesOver: true,
		noEntry:   "no rule for it",
		resetSysctls: func(ctx context.Context, log *slog.Logger) (err error) {
			for _, c := range p.left(false, log) {
				err = errors.Join(err, missing(iptables.SetSysctls(ctx, c), log))
			}
			return err
		},
	})
}

func ipvsMode() mode {
	return contract[ipvs.Config, *ipvs.Backend]{
		new: ipvs.New, probe: ipvs.Probe, setSysctls: func(_ context.Context, c ipvs.Config) error { return ipvs.SetSysctls(c) }, owned: ipvs.Owned, cleanup: ipvs.Cleanup, lookup: ipvs.Lookup,
		config: func(s settings) (ipvs.Config, error) {
			e := s.Effective.IPVS
			c := ipvs.Config{
				Families: s.families, MasqueradeMark: s.mark(), NetNS: s.netns, Log: s.log,
				Scheduler: ipvs.Scheduler(e.Scheduler), StrictARP: e.StrictARP,
				Timeouts: ipvs.Timeouts{TCP: e.TCPTimeout.Duration, TCPFin: e.TCPFinTimeout.Duration, UDP: e.UDPTimeout.Duration},
			}
			for _, cidr := range e.ExcludeCIDRs {
				p, err := netip.ParsePrefix(cidr)
				if err != nil {
					return c, err
				}
				c.ExcludeCIDRs = append(c.ExcludeCIDRs, p.Masked())
			}
			return c, nil
		},
		left: func(_ bool, log *slog.Logger) (out []ipvs.Config) {
			for _, flavour := range flavours() {
				out = append(out, ipvs.Config{IPTables: flavour, Log: log})
			}
			return out
		},
	}.mode(mode{
		name:      config.ModeIPVS,
		watch:     30 * time.Second, // reads everything
		takesOver: true,
		noEntry:   "no virtual server for it",
		retire:    retireIPVS,
	})
}

// mark returns the masquerade mark of the configuration.
func (s settings) mark() ruleset.MasqueradeMark { return ruleset.MasqueradeBit(int(s.MasqueradeBit)) }

// flavours returns the flavours of iptables that rules may have been written with. The
// flavour of the programs without one in their names may have changed, and kube-proxy's
// image selects a flavour by itself.
func flavours() []iptables.Flavour {
	out := []iptables.Flavour{iptables.NFT, iptables.Legacy}
	for _, program := range []string{"iptables-nft-save", "iptables-legacy-save"} {
		if _, err := exec.LookPath(program); err != nil {
			return append(out, iptables.AnyFlavour) // may be a third one
		}
	}
	return out
}

// legacyInUse reports whether the network namespace of the calling thread has tables of
// iptables-legacy. Reading a table that does not exist would create it.
func legacyInUse(f tracker.Family) bool {
	tables, known := legacyTables(f)
	return known && slices.ContainsFunc(tables, func(t string) bool { return t == "nat" || t == "filter" })
}

// legacyTables returns the existing tables of iptables-legacy. known is false if the
// kernel has no iptables-legacy, or its module is not loaded.
func legacyTables(f tracker.Family) (tables []string, known bool) {
	name := "ip_tables_names"
	if f == tracker.IPv6 {
		name = "ip6_tables_names"
	}
	text, err := os.ReadFile("/proc/thread-self/net/" + name)
	switch {
	case err == nil:
		return strings.Fields(string(text)), true
	case errors.Is(err, fs.ErrNotExist):
		return nil, false
	}
	return []string{"nat", "filter"}, true // the file is not readable: both may exist
}

// loadModules loads the modules that the kernel does not load on demand: ip_tables and
// ip6_tables, for which iptables-legacy runs modprobe, which needs CAP_SYS_MODULE.
func (m mode) loadModules(ctx context.Context, c *config.Config, log *slog.Logger) {
	if m.name == config.ModeNFTables || m.name == config.ModeUserspace {
		return
	}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if _, known := legacyTables(f); known {
			continue
		}
		if err := iptablesMode().probe(ctx, settings{Config: c, families: []tracker.Family{f}}); err != nil {
			// The mode tries again when it starts, and reports the error.
			log.Debug("iptables cannot be used", "family", f, "error", err)
		}
	}
}

// counted returns the packet counters of the backend's rules.
func counted(b *iptables.Backend) (map[metrics.Counted]uint64, error) {
	list, err := b.Counters()
	out := map[metrics.Counted]uint64{}
	for _, c := range list {
		switch c.Name {
		case iptables.InvalidDropped:
			out[metrics.InvalidDropped] = c.Packets
		case iptables.LocalhostNodePorts:
			out[metrics.LocalhostNodePorts] = c.Packets
		}
	}
	return out, err
}

// localhostNodePorts reports whether NodePorts answer at IPv4 loopback addresses: the
// configuration must enable it, and nodePortAddresses must contain such an address.
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
		return mode{}, fmt.Errorf("this build does not support --proxy-mode %s", name)
	}
	return modes[i], nil
}
