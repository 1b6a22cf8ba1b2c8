package modes

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// leftovers are what the agent, or kube-proxy, may have left of a mode.
type leftovers[C any] struct {
	// list returns the configurations with which they may have left rules.
	list  func(*slog.Logger) []C
	owned func(context.Context, C) (bool, error)
	// own removes the agent's rules, and all those of kube-proxy, too.
	own, all func(context.Context, C) error
}

// of returns a mode with its functions Owned, Cleanup and CleanupKubeProxy.
func (l leftovers[C]) of(m Mode) Mode {
	m.Owned = func(ctx context.Context, log *slog.Logger) (any bool, err error) {
		for _, c := range l.list(log) {
			owned, e := l.owned(ctx, c)
			any, err = any || owned, errors.Join(err, Missing(e, log))
		}
		return any, err
	}
	m.Cleanup = func(ctx context.Context, log *slog.Logger) error { return cleanupAll(ctx, l.list(log), l.own, log) }
	m.CleanupKubeProxy = func(ctx context.Context, log *slog.Logger) error { return cleanupAll(ctx, l.list(log), l.all, log) }
	return m
}

// ifOwned returns cleanup as a function that does nothing for rules that are not the agent's.
func ifOwned[C any](owned func(context.Context, C) (bool, error), cleanup func(context.Context, C) error) func(context.Context, C) error {
	return func(ctx context.Context, c C) error {
		if ok, err := owned(ctx, c); err != nil || !ok {
			return err
		}
		return cleanup(ctx, c)
	}
}

// cleanupAll calls cleanup for each configuration. It retries once after a failure, because rules of
// one flavor of iptables can refer to sets of the other.
func cleanupAll[C any](ctx context.Context, list []C, cleanup func(context.Context, C) error, log *slog.Logger) (err error) {
	for range 2 {
		err = nil
		for _, c := range list {
			err = errors.Join(err, Missing(cleanup(ctx, c), log))
		}
		if err == nil {
			break
		}
	}
	return nameMaps(err)
}

// kubeProxyTable is the name of kube-proxy's table in its nftables mode.
const kubeProxyTable = "kube-proxy"

// All returns all modes for a configuration.
func All(*config.Config) []Mode { return []Mode{NFTables(), IPTables(), IPVS(), Userspace()} }

func NFTables() Mode {
	configure := func(s Settings) (nftables.Config, error) { return nftablesConfig(s), nil }
	return leftovers[nftables.Config]{
		list:  func(log *slog.Logger) []nftables.Config { return []nftables.Config{{Log: log}} },
		owned: nftables.Owned,
		own: func(ctx context.Context, c nftables.Config) error {
			err := ifOwned(nftables.Owned, nftables.Cleanup)(ctx, c)
			c.Table = kubeProxyTable
			unmark := func(ctx context.Context, _ nftables.Config) error { return takeover.Unmark() }
			return errors.Join(err, ifOwned(nftables.Owned, unmark)(ctx, c))
		},
		all: func(ctx context.Context, c nftables.Config) error {
			c.Table = kubeProxyTable
			return nftables.Cleanup(ctx, c)
		},
	}.of(Mode{
		Name:              config.ModeNFTables,
		Watch:             250 * time.Millisecond, // after transactions only
		TracksConnections: true,
		Probe:             configured(configure, nftables.Probe),
		Open:              opened(configure, nftables.New),
		Lookup: lookedUp(func(ctx context.Context, q dataplane.Query) (dataplane.Found, error) {
			return nftables.Lookup(ctx, nftables.Config{}, q)
		}, "no entry for it"),
	})
}

func IPTables() Mode { return IPTablesWith(func(*iptables.Config) {}) }

// IPTablesWith returns mode iptables with a function that edits each configuration.
func IPTablesWith(edit func(*iptables.Config)) Mode {
	configure := func(s Settings) (iptables.Config, error) {
		c := iptables.Config{
			Families: s.Families, Flavor: s.Flavor, MasqueradeMark: s.MasqueradeMark, NetNS: s.NetNS, Log: s.Log, LocalhostNodePorts: s.Config.ServesLoopback(), CountTraffic: s.TrafficMetrics,
			Hooks: &iptables.Hooks{Applied: func(i iptables.WriteInfo) { s.Rules(i.Family, i.Table, i.Rules, i.Written) }},
		}
		edit(&c)
		return c, nil
	}
	return leftovers[iptables.Config]{list: leftByIPTables, owned: iptables.Owned, own: iptables.CleanupOwn, all: iptables.Cleanup}.of(Mode{
		Name:      config.ModeIPTables,
		Watch:     5 * time.Second, // one request to the kernel for each table
		TakesOver: true, TracksConnections: true,
		Probe:      configured(configure, iptables.Probe),
		Open:       opened(configure, iptables.New),
		SetSysctls: configured(configure, iptables.SetSysctls),
		Lookup: func(ctx context.Context, queries []dataplane.Query) ([]dataplane.Found, []error) {
			found, err := iptables.LookupAll(ctx, iptables.Config{Flavor: FlavorInUse(ctx)}, queries)
			if err != nil {
				found = make([]dataplane.Found, len(queries))
			}
			for i := range found {
				if !found[i].Entry {
					found[i].Where = "no rule for it"
				}
			}
			return found, slices.Repeat([]error{err}, len(queries))
		},
		CleanupFlavor: func(ctx context.Context, s Settings) error {
			of := func(c iptables.Config) iptables.Flavor { return c.Flavor }
			if err := cleanupFlavor(ctx, s, leftByIPTables(s.Log), of, iptables.CleanupOwn, iptables.Cleanup); err != nil || !s.Config.ServesLoopback() {
				return err
			}
			// The clean-up may have set route_localnet back.
			c, _ := configure(s)
			return Missing(iptables.SetSysctls(ctx, c), s.Log)
		},
	})
}

// cleanupFlavor calls own, or all to adopt kube-proxy's rules, for each configuration whose flavor of iptables is not
// that of the settings, unless only the programs without a flavor in their names can be used.
func cleanupFlavor[C any](ctx context.Context, s Settings, list []C, of func(C) iptables.Flavor, own, all func(context.Context, C) error) error {
	if s.Flavor == iptables.AnyFlavor {
		return nil
	}
	if s.Adopt {
		own = all
	}
	return cleanupAll(ctx, slices.DeleteFunc(list, func(c C) bool { return of(c) != other(s.Flavor) }), own, s.Log)
}

// FlavorInUse returns the flavor of iptables in which the agent has left rules of mode iptables. If
// there are none, it returns [iptables.AnyFlavor].
func FlavorInUse(ctx context.Context) iptables.Flavor {
	for _, c := range leftByIPTables(nil) {
		if owned, err := iptables.Owned(ctx, c); err == nil && owned {
			return c.Flavor
		}
	}
	return iptables.AnyFlavor
}

// leftByIPTables returns the configurations with which the agent, or kube-proxy, may have left
// rules of mode iptables.
func leftByIPTables(log *slog.Logger) (out []iptables.Config) {
	for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		for _, flavor := range flavors() {
			if flavor != iptables.Legacy || legacyInUse(family) {
				out = append(out, iptables.Config{Flavor: flavor, Families: []tracker.Family{family}, Log: log})
			}
		}
	}
	return out
}

// ResetSysctls sets the kernel parameters back that modes other than inUse have set. Only mode
// iptables sets some that the others do not need.
func ResetSysctls(ctx context.Context, inUse string, log *slog.Logger) (err error) {
	if inUse == config.ModeIPTables {
		return nil
	}
	for _, c := range leftByIPTables(log) {
		err = errors.Join(err, Missing(iptables.SetSysctls(ctx, c), log))
	}
	return err
}

func IPVS() Mode {
	// left returns the configurations with which the agent, or kube-proxy, may have left rules.
	left := func(log *slog.Logger) (out []ipvs.Config) {
		for _, flavor := range flavors() {
			out = append(out, ipvs.Config{IPTables: flavor, Log: log})
		}
		return out
	}
	own := ifOwned(ipvs.Owned, ipvs.Cleanup)
	return leftovers[ipvs.Config]{list: left, owned: ipvs.Owned, own: own, all: ipvs.Cleanup}.of(Mode{
		Name:      config.ModeIPVS,
		Watch:     30 * time.Second, // reads everything
		TakesOver: true, TracksConnections: true,
		Retire:     retireIPVS,
		Probe:      configured(ipvsConfig, ipvs.Probe),
		Open:       opened(ipvsConfig, ipvs.New),
		SetSysctls: configured(ipvsConfig, ipvs.SetSysctls),
		Lookup: lookedUp(func(ctx context.Context, q dataplane.Query) (dataplane.Found, error) {
			return ipvs.Lookup(ctx, ipvs.Config{}, q)
		}, "no virtual server for it"),
		CleanupFlavor: func(ctx context.Context, s Settings) (err error) {
			of := func(c ipvs.Config) iptables.Flavor { return c.IPTables }
			return cleanupFlavor(ctx, s, left(s.Log), of, ifOwned(ipvs.Owned, ipvs.CleanupRules), ipvs.CleanupRules)
		},
	})
}

// flavors returns the flavors of iptables that rules may have been written with. The
// flavor of the programs without one in their names may have changed, and kube-proxy's
// image selects a flavor by itself.
func flavors() []iptables.Flavor {
	out := []iptables.Flavor{iptables.NFT, iptables.Legacy}
	for _, program := range []string{"iptables-nft-save", "iptables-legacy-save"} {
		if _, err := exec.LookPath(program); err != nil {
			return append(out, iptables.AnyFlavor) // may be a third one
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

// LoadModules loads the modules that the kernel does not load on demand: ip_tables and
// ip6_tables, for which iptables-legacy runs modprobe, which needs CAP_SYS_MODULE.
func (m Mode) LoadModules(ctx context.Context, c *config.Config, log *slog.Logger) {
	if m.Name == config.ModeNFTables || m.Name == config.ModeUserspace {
		return
	}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if _, known := legacyTables(f); known {
			continue
		}
		if err := IPTables().Probe(ctx, Settings{Config: c, Families: []tracker.Family{f}}); err != nil {
			// The mode tries again when it starts, and reports the error.
			log.Debug("iptables cannot be used", "family", f, "error", err)
		}
	}
}

// HasIPv6 reports whether the calling thread's namespace has IPv6. The kernel must have it,
// not be booted with ipv6.disable=1, and have 0 in net.ipv6.conf.all.disable_ipv6.
func HasIPv6() bool {
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); err != nil {
		return false
	}
	disabled, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err != nil || strings.TrimSpace(string(disabled)) == "0"
}

// OpenFiles returns the number of files that the process may open. The Go runtime raises it to
// the hard limit.
func OpenFiles() uint64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 1024
	}
	return r.Cur
}
