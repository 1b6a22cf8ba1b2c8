package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/metrics"
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
	probe func(context.Context, *config.Config, tracker.Family) error
	// setSysctls, if not nil, sets the kernel parameters that the data plane's first
	// sync would set otherwise. Neither writes a parameter that has its value already.
	setSysctls func(*config.Config) error
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
	// lookup tells what the kernel would do with a packet, and compares.
	lookup func(context.Context, io.Writer, question) error
}

// loadModules has the modules loaded that the kernel does not load by itself when
// they are asked for: ip_tables and ip6_tables, for which iptables-legacy runs
// modprobe, which takes CAP_SYS_MODULE.
func (m mode) loadModules(ctx context.Context, c *config.Config, log *slog.Logger) {
	if m.name == config.ModeNFTables {
		return
	}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if _, known := legacyTables(f); known {
			continue
		}
		if err := iptablesMode().probe(ctx, c, f); err != nil {
			// It is tried again, and reported, when the mode is put to use.
			log.Debug("iptables cannot be used", "family", f, "error", err)
		}
	}
}

// counted returns how many packets the backend's rules have counted, of what is counted.
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

// settings is what a mode is told.
type settings struct {
	*config.Config
	families []tracker.Family
	// rules is told how many rules a table of iptables has, and how many of them the
	// last sync wrote.
	rules func(f tracker.Family, table string, total, written int)
	// counters is given what reads how many packets rules of iptables have counted in
	// the kernel.
	counters func(read func() (map[metrics.Counted]uint64, error))
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
		probe: func(ctx context.Context, _ *config.Config, f tracker.Family) error {
			return nftables.Probe(ctx, nftables.Config{Families: []tracker.Family{f}})
		},
		open: func(ctx context.Context, s settings) (dataplane, error) {
			return nftables.New(ctx, nftables.Config{Families: s.families, MasqueradeMark: ruleset.MasqueradeBit(int(s.MasqueradeBit)), Log: s.log})
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
		probe: func(ctx context.Context, _ *config.Config, f tracker.Family) error {
			b, err := iptables.New(ctx, iptables.Config{Families: []tracker.Family{f}, NoCounters: true})
			if err != nil {
				return err
			}
			return b.Close()
		},
		setSysctls: func(c *config.Config) error {
			return iptables.SetSysctls(iptables.Config{LocalhostNodePorts: localhostNodePorts(c)})
		},
		open: func(ctx context.Context, s settings) (dataplane, error) {
			b, err := iptables.New(ctx, iptables.Config{
				Families: s.families, MasqueradeBit: &s.MasqueradeBit, Log: s.log, LocalhostNodePorts: localhostNodePorts(s.Config),
				Trace: &iptables.Trace{Applied: func(i iptables.Info) { s.rules(i.Family, i.Table, i.Rules, i.Written) }},
			})
			if err != nil {
				return nil, err // and not a *Backend that is nil
			}
			s.counters(func() (map[metrics.Counted]uint64, error) { return counted(b) })
			return b, nil
		},
		cleanup: func(ctx context.Context, log *slog.Logger) error {
			return eachIPTables(log, func(c iptables.Config) error {
				if owned, err := iptables.Owned(ctx, c); err != nil || !owned {
					return err
				}
				return iptables.Cleanup(ctx, c)
			})
		},
		cleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return eachIPTables(log, func(c iptables.Config) error {
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
		probe: func(_ context.Context, c *config.Config, f tracker.Family) error {
			return ipvs.Probe(ipvs.Config{Families: []tracker.Family{f}, Scheduler: ipvs.Scheduler(c.Effective.IPVS.Scheduler)})
		},
		setSysctls: func(c *config.Config) error {
			return ipvs.SetSysctls(ipvs.Config{StrictARP: c.Effective.IPVS.StrictARP})
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
			if owned, err := ownedIPVS(ctx); err != nil || !owned {
				return err
			}
			return cleanupIPVS(ctx, log)
		},
		cleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return cleanupIPVS(ctx, log)
		},
		retire: func(ctx context.Context, adopt bool, log *slog.Logger) error {
			families := ipvsFamilies()
			if len(families) == 0 {
				return nil // there can be nothing
			}
			owned, err := ownedIPVS(ctx)
			if err != nil || !owned && !adopt {
				return err
			}
			return retireIPVS(ctx, families, log)
		},
		watch:     30 * time.Second, // reads everything there is
		takesOver: true,
		lookup:    lookupIPVS,
	}
}

// ipvsFamilies returns the address families in which IPVS may have connections: one
// in which it cannot be used has none.
func ipvsFamilies() []tracker.Family {
	var out []tracker.Family
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if ipvs.Probe(ipvs.Config{Families: []tracker.Family{f}}) == nil {
			out = append(out, f)
		}
	}
	return out
}

// eachIPTables calls f for each flavour and family that there are programs for and
// that may have rules: which flavour the programs without one in their names are of
// may be another than it was, and kube-proxy's image chooses by itself.
func eachIPTables(log *slog.Logger, f func(iptables.Config) error) error {
	var errs []error
	for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		named := 0
		for _, flavour := range []iptables.Flavour{iptables.NFT, iptables.Legacy, iptables.AnyFlavour} {
			if flavour == iptables.AnyFlavour && named == 2 {
				continue // it is one of the two
			}
			if flavour == iptables.Legacy && !legacyInUse(family) {
				named++
				continue
			}
			err := f(iptables.Config{Flavour: flavour, Families: []tracker.Family{family}, Log: log})
			if errors.Is(err, iptables.ErrUnsupported) {
				log.Debug("not looked for in iptables", "flavour", flavour, "family", family, "error", err)
				continue
			}
			named++
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// legacyInUse reports whether the network namespace of the calling thread has tables
// of iptables-legacy. Whoever looks into one that is not there makes it.
func legacyInUse(f tracker.Family) bool {
	tables, known := legacyTables(f)
	return known && slices.ContainsFunc(tables, func(t string) bool { return t == "nat" || t == "filter" })
}

// legacyTables returns the tables of iptables-legacy that there are. known is false
// if the kernel has no such thing, or its module is not loaded.
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
	return []string{"nat", "filter"}, true // there may be
}

// variantsOfIPVS returns the variants of the iptables tools that mode ipvs may have
// been run with.
func variantsOfIPVS() []ipvs.IPTables {
	out := []ipvs.IPTables{ipvs.NFTables, ipvs.LegacyTables}
	for _, program := range []string{"iptables-nft-save", "iptables-legacy-save"} {
		if _, err := exec.LookPath(program); err != nil {
			return append(out, ipvs.SystemTables) // which is another
		}
	}
	return out
}

// ownedIPVS reports whether there is anything of mode ipvs that is the agent's.
func ownedIPVS(ctx context.Context) (bool, error) {
	for _, v := range variantsOfIPVS() {
		if owned, err := ipvs.Owned(ctx, ipvs.Config{IPTables: v}); err != nil || owned {
			return owned, err
		}
	}
	return false, nil
}

// cleanupIPVS removes everything of mode ipvs, whatever variant of iptables was used.
func cleanupIPVS(ctx context.Context, log *slog.Logger) error {
	// As long as there are rules, be it of another variant, the sets that they match
	// cannot go.
	var errs []error
	for range 2 {
		errs = nil
		for _, v := range variantsOfIPVS() {
			errs = append(errs, ipvs.Cleanup(ctx, ipvs.Config{IPTables: v, Log: log}))
		}
		if errors.Join(errs...) == nil {
			break
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
