//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// DefaultDevice is the name of the dummy device that holds the Services' addresses
// unless told otherwise: kube-proxy's.
const DefaultDevice = "kube-ipvs0"

// DefaultMasqueradeBit is the bit of the packet mark that asks for masquerading
// unless told otherwise: kube-proxy's.
const DefaultMasqueradeBit = 14

// defaultMarks is the range of packet marks that name virtual servers unless told
// otherwise.
func defaultMarks() Marks { return Marks{Value: 0x3000, Mask: 0xfffff000} }

// ErrConfig is what errors about a [Config] are.
var ErrConfig = errors.New("ipvs: bad configuration")

// Config says how a [Backend] works. The zero value is a node's usual
// configuration.
type Config struct {
	// Families is the address families to program; nil is both. Services of another
	// family are passed over.
	Families []tracker.Family
	// Scheduler chooses among endpoints (kube-proxy's --ipvs-scheduler). "" is
	// [RoundRobin] where all endpoints weigh the same, as they do unless a tracker
	// hook says otherwise, and [WeightedRoundRobin] elsewhere. A Service that asks for
	// a hash (see ruleset.Service.Hash) has [Maglev] in any case, or [SourceHash] where
	// the kernel has no Maglev.
	Scheduler Scheduler
	// Hash is for the schedulers that hash; see there for its zero value. For a
	// Service that asks for a hash it says only whether there is a fallback.
	Hash Hash
	// Forwarding is how packets get to an endpoint; the zero value is NAT.
	Forwarding Forwarding
	// Drain is how endpoints are taken out of service; see there for its zero value.
	Drain Drain
	// Timeouts is how long IPVS remembers idle connections; the zero value leaves the
	// kernel's as they are.
	Timeouts Timeouts
	// ExcludeCIDRs is the addresses of other owners' virtual servers (kube-proxy's
	// --ipvs-exclude-cidrs). A virtual server there is never removed, nor altered
	// unless a Service has the very address and port.
	ExcludeCIDRs []netip.Prefix
	// StrictARP has the node answer ARP requests only for addresses of the interface
	// they come in by (kube-proxy's --ipvs-strict-arp), as load balancers that
	// announce addresses themselves need it.
	StrictARP bool
	// KeepSysctls leaves all kernel parameters as they are. Without those that
	// [Sysctls] lists nothing works: another program has to set them, [SetSysctls]
	// for example.
	KeepSysctls bool
	// Device is the name of the dummy device, 1 to 15 bytes; "" is [DefaultDevice].
	// It is made if it is not there, and every address on it belongs to the backend.
	Device string
	// MasqueradeBit is the bit of the packet mark, 0 to 31, by which rules tell each
	// other that a connection is to be masqueraded; nil is [DefaultMasqueradeBit].
	MasqueradeBit *uint8
	// Marks is the packet marks that name virtual servers; the zero value is 0x3001
	// to 0x3fff. Each Service port that is treated otherwise near than far (see
	// ruleset.Frontend.Near) takes one in each family.
	Marks Marks
	// IPTables is which of the iptables tools is used; the zero value is the one that
	// the system has chosen.
	IPTables IPTables
	// NetNS is an open file of the network namespace to program; nil is the namespace
	// of the thread that calls [New]. New duplicates the file, and working in a
	// namespace other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Log is told of repairs, of what the kernel lacks and of Services that cannot be
	// programmed; nil is silence.
	Log *slog.Logger

	// noMaglev: the kernel lacks the scheduler that Services have which ask for a hash.
	noMaglev bool
}

// Forwarding is how a packet gets from a virtual server to an endpoint.
type Forwarding uint8

const (
	// NAT replaces the destination address and port, and the source of answers. It
	// is what Kubernetes needs.
	NAT Forwarding = iota
	// DirectRouting sends the packet as it is to the endpoint's host, which must be
	// on a network of this node, have the Service's address itself, and answers the
	// client directly. Neither ports nor source addresses are translated, so it is for
	// clients to whom the endpoint's host has a way of its own: an answer that came
	// back by this node would come from an address of this node, and be dropped. The
	// node itself and its pods are no such clients.
	DirectRouting
	// Tunnel is DirectRouting within another packet (IP in IP, IPv6 in IPv6), to an
	// endpoint on any network, which takes it out again.
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

// Timeouts is how long IPVS remembers idle connections, in whole seconds
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

// Marks is a set of packet marks: those that have Value in the bits of Mask, but
// for Value itself, which means that a packet is to be dropped.
type Marks struct {
	// Value is what the bits of Mask must be; it has no others.
	Value, Mask uint32
}

// contains reports whether m names a virtual server.
func (r Marks) contains(m uint32) bool { return m&r.Mask == r.Value && m != r.Value }

// String returns the set as iptables has it.
func (r Marks) String() string { return fmt.Sprintf("%#x/%#x", r.Value, r.Mask) }

// IPTables is a variant of the iptables tools.
type IPTables uint8

const (
	// SystemTables is "iptables-restore" and its siblings, whichever they are.
	SystemTables IPTables = iota
	// NFTables is "iptables-nft-restore" and its siblings.
	NFTables
	// LegacyTables is "iptables-legacy-restore" and its siblings.
	LegacyTables
)

// Drain is how endpoints, and whole Services, are taken out of service: with weight
// 0, so that they keep their connections and get no more, until they have none.
type Drain struct {
	// Gracefully is the protocols for which that is done. Those of other protocols are
	// removed, with the flows they have, a second after they got the weight 0. Nil is
	// TCP; empty is none.
	Gracefully []v1.Protocol
	// Limit is how long it may take, 0 for as long as there are connections.
	Limit time.Duration
}

// withDefaults returns c with what was left out filled in.
func (c Config) withDefaults() (Config, error) {
	bad := func(format string, args ...any) (Config, error) {
		return c, fmt.Errorf("%w: %w", ErrConfig, fmt.Errorf(format, args...))
	}
	if c.Families == nil {
		c.Families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	if len(c.Families) == 0 {
		return bad("no family to program")
	}
	for i, f := range c.Families {
		if f != tracker.IPv4 && f != tracker.IPv6 || slices.Contains(c.Families[:i], f) {
			return bad("families %v are not one or both of IPv4 and IPv6", c.Families)
		}
	}
	if c.Scheduler != "" {
		if err := c.Scheduler.validate(); err != nil {
			return bad("%w", err)
		}
	}
	if c.Hash.Source > tracker.HashSourcePort {
		return bad("hash of the source: %d is not a tracker.Hash", c.Hash.Source)
	}
	if c.Forwarding > Tunnel {
		return bad("forwarding method %d is none", c.Forwarding)
	}
	if c.Drain.Gracefully == nil {
		c.Drain.Gracefully = []v1.Protocol{v1.ProtocolTCP}
	}
	for _, p := range c.Drain.Gracefully {
		if inet.Protocol(p) == 0 {
			return bad("protocol %q of Drain is none", p)
		}
	}
	if c.Drain.Limit < 0 {
		return bad("the limit of Drain is negative: %s", c.Drain.Limit)
	}
	for name, d := range map[string]time.Duration{"TCP": c.Timeouts.TCP, "TCPFin": c.Timeouts.TCPFin, "UDP": c.Timeouts.UDP} {
		// The kernel keeps them in 1/1000ths of a second in a signed int
		// (ip_vs_set_timeout of net/netfilter/ipvs/ip_vs_ctl.c).
		if d < 0 || d != 0 && d < time.Second || d > 24*24*time.Hour {
			return bad("timeout %s of %s is not 1 second to 24 days", name, d)
		}
	}
	for _, p := range c.ExcludeCIDRs {
		if !p.IsValid() || p.Addr().Is4In6() {
			return bad("excluded CIDR %v", p)
		}
	}
	if c.Device == "" {
		c.Device = DefaultDevice
	}
	if !validDevice(c.Device) {
		return bad("device name %q", c.Device)
	}
	if c.MasqueradeBit == nil {
		bit := uint8(DefaultMasqueradeBit)
		c.MasqueradeBit = &bit
	}
	if *c.MasqueradeBit > 31 {
		return bad("masquerade bit %d is not 0 to 31", *c.MasqueradeBit)
	}
	if c.Marks == (Marks{}) {
		c.Marks = defaultMarks()
	}
	if c.Marks.Value&^c.Marks.Mask != 0 || c.Marks.Value == 0 || c.Marks.Mask == 0xffffffff {
		return bad("marks %s", c.Marks)
	}
	if bit := uint32(1) << *c.MasqueradeBit; bit&c.Marks.Mask == 0 || bit&c.Marks.Value != 0 {
		return bad("masquerade bit %d is part of the marks %s", *c.MasqueradeBit, c.Marks)
	}
	if c.IPTables > LegacyTables {
		return bad("variant %d of iptables is none", c.IPTables)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// validDevice reports whether the kernel takes the name (dev_valid_name of
// net/core/dev.c) and no rule can mistake it.
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

// mark returns the packet mark that asks for masquerading, 0 if nothing is
// masqueraded: an endpoint that answers the client directly has to know it.
func (c Config) mark() uint32 {
	if c.Forwarding != NAT {
		return 0
	}
	return 1 << *c.MasqueradeBit
}

// hashing returns the scheduler for what is to be chosen by a hash.
func (c Config) hashing() Scheduler {
	if c.noMaglev {
		return SourceHash
	}
	return Maglev
}

// excluded reports whether a virtual server at the address is somebody else's.
func (c Config) excluded(a netip.Addr) bool {
	return slices.ContainsFunc(c.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}
