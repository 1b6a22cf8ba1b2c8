package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Flavour is one of the kernel's two implementations of iptables. A node should have
// rules in one of them only.
type Flavour string

const (
	// AnyFlavour is the flavour of the programs that are called iptables-restore and
	// ip6tables-restore.
	AnyFlavour Flavour = ""
	// Legacy is ip_tables: iptables-legacy-restore and its relatives.
	Legacy Flavour = "legacy"
	// NFT is nf_tables, which iptables-nft-restore and its relatives program.
	NFT Flavour = "nft"
)

// Tools names the programs for one family, each by a path or by a name to look up on
// PATH; "" is the name that follows from the [Flavour]. They must be of the same flavour.
type Tools struct {
	// Restore is iptables-restore or a program in its place, Save is iptables-save or
	// one in its place.
	Restore, Save string
}

// HashFallback selects what happens to a Service whose endpoints must follow from a
// hash (see [ruleset.Service.Hash]). iptables has no match that could do that.
type HashFallback uint8

const (
	// HashAsRandom draws endpoints at random, by their weights, as if the Service asked
	// for no hash. The backend logs each Service that begins to ask for one.
	HashAsRandom HashFallback = iota
	// HashRefused makes the Service fail with [ErrHash]. It stays as it was, or is not
	// programmed.
	HashRefused
)

// Config configures a [Backend]. The zero value is a node's usual configuration.
type Config struct {
	// Families lists the address families to program; nil means both. Services of another
	// family are ignored.
	Families []tracker.Family
	// Flavour selects the programs, [AnyFlavour] by default. Tools4 and Tools6 name the
	// programs of each family; the zero value has the names that follow from Flavour.
	Flavour        Flavour
	Tools4, Tools6 Tools
	// MasqueradeMark is the packet mark of connections that must be masqueraded. No other
	// bit of the mark is read or written.
	MasqueradeMark ruleset.MasqueradeMark
	// LocalhostNodePorts makes NodePorts answer at IPv4 loopback addresses, too, as
	// kube-proxy's --iptables-localhost-nodeports does, whatever other addresses they
	// answer at. The backend sets the sysctl net.ipv4.conf.all.route_localnet, which
	// would let packets from other hosts reach the loopback range, and drops those before
	// it sets the sysctl and for as long as it is set: see [SetSysctls] and [Cleanup].
	LocalhostNodePorts bool
	// NoCounters turns off the kernel's accounting objects: see [Backend.Counters].
	NoCounters bool
	// CountTraffic keeps the counters that [Backend.Traffic] reads when endpoints of their
	// Services change. It costs an additional run of iptables-save for each delta that
	// changes endpoints.
	CountTraffic bool
	// EndpointComments adds the Service's name to the rules of each endpoint.
	// With iptables-legacy every such comment costs the kernel 288 bytes.
	EndpointComments bool
	// Hash selects what happens to Services whose endpoints must follow from a hash.
	Hash HashFallback
	// LockWait is how long to wait for the xtables lock, in whole seconds; 0 means 5 s.
	// Only [Legacy] has a lock.
	LockWait time.Duration
	// LockFile is the file of that lock, "" for the programs' own choice
	// (/run/xtables.lock, which only root may open).
	LockFile string
	// Timeout is how long a program may run before it is killed; 0 means 5 minutes.
	Timeout time.Duration
	// NetNS is an open file of the network namespace to program; nil means the namespace
	// of the thread that calls [New]. New duplicates the file. A namespace other than the
	// process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Trace holds functions that Apply calls before it returns. It may be nil.
	Trace *Trace
	// Log receives repairs and Services that cannot be programmed; nil discards them.
	Log *slog.Logger
}

// withDefaults returns c with defaults for the fields that are not set. Its error wraps
// [ruleset.ErrConfig].
func (c Config) withDefaults() (Config, error) {
	if err := backendconf.Complete(&c.Families, &c.MasqueradeMark, &c.Log); err != nil {
		return c, fmt.Errorf("iptables: %w", err)
	}
	invalid := func(format string, args ...any) (Config, error) {
		return c, fmt.Errorf("iptables: %w: "+format, append([]any{ruleset.ErrConfig}, args...)...)
	}
	switch c.Flavour {
	case AnyFlavour, Legacy, NFT:
	default:
		return invalid("flavour %q is neither %q nor %q", c.Flavour, Legacy, NFT)
	}
	if c.Hash > HashRefused {
		return invalid("unknown fallback %d for hashes", c.Hash)
	}
	if c.LockWait < 0 || c.Timeout < 0 {
		return invalid("LockWait %v or Timeout %v is negative", c.LockWait, c.Timeout)
	}
	if c.LockWait == 0 {
		c.LockWait = 5 * time.Second
	}
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Minute
	}
	return c, nil
}

// Probe reports whether a [Backend] can work with c. It returns nil if so, a
// [*ruleset.UnsupportedError] if the programs, the kernel or the caller's privileges do
// not suffice, or the error that [New] would return. It writes a chain that nothing leads
// to, KUBE-PROXY-TRIAL, and deletes it. Nothing else changes.
func Probe(ctx context.Context, c Config) error {
	c.NoCounters = true // they are optional
	return backendconf.Probe(New(ctx, c))
}
