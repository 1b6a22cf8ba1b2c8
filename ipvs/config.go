package ipvs

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Backend programs one network namespace's IPVS, with the dummy device, ipsets and
// iptables rules that it needs. It implements [ruleset.Backend]. Its methods are safe for
// concurrent use. After [Backend.Close], methods change nothing and return an error that
// wraps [os.ErrClosed]. They return it, too, after another part of the process has closed
// one of the Backend's sockets; the caller then makes a new Backend.
//
// [New] makes one; the zero value must not be used.
type Backend struct {
	backend
}

// DefaultDevice is the default of Config.Device: the name of kube-proxy's dummy device.
const DefaultDevice = "kube-ipvs0"

// defaultMarks returns the default of Config.Marks.
func defaultMarks() Marks { return Marks{Value: 0x3000, Mask: 0xfffff000} }

// Config configures a [Backend]. The zero value is a node's usual configuration.
type Config struct {
	// Families lists the address families to program; nil means both. Services of another
	// family are ignored. [New] rejects IPv6 if net.ipv6.conf.all.disable_ipv6 is 1 or the
	// kernel was booted with ipv6.disable=1, because Services' addresses cannot be bound.
	Families []tracker.Family
	// Scheduler chooses among endpoints (kube-proxy's --ipvs-scheduler). "" means
	// [RoundRobin] where all endpoints have the same weight, which is the tracker's
	// default, and [WeightedRoundRobin] elsewhere. A Service that asks for a hash (see
	// ruleset.Service.Hash) always has [Maglev], or [SourceHash] if the kernel has no
	// Maglev.
	Scheduler Scheduler
	// Hash configures the schedulers that hash; the zero value is described there. For a
	// Service that asks for a hash, only NoFallback applies.
	Hash Hash
	// Forwarding is how packets get to an endpoint; the zero value is NAT.
	Forwarding Forwarding
	// Drain configures how endpoints are taken out of service. The zero value drains TCP
	// without a limit.
	Drain Drain
	// Timeouts sets how long IPVS remembers idle connections; the zero value leaves the
	// kernel's values as they are.
	Timeouts Timeouts
	// ExcludeCIDRs lists the addresses of other programs' virtual servers (kube-proxy's
	// --ipvs-exclude-cidrs). The backend never removes a virtual server there, and alters
	// it only if a Service has the same address and port.
	ExcludeCIDRs []netip.Prefix
	// StrictARP makes the node answer ARP requests only for addresses of the interface
	// at which they arrive (kube-proxy's --ipvs-strict-arp). Load balancers that announce
	// addresses themselves need it.
	StrictARP bool
	// KeepSysctls leaves all kernel parameters as they are. The backend does not work
	// without the parameters that [SetSysctls] sets, so another program must set them.
	KeepSysctls bool
	// Device is the name of the dummy device, 1 to 15 bytes; "" means [DefaultDevice].
	// The backend adds the device if it is missing, and owns every address on it.
	Device string
	// MasqueradeMark is the packet mark of connections that must be masqueraded. It must
	// be in Marks.Mask and not in Marks.Value.
	MasqueradeMark ruleset.MasqueradeMark
	// Marks is the set of packet marks that name virtual servers; the zero value means
	// 0x3001 to 0x3fff. Each Service port that treats internal traffic differently from
	// external traffic (see ruleset.Frontend.Internal) takes one in each family.
	Marks Marks
	// IPTables selects the iptables programs; "" means [iptables.AnyFlavour].
	IPTables iptables.Flavour
	// NetNS is an open file of the network namespace to program; nil means the namespace
	// of the thread that calls [New]. New duplicates the file. A namespace other than the
	// process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Log receives repairs, features that the kernel lacks, and Services that cannot be
	// programmed; nil discards them.
	Log *slog.Logger

	// noMaglev reports that the kernel lacks the scheduler Maglev.
	noMaglev bool
}

// Forwarding is how a packet gets from a virtual server to an endpoint.
type Forwarding uint8

const (
	// NAT replaces the destination address and port of packets, and the source of
	// answers. Kubernetes needs it.
	NAT Forwarding = iota
	// DirectRouting sends the packet as it is to the endpoint's host. The host must be on
	// a network of this node and must have the Service's address itself. It answers the
	// client directly, by a route that does not pass this node: the kernel drops an answer
	// that arrives here from an address of this node. The node itself and its pods cannot
	// be such clients. Neither ports nor source addresses are translated.
	DirectRouting
	// Tunnel sends the packet, as DirectRouting does, inside another packet (IP in IP,
	// IPv6 in IPv6), to an endpoint on any network, which must unpack it.
	Tunnel
)

// String returns the name that ipvsadm(8) lists.
func (f Forwarding) String() string {
	switch f {
	case NAT:
		return "Masq"
	case DirectRouting:
		return "Route"
	case Tunnel:
		return "Tunnel"
	}
	return "unknown"
}

// Timeouts sets how long IPVS remembers idle connections, in whole seconds
// (ipvsadm(8), --set). 0 leaves the kernel's value as it is.
type Timeouts struct {
	// TCP is for established connections, 15 minutes in a fresh kernel (kube-proxy's
	// --ipvs-tcp-timeout).
	TCP time.Duration
	// TCPFin is for connections after a FIN, 2 minutes (--ipvs-tcpfin-timeout).
	TCPFin time.Duration
	// UDP is for UDP flows, 5 minutes (--ipvs-udp-timeout).
	UDP time.Duration
}

// Marks is the set of marks m with m&Mask == Value. Value itself is reserved and means
// drop.
type Marks struct {
	// Value has no bits that Mask lacks.
	Value, Mask uint32
}

// contains reports whether m names a virtual server.
func (r Marks) contains(m uint32) bool { return m&r.Mask == r.Value && m != r.Value }

// String returns the set in the syntax of iptables.
func (r Marks) String() string { return fmt.Sprintf("%#x/%#x", r.Value, r.Mask) }

// Drain configures how endpoints, and whole Services, are taken out of service. Their real
// servers get the weight 0: they keep their connections and get no new ones. The backend
// removes them when they have no connections left.
type Drain struct {
	// Gracefully lists the protocols whose real servers drain until they have no
	// connections. Real servers of other protocols are removed, with their flows, a second
	// after they got the weight 0. Nil means TCP; an empty list means no protocol.
	Gracefully []v1.Protocol
	// Limit bounds the time that a real server drains; 0 means no limit.
	Limit time.Duration
}

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
	if c.Hash.Source > tracker.HashSourcePort {
		return bad("Hash.Source %d is not a tracker.Hash", c.Hash.Source)
	}
	if c.Forwarding > Tunnel {
		return bad("unknown forwarding method %d", c.Forwarding)
	}
	if c.Drain.Gracefully == nil {
		c.Drain.Gracefully = []v1.Protocol{v1.ProtocolTCP}
	}
	for _, p := range c.Drain.Gracefully {
		if inet.Protocol(p) == 0 {
			return bad("Drain.Gracefully has unknown protocol %q", p)
		}
	}
	if c.Drain.Limit < 0 {
		return bad("Drain.Limit %s is negative", c.Drain.Limit)
	}
	for name, d := range map[string]time.Duration{"TCP": c.Timeouts.TCP, "TCPFin": c.Timeouts.TCPFin, "UDP": c.Timeouts.UDP} {
		// The kernel stores timeouts in jiffies, of at least a millisecond, in a signed int
		// (ip_vs_set_timeout of net/netfilter/ipvs/ip_vs_ctl.c).
		if d < 0 || d != 0 && d < time.Second || d > 24*24*time.Hour {
			return bad("timeout %s of %s is not 1 second to 24 days", name, d)
		}
	}
	for _, p := range c.ExcludeCIDRs {
		if !p.IsValid() || p.Addr().Is4In6() {
			return bad("ExcludeCIDRs has the invalid prefix %v", p)
		}
	}
	if c.Device == "" {
		c.Device = DefaultDevice
	}
	if !validDevice(c.Device) {
		return bad("Device %q is not a valid device name", c.Device)
	}
	if c.Marks == (Marks{}) {
		c.Marks = defaultMarks()
	}
	if c.Marks.Value&^c.Marks.Mask != 0 || c.Marks.Value == 0 || c.Marks.Mask == 0xffffffff {
		return bad("Marks %s is not a set of marks with a value in its mask", c.Marks)
	}
	if mark := uint32(c.MasqueradeMark); mark&c.Marks.Mask == 0 || mark&c.Marks.Value != 0 {
		return bad("MasqueradeMark %#x overlaps Marks %s", mark, c.Marks)
	}
	if !slices.Contains([]iptables.Flavour{iptables.AnyFlavour, iptables.NFT, iptables.Legacy}, c.IPTables) {
		return bad("unknown flavour %q of iptables", c.IPTables)
	}
	return c, nil
}

// validDevice reports whether the kernel accepts the name (dev_valid_name of
// net/core/dev.c) and it is one word of a rule.
func validDevice(s string) bool {
	if s == "" || len(s) > 15 || s == "." || s == ".." || s[0] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		if c <= ' ' || c > '~' || c == '/' || c == ':' || c == '"' || c == '\\' || c == '%' || c == '+' || c == '!' {
			return false
		}
	}
	return true
}

// mark returns the packet mark of connections that must be masqueraded. It is 0 if no
// connection is: an endpoint that answers the client directly needs the client's address.
func (c Config) mark() uint32 {
	if c.Forwarding != NAT {
		return 0
	}
	return uint32(c.MasqueradeMark)
}

// hashing returns the scheduler of Services that ask for a hash.
func (c Config) hashing() Scheduler {
	if c.noMaglev {
		return SourceHash
	}
	return Maglev
}

// excluded reports whether ExcludeCIDRs has the address.
func (c Config) excluded(a netip.Addr) bool {
	return slices.ContainsFunc(c.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Probe reports whether the system has what a [Backend] with the configuration needs. It
// returns nil, a [*ruleset.UnsupportedError] that names the missing kernel module or
// program, or an error that wraps [ruleset.ErrConfig]. [New] makes the same checks.
func Probe(ctx context.Context, c Config) error {
	return backendconf.Probe(New(ctx, c))
}
