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

// ownedOf returns the configurations with which the agent has left rules.
func ownedOf[C any](ctx context.Context, list []C, owned func(context.Context, C) (bool, error), log *slog.Logger) (out []C, err error) {
	for _, c := range list {
		ok, e := owned(ctx, c)
		if ok {
			out = append(out, c)
		}
		err = errors.Join(err, Missing(e, log))
	}
	return out, err
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
	return err
}

// kubeProxyTable is the name of kube-proxy's table in its nftables mode.
const kubeProxyTable = "kube-proxy"

// All returns all modes for a configuration.
func All(*config.Config) []Mode { return []Mode{NFTables(), IPTables(), IPVS(), Userspace()} }

func NFTables() Mode {
	configure := func(s Settings) (nftables.Config, error) { return nftablesConfig(s), nil }
	return Mode{
		Name:              config.ModeNFTables,
		Watch:             250 * time.Millisecond, // after transactions only
		TracksConnections: true,
		Probe:             configured(configure, nftables.Probe),
		Open:              opened(configure, nftables.New),
		Lookup:            lookedUp(nftables.Lookup, "no entry for it"),
		Owned: func(ctx context.Context, log *slog.Logger) (bool, error) {
			owned, err := nftables.Owned(ctx, nftables.Config{Log: log})
			return owned, Missing(err, log)
		},
		Cleanup: func(ctx context.Context, log *slog.Logger) error {
			list, err := ownedOf(ctx, []nftables.Config{{Log: log}}, nftables.Owned, log)
			return errors.Join(err, cleanupAll(ctx, list, nftables.Cleanup, log), unmark(ctx, log))
		},
		CleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return cleanupAll(ctx, []nftables.Config{{Table: kubeProxyTable, Log: log}}, nftables.Cleanup, log)
		},
	}
}

// unmark deletes the agent's markers, if the kernel has nf_tables.
func unmark(ctx context.Context, log *slog.Logger) error {
	found, err := nftables.Owned(ctx, nftables.Config{Table: kubeProxyTable, Log: log})
	if err != nil || !found {
		return Missing(err, log)
	}
	return takeover.Unmark(ctx)
}

func IPTables() Mode { return IPTablesWith(func(*iptables.Config) {}) }

// IPTablesWith returns mode iptables with a function that edits each configuration.
func IPTablesWith(edit func(*iptables.Config)) Mode {
	configure := func(s Settings) (iptables.Config, error) {
		c := iptables.Config{
			Families: s.Families, Flavor: iptables.Flavor(s.Flavor), MasqueradeMark: s.MasqueradeMark, NetNS: s.NetNS, Log: s.Log, LocalhostNodePorts: s.Config.ServesLoopback(), CountTraffic: s.TrafficMetrics,
			Hooks: &iptables.Hooks{Applied: func(i iptables.WriteInfo) { s.Rules(i.Family, i.Table, i.Rules, i.Written) }},
		}
		edit(&c)
		return c, nil
	}
	return Mode{
		Name:      config.ModeIPTables,
		Watch:     5 * time.Second, // one request to the kernel for each table
		TakesOver: true, TracksConnections: true,
		Probe: configured(configure, iptables.Probe),
		Open: func(ctx context.Context, s Settings) (Plane, error) {
			c, _ := configure(s)
			b, err := iptables.New(ctx, c)
			if err != nil {
				return Plane{}, err
			}
			return Plane{Backend: b, Counters: b.Counters}, nil
		},
		SetSysctls: configured(configure, iptables.SetSysctls),
		Lookup:     lookedUp(lookupIPTables, noRule),
		LookupAll: func(ctx context.Context, queries []dataplane.Query) ([]dataplane.Found, error) {
			found, err := iptables.LookupAll(ctx, iptables.Config{Flavor: FlavorInUse(ctx)}, queries)
			for i := range found {
				if !found[i].Entry {
					found[i].Where = noRule
				}
			}
			return found, err
		},
		Owned: func(ctx context.Context, log *slog.Logger) (bool, error) {
			list, err := ownedOf(ctx, leftByIPTables(log), iptables.Owned, log)
			return len(list) != 0, err
		},
		Cleanup: func(ctx context.Context, log *slog.Logger) error {
			return nameMaps(cleanupAll(ctx, leftByIPTables(log), iptables.CleanupOwn, log))
		},
		CleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return nameMaps(cleanupAll(ctx, leftByIPTables(log), iptables.Cleanup, log))
		},
		CleanupFlavor: func(ctx context.Context, s Settings) error {
			list := inOtherFlavor(s, leftByIPTables(s.Log), func(c iptables.Config) iptables.Flavor { return c.Flavor })
			if len(list) == 0 {
				return nil
			}
			cleanup := iptables.CleanupOwn
			if s.Adopt {
				cleanup = iptables.Cleanup
			}
			if err := cleanupAll(ctx, list, cleanup, s.Log); err != nil || !s.Config.ServesLoopback() {
				return err
			}
			// The clean-up may have set route_localnet back.
			c, _ := configure(s)
			return Missing(iptables.SetSysctls(ctx, c), s.Log)
		},
	}
}

// inOtherFlavor returns the configurations whose flavor of iptables is not that of the settings. It
// returns none if only the programs without a flavor in their names can be used.
func inOtherFlavor[C any](s Settings, list []C, flavorOf func(C) iptables.Flavor) []C {
	return slices.DeleteFunc(list, func(c C) bool {
		return s.Flavor == config.FlavorAuto || flavorOf(c) != iptables.Flavor(other(s.Flavor))
	})
}

// noRule is what Where of a packet without a rule is in mode iptables.
const noRule = "no rule for it"

func lookupIPTables(ctx context.Context, c iptables.Config, q dataplane.Query) (dataplane.Found, error) {
	c.Flavor = FlavorInUse(ctx)
	return iptables.Lookup(ctx, c, q)
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
	return Mode{
		Name:      config.ModeIPVS,
		Watch:     30 * time.Second, // reads everything
		TakesOver: true, TracksConnections: true,
		Retire:     retireIPVS,
		Probe:      configured(ipvsConfig, ipvs.Probe),
		Open:       opened(ipvsConfig, ipvs.New),
		SetSysctls: configured(ipvsConfig, ipvs.SetSysctls),
		Lookup:     lookedUp(ipvs.Lookup, "no virtual server for it"),
		Owned: func(ctx context.Context, log *slog.Logger) (bool, error) {
			list, err := ownedOf(ctx, left(log), ipvs.Owned, log)
			return len(list) != 0, err
		},
		Cleanup: func(ctx context.Context, log *slog.Logger) error {
			list, err := ownedOf(ctx, left(log), ipvs.Owned, log)
			return errors.Join(err, cleanupAll(ctx, list, ipvs.Cleanup, log))
		},
		CleanupKubeProxy: func(ctx context.Context, log *slog.Logger) error {
			return cleanupAll(ctx, left(log), ipvs.Cleanup, log)
		},
		CleanupFlavor: func(ctx context.Context, s Settings) (err error) {
			list := inOtherFlavor(s, left(s.Log), func(c ipvs.Config) iptables.Flavor { return c.IPTables })
			if !s.Adopt {
				list, err = ownedOf(ctx, list, ipvs.Owned, s.Log)
			}
			return errors.Join(err, cleanupAll(ctx, list, ipvs.CleanupRules, s.Log))
		},
	}
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
