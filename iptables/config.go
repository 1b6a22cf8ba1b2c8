//go:build linux

package iptables

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// DefaultMasqueradeBit is the bit of the packet mark that asks for masquerading
// unless told otherwise, kube-proxy's.
const DefaultMasqueradeBit = 14

// Flavour is which of the kernel's two implementations of iptables is used. A
// node should have rules in one of them only.
type Flavour string

const (
	// AnyFlavour is the one that the programs called iptables-restore and
	// ip6tables-restore are of.
	AnyFlavour Flavour = ""
	// Legacy is ip_tables: iptables-legacy-restore and its relatives.
	Legacy Flavour = "legacy"
	// NFT is nf_tables by its compatibility layer: iptables-nft-restore and its
	// relatives.
	NFT Flavour = "nft"
)

// Tools is the programs for one family, each a path or a name to be found on
// PATH; "" is what the [Flavour] calls it. They must be of the same flavour.
type Tools struct {
	// Restore is iptables-restore or what stands for it, Save iptables-save.
	Restore, Save string
}

// Config says what a [Backend] works with. The zero value is a node's usual
// configuration.
type Config struct {
	// Families is the address families to program; nil is both. Services of another
	// family are passed over.
	Families []tracker.Family
	// Flavour says which programs are looked for, [AnyFlavour] by default; Tools4
	// and Tools6 name them, and are empty for what the Flavour calls them.
	Flavour        Flavour
	Tools4, Tools6 Tools
	// MasqueradeBit is the bit of the packet mark, 0 to 31, by which rules tell each
	// other that a connection is to be masqueraded; nil is [DefaultMasqueradeBit].
	// No other bit is read or written.
	MasqueradeBit *uint8
	// LocalhostNodePorts has NodePorts answer at IPv4 loopback addresses, too, as in
	// kube-proxy's --iptables-localhost-nodeports, whatever addresses they answer at
	// otherwise. It sets the sysctl net.ipv4.conf.all.route_localnet, and keeps
	// packets from elsewhere away from the loopback range, which that would let in.
	LocalhostNodePorts bool
	// NoCounters has no rule count packets into kube-proxy's accounting objects of the
	// kernel: see [Backend.Counters].
	NoCounters bool
	// EndpointComments has the rules of each endpoint say which Service it is of.
	// With iptables-legacy every such comment costs the kernel 288 bytes.
	EndpointComments bool
	// Hash is what becomes of Services whose endpoints are to follow from a hash;
	// by default they are drawn at random.
	Hash HashFallback
	// LockWait is how long another program may hold the xtables lock, in whole
	// seconds; 0 is 5 s. Only [Legacy] has a lock.
	LockWait time.Duration
	// LockFile is the file that is locked, "" for the programs' own choice
	// (/run/xtables.lock, which only root may open).
	LockFile string
	// Timeout is after how long a program is killed; 0 is 5 minutes.
	Timeout time.Duration
	// NetNS is an open file of the network namespace to program; nil is the namespace
	// of the thread that calls [New]. New duplicates the file, and working in a
	// namespace other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Trace is told what there is after each Apply. It may be nil.
	Trace *Trace
	// Log is told of repairs and of Services that cannot be programmed; nil is
	// silence.
	Log *slog.Logger
}

// withDefaults returns c with what was left out filled in.
func (c Config) withDefaults() (Config, error) {
	if c.Families == nil {
		c.Families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	seen := map[tracker.Family]bool{}
	for _, f := range c.Families {
		if f != tracker.IPv4 && f != tracker.IPv6 || seen[f] {
			return c, fmt.Errorf("iptables: families %v are not one or both of IPv4 and IPv6", c.Families)
		}
		seen[f] = true
	}
	if len(c.Families) == 0 {
		return c, fmt.Errorf("iptables: no family to program")
	}
	var infix string
	switch c.Flavour {
	case AnyFlavour:
	case Legacy, NFT:
		infix = "-" + string(c.Flavour)
	default:
		return c, fmt.Errorf("iptables: flavour %q is neither %q nor %q", c.Flavour, Legacy, NFT)
	}
	for _, t := range []struct {
		tools *Tools
		name  string
	}{{&c.Tools4, "iptables"}, {&c.Tools6, "ip6tables"}} {
		if t.tools.Restore == "" {
			t.tools.Restore = t.name + infix + "-restore"
		}
		if t.tools.Save == "" {
			t.tools.Save = t.name + infix + "-save"
		}
	}
	if c.Hash > HashRefused {
		return c, fmt.Errorf("iptables: fallback %d for hashes is not known", c.Hash)
	}
	if c.MasqueradeBit == nil {
		bit := uint8(DefaultMasqueradeBit)
		c.MasqueradeBit = &bit
	}
	if *c.MasqueradeBit > 31 {
		return c, fmt.Errorf("iptables: masquerade bit %d is not 0 to 31", *c.MasqueradeBit)
	}
	if c.LockWait == 0 {
		c.LockWait = 5 * time.Second
	}
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Minute
	}
	if c.LockWait < 0 || c.Timeout < 0 {
		return c, fmt.Errorf("iptables: LockWait %v and Timeout %v must not be negative", c.LockWait, c.Timeout)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

func (c Config) tools(f tracker.Family) Tools {
	if f == tracker.IPv6 {
		return c.Tools6
	}
	return c.Tools4
}
