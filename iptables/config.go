package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Flavor is one of the kernel's two implementations of iptables. A node should have rules in one of them only.
type Flavor string

const (
	// AnyFlavor is the flavor of the programs that are called iptables-restore and
	// ip6tables-restore.
	AnyFlavor Flavor = ""
	// Legacy is ip_tables: iptables-legacy-restore and its relatives.
	Legacy Flavor = "legacy"
	// NFT is nf_tables, which iptables-nft-restore and its relatives program.
	NFT Flavor = "nft"
)

// Config configures a [Backend]. The zero value is a node's usual configuration.
type Config struct {
	// Families lists the address families to program; nil means both. Services of another
	// family are ignored.
	Families []tracker.Family
	// Flavor selects the programs, which must be on PATH; the default is [AnyFlavor].
	Flavor Flavor
	// MasqueradeMark is the packet mark of connections that must be masqueraded. No other
	// bit of the mark is read or written.
	MasqueradeMark dataplane.MasqueradeMark
	// LocalhostNodePorts makes NodePorts answer at IPv4 loopback addresses, too, as kube-proxy's
	// --iptables-localhost-nodeports does. The backend sets the sysctl net.ipv4.conf.all.route_localnet, which would
	// let packets from other hosts reach the loopback range, and drops those for as long as it is set: see
	// [SetSysctls] and [Cleanup].
	LocalhostNodePorts bool
	// CountTraffic keeps the counters that [Backend.Traffic] reads when endpoints of their Services change. It costs
	// a run of iptables-save for each delta that changes endpoints.
	CountTraffic bool
	// LockFile is the file of the xtables lock, "" for the programs' own choice (/run/xtables.lock, which only root
	// may open). Only [Legacy] has a lock.
	LockFile string
	// NetNS is an open file of the network namespace to program; nil means the namespace of the thread that calls
	// [New]. New duplicates the file. A namespace other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Hooks holds functions that Apply calls before it returns. It may be nil.
	Hooks *Hooks
	// Log receives repairs and Services that cannot be programmed, and, at [dataplane.LevelTransaction], each input
	// of iptables-restore; nil discards them.
	Log *slog.Logger

	// uncounted turns the accounting objects off.
	uncounted bool
}

const (
	// lockWait is how long to wait for the xtables lock, in whole seconds. kube-proxy's
	// value is the same.
	lockWait = 5 * time.Second
	// programTimeout is how long a program may run before it is killed.
	programTimeout = 5 * time.Minute
)

// withDefaults returns c with its defaults. Its error wraps [ruleset.ErrConfig].
func (c Config) withDefaults() (Config, error) {
	if err := backendconf.Complete(&c.Families, &c.MasqueradeMark, &c.Log); err != nil {
		return c, fmt.Errorf("iptables: %w", err)
	}
	switch c.Flavor {
	case AnyFlavor, Legacy, NFT:
	default:
		return c, fmt.Errorf("iptables: %w: flavor %q is neither %q nor %q", ruleset.ErrConfig, c.Flavor, Legacy, NFT)
	}
	return c, nil
}

// Probe returns nil if a [Backend] can work with c, a [*dataplane.UnsupportedError] if the programs, the kernel or
// the caller's privileges do not suffice, or the error that [New] would return. It writes a chain that nothing leads
// to, KUBE-PROXY-TRIAL, and deletes it.
func Probe(ctx context.Context, c Config) error {
	c.uncounted = true // the objects are optional
	return backendconf.Probe(New(ctx, c))
}

// Hooks is a set of functions that a [Backend] calls. Any of them, and the *Hooks itself, may be nil. The goroutine
// that called Apply calls them before Apply returns. They must not call the Backend.
type Hooks struct {
	// Applied is called once for each table, filter and nat, of each family that an
	// Apply brought up to date.
	Applied func(WriteInfo)
}

// WriteInfo describes one table after an Apply.
type WriteInfo struct {
	// Family is the table's address family.
	Family tracker.Family
	// Table is "filter" or "nat".
	Table string
	// Rules is how many rules the backend's chains have in the table, without the rule in KUBE-PROXY-CANARY. Written
	// is how many rules this Apply wrote, including rules that were there before.
	Rules, Written int
}
