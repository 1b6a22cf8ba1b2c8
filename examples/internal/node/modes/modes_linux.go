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

// kubeProxyTable is the name of kube-proxy's table in its nftables mode.
const kubeProxyTable = "kube-proxy"

// All returns all modes for a configuration.
func All(*config.Config) []Mode { return []Mode{NFTables(), IPTables(), IPVS(), Userspace()} }

func NFTables() Mode {
	return backend[nftables.Config, *nftables.Backend]{
		configure: func(s Settings) (nftables.Config, error) { return nftablesConfig(s), nil },
		probe:     nftables.Probe,
		open:      nftables.New,
		lookup: func(ctx context.Context, q dataplane.Query) (dataplane.Found, error) {
			return nftables.Lookup(ctx, nftables.Config{}, q)
		},
		noEntry: "no entry for it",
		left:    func(log *slog.Logger) []nftables.Config { return []nftables.Config{{Log: log}} },
		owned:   nftables.Owned,
		own: func(ctx context.Context, c nftables.Config) error {
			err := ifOwned(nftables.Owned, nftables.Cleanup)(ctx, c)
			c.Table = kubeProxyTable
			unmark := func(context.Context, nftables.Config) error { return takeover.Unmark() }
			return errors.Join(err, ifOwned(nftables.Owned, unmark)(ctx, c))
		},
		all: func(ctx context.Context, c nftables.Config) error {
			c.Table = kubeProxyTable
			return nftables.Cleanup(ctx, c)
		},
	}.mode(Mode{
		Name:              config.ModeNFTables,
		Watch:             250 * time.Millisecond, // after transactions only
		TracksConnections: true,
	})
}

func IPTables() Mode { return IPTablesWith(func(*iptables.Config) {}) }

// IPTablesWith returns mode iptables with a function that edits each configuration.
func IPTablesWith(edit func(*iptables.Config)) Mode {
	return backend[iptables.Config, *iptables.Backend]{
		configure: func(s Settings) (iptables.Config, error) {
			c := iptables.Config{
				Families: s.Families, Flavor: s.Flavor, MasqueradeMark: s.MasqueradeMark, NetNS: s.NetNS, Log: s.Log, LocalhostNodePorts: s.Config.ServesLoopback(), CountTraffic: s.TrafficMetrics,
				Hooks: &iptables.Hooks{Applied: func(i iptables.WriteInfo) { s.Rules(i.Family, i.Table, i.Rules, i.Written) }},
			}
			edit(&c)
			return c, nil
		},
		probe: iptables.Probe, sysctls: iptables.SetSysctls,
		open: iptables.New,
		left: leftByIPTables, owned: iptables.Owned, own: iptables.CleanupOwn, all: iptables.Cleanup,
		flavor:   func(c iptables.Config) iptables.Flavor { return c.Flavor },
		ownRules: iptables.CleanupOwn, allRules: iptables.Cleanup,
	}.mode(Mode{
		Name:      config.ModeIPTables,
		Watch:     5 * time.Second, // one request to the kernel for each table
		TakesOver: true, TracksConnections: true,
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
	})
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
	return backend[ipvs.Config, *ipvs.Backend]{
		configure: ipvsConfig,
		probe:     ipvs.Probe, sysctls: ipvs.SetSysctls,
		open: ipvs.New,
		lookup: func(ctx context.Context, q dataplane.Query) (dataplane.Found, error) {
			return ipvs.Lookup(ctx, ipvs.Config{}, q)
		},
		noEntry: "no virtual server for it",
		left: func(log *slog.Logger) (out []ipvs.Config) {
			for _, flavor := range flavors() {
				out = append(out, ipvs.Config{IPTables: flavor, Log: log})
			}
			return out
		},
		owned: ipvs.Owned, own: ifOwned(ipvs.Owned, ipvs.Cleanup), all: ipvs.Cleanup,
		flavor:   func(c ipvs.Config) iptables.Flavor { return c.IPTables },
		ownRules: ifOwned(ipvs.Owned, ipvs.CleanupRules), allRules: ipvs.CleanupRules,
	}.mode(Mode{
		Name:      config.ModeIPVS,
		Watch:     30 * time.Second, // reads everything
		TakesOver: true, TracksConnections: true,
		Retire: retireIPVS,
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
