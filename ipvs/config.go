package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// deviceName is the name of the dummy device, which is kube-proxy's. The backend owns every address on it.
const deviceName = "kube-ipvs0"

// The packet marks m with m&markMask == markDrop name virtual servers, except markDrop itself, which means drop. Each
// Service port that treats internal traffic differently (see ruleset.Frontend.Internal) takes one in each family.
const (
	markDrop = 0x3000
	markMask = 0xfffff000
	markBits = lastMark | markDrop
	// lastMark is the highest number of a mark. The mark with number n is markDrop + n.
	lastMark = 0xfff
	// marksText is the set of marks in the syntax of iptables, with markDrop.
	marksText = "0x3000/0xfffff000"
)

func namesServer(mark uint32) bool { return mark&markMask == markDrop && mark != markDrop }

// Config configures a [Backend]. The zero value is a node's usual configuration.
type Config struct {
	// Families lists the address families to program; nil means both. Services of another family are ignored. [New]
	// rejects IPv6 if net.ipv6.conf.all.disable_ipv6 is 1 or the kernel was booted with ipv6.disable=1.
	Families []tracker.Family
	// Scheduler chooses among endpoints (kube-proxy's --ipvs-scheduler). "" means [RoundRobin] where all endpoints
	// have the same weight, which is the tracker's default, and [WeightedRoundRobin] elsewhere. A Service that asks
	// for a hash (see ruleset.Port.Hash) always has [Maglev], or [SourceHash] if the kernel has no Maglev.
	Scheduler Scheduler
	// Properties returns how the virtual servers of a Service port choose among its endpoints, and reach them. nil,
	// and the zero Properties, mean as Scheduler says, and by translation. It must be a pure function of values that
	// do not change, such as Spec.Ext. A change of the properties keeps connections.
	Properties func(*ruleset.Port) Properties
	// Schedulers lists the schedulers that Properties may return; nil means none. [New] tries them, so that the
	// kernel loads their modules. A Service port with another one, or one that the kernel lacks, is served as if
	// Properties had returned no scheduler, and logged.
	Schedulers []Scheduler
	// DrainLimit bounds the time that real servers drain. 0 means 15 minutes for those that no Service has, because
	// they keep an address and port from others, and no limit for the others. Draining real servers have the weight
	// 0: they keep their connections and get no new ones. The backend removes them when they have no connections
	// left, and those of UDP and SCTP, with their flows, after a second.
	DrainLimit time.Duration
	// Timeouts sets how long IPVS remembers idle connections; the zero value leaves the
	// kernel's values as they are.
	Timeouts Timeouts
	// ExcludeCIDRs lists the addresses of other programs' virtual servers (kube-proxy's --ipvs-exclude-cidrs). The
	// backend never removes a virtual server there, and alters it only if a Service has the same address and port.
	ExcludeCIDRs []netip.Prefix
	// StrictARP makes the node answer ARP requests only for addresses of the interface at which they arrive
	// (kube-proxy's --ipvs-strict-arp), as load balancers that announce addresses themselves need.
	StrictARP bool
	// KeepSysctls leaves all kernel parameters as they are. Another program must then set those of [SetSysctls].
	KeepSysctls bool
	// MasqueradeMark is the packet mark of connections that must be masqueraded. It must not be one of the bits
	// 0x3fff: the marks 0x3001 to 0x3fff name virtual servers, and other programs may set and clear only the other
	// bits of these packets.
	MasqueradeMark dataplane.MasqueradeMark
	// IPTables selects the iptables programs; "" means [iptables.AnyFlavor].
	IPTables iptables.Flavor
	// NetNS is an open file of the network namespace to program; nil means the namespace of the thread that calls
	// [New]. New duplicates the file. A namespace other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Log receives repairs, features that the kernel lacks, Services that cannot be programmed and, at
	// [dataplane.LevelTransaction], each write as its tool reads it; nil discards them.
	Log *slog.Logger

	noMaglev bool
	// lacked holds those of Schedulers that the kernel lacks.
	lacked map[Scheduler]bool
	// onlyIPIP reports that the kernel knows no other tunnel.
	onlyIPIP bool
}

// Timeouts sets how long IPVS remembers idle connections, in whole seconds (ipvsadm(8), --set). 0 leaves the kernel's
// value as it is.
type Timeouts struct {
	// TCP is for established connections, 15 minutes in a fresh kernel (kube-proxy's
	// --ipvs-tcp-timeout).
	TCP time.Duration
	// TCPFin is for connections after a FIN, 2 minutes (--ipvs-tcpfin-timeout).
	TCPFin time.Duration
	// UDP is for UDP flows, 5 minutes (--ipvs-udp-timeout).
	UDP time.Duration
}

// marksTable is the table of nf_tables with the chains of restoreMarks, between filter, where other programs' network
// policies set marks, and IPVS. iptables has no chain there: iptables-nft gives the table security another priority
// than the kernel does.
const marksTable = "proxier-ipvs-marks"

// markPriorities holds the chains' places by hook: right before IPVS (ip_vs_ops4 of
// net/netfilter/ipvs/ip_vs_core.c).
var markPriorities = map[string]int32{"input": 97, "output": -99}

// withDefaults returns c with defaults for the fields that are not set, or an error that
// wraps [ruleset.ErrConfig].
func (c Config) withDefaults() (Config, error) {
	bad := func(format string, args ...any) (Config, error) {
		return c, fmt.Errorf("ipvs: %w: %w", ruleset.ErrConfig, fmt.Errorf(format, args...))
	}
	if err := backendconf.Complete(&c.Families, &c.MasqueradeMark, &c.Log); err != nil {
		return c, fmt.Errorf("ipvs: %w", err)
	}
	if c.Scheduler != "" {
		if err := c.Scheduler.validate(); err != nil {
			return bad("%w", err)
		}
	}
	for _, s := range c.Schedulers {
		if err := s.validate(); err != nil {
			return bad("%w", err)
		}
	}
	if c.DrainLimit < 0 {
		return bad("DrainLimit %s is negative", c.DrainLimit)
	}
	for name, d := range map[string]time.Duration{"TCP": c.Timeouts.TCP, "TCPFin": c.Timeouts.TCPFin, "UDP": c.Timeouts.UDP} {
		// The kernel stores timeouts in jiffies in a signed int (ip_vs_set_timeout of
		// net/netfilter/ipvs/ip_vs_ctl.c).
		if d < 0 || d != 0 && d < time.Second || d > 24*24*time.Hour {
			return bad("timeout %s of %s is not 1 second to 24 days", name, d)
		}
	}
	for _, p := range c.ExcludeCIDRs {
		if !p.IsValid() || p.Addr().Is4In6() {
			return bad("ExcludeCIDRs has the invalid prefix %v", p)
		}
	}
	if mark := uint32(c.MasqueradeMark); mark&markBits != 0 {
		return bad("MasqueradeMark %#x overlaps the marks of virtual servers, %#x", mark, markBits)
	}
	if !slices.Contains([]iptables.Flavor{iptables.AnyFlavor, iptables.NFT, iptables.Legacy}, c.IPTables) {
		return bad("unknown flavor %q of iptables", c.IPTables)
	}
	return c, nil
}

// properties returns what Config.Properties returns for a Service port, or the zero value if it
// cannot be.
func (c Config) properties(s *ruleset.Port) Properties {
	if c.Properties == nil {
		return Properties{}
	}
	p := c.Properties(s)
	if c.lacks(p.Scheduler) {
		p.Scheduler = ""
	}
	if c.lacksTunnel(p.Forwarding) {
		p.Forwarding = ForwardingTranslated
	}
	return p
}

func (c Config) lacks(s Scheduler) bool {
	return s != "" && (c.lacked[s] || !slices.Contains(c.Schedulers, s))
}

func (c Config) lacksTunnel(f Forwarding) bool { return c.onlyIPIP && f.tunnel() != 0 }

// ignored returns an error for what a Service port does not get of its [Properties], nil for nothing.
func (c Config) ignored(s *ruleset.Port) error {
	if c.Properties == nil {
		return nil
	}
	p := c.Properties(s)
	direct := func(f ruleset.Frontend) bool { return p.of(&f) != ForwardingTranslated }
	switch {
	case c.lacks(p.Scheduler):
		return fmt.Errorf("scheduler %.15q is not available, the node's own is used", p.Scheduler)
	case c.lacksTunnel(p.Forwarding):
		return errors.New("the kernel has no tunnels of GUE and GRE for IPVS, packets are translated")
	case p.OnePacket && s.Key.Protocol == v1.ProtocolUDP && !slices.ContainsFunc(s.Frontends, direct):
		return errors.New("one-packet scheduling is ignored: it is for external and load-balancer IPs whose packets are not translated")
	case p.HashPort && p.Scheduler != SourceHash && p.Scheduler != Maglev:
		return fmt.Errorf("the client's port is ignored: scheduler %.15q does not hash", p.Scheduler)
	}
	return nil
}

func (c Config) hashing() Scheduler {
	if c.noMaglev {
		return SourceHash
	}
	return Maglev
}

func (c Config) excluded(a netip.Addr) bool {
	return slices.ContainsFunc(c.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Probe returns nil if the system has what a [Backend] with the configuration needs, a [*dataplane.UnsupportedError]
// that names the missing kernel module or program, or an error that wraps [ruleset.ErrConfig].
func Probe(ctx context.Context, c Config) error {
	return backendconf.Probe(New(ctx, c))
}
