package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// DefaultTable is the default of Config.Table.
const DefaultTable = "proxier"

// Config is the configuration of a [Backend]. The zero value is a node's usual
// configuration.
type Config struct {
	// Table is the name of the backend's table in each family, 1 to 55 bytes without blanks, quotes or slashes; ""
	// means [DefaultTable]. The backend owns everything in it, and in the tables of the same name with the suffixes
	// "-shadow" (see [Backend.Apply]) and "-packets" (of version 0.2.0). A name may not end in these suffixes, nor be
	// "proxier-probe".
	Table string
	// Families are the address families to program; nil means both. Services of another
	// family are ignored.
	Families []tracker.Family
	// MasqueradeMark is the bit of the packet mark by which rules mark connections that must be masqueraded; 0 means
	// [dataplane.DefaultMasqueradeMark]. No other bit is read or written.
	MasqueradeMark dataplane.MasqueradeMark
	// Clients, if not nil, returns the clients that another data plane remembers for an endpoint of a Service port
	// with client affinity, each with the time since its last connection. [Backend.Apply] calls it for every such
	// endpoint when it creates a table, and remembers these clients. A client with the wrong address family, or whose
	// time is up, is ignored. Clients that do not fit into one transaction with their Service are lost. Clients must
	// not call methods of the Backend.
	Clients func(k tracker.Key, endpoint netip.AddrPort) map[netip.Addr]time.Duration
	// Offload sends established TCP connections of Services that cross the node through a flowtable; nil means no
	// offload. [New] returns a [*dataplane.UnsupportedError] if the kernel has no flowtables.
	Offload *Offload
	// Stages is the place of the rules among those of other programs. The zero value is the usual place.
	Stages Stages
	// NetNS is an open file of the network namespace to program; nil is the namespace of the thread that calls [New].
	// New duplicates the file. A namespace other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Log receives repairs and Services that cannot be programmed, and, at [dataplane.LevelTransaction], each
	// transaction as "nft -f" reads it; nil discards them.
	Log *slog.Logger
}

// Stages is the place of the rules in netfilter. With the zero value, Services come before NAT of other programs at
// netfilter's usual priorities, dstnat (-100) and srcnat (100), as in kube-proxy's mode iptables, and filters stand
// at the usual one. Another program's rule stands before or after a stage by the priority of its chain. A [Backend]
// whose Stages changed replaces the tables with the next full delta.
type Stages struct {
	// DestinationNAT, Filter and SourceNAT, from -97 to 97, are added to the priorities of the chains that choose
	// endpoints (-102, and -101 for packets that came between two transactions), that refuse connections (0), and
	// that masquerade (99).
	DestinationNAT, Filter, SourceNAT int
	// NoFilter leaves out the refusal of connections to other ports of cluster IPs, to unused addresses of
	// ServiceCIDRs, and, of the node to its own address, to Services without endpoints. The rules that choose
	// endpoints still refuse other connections to these Services.
	NoFilter bool
	// NoMasquerade leaves out masquerading. Another program must masquerade packets whose mark has the bit
	// Config.MasqueradeMark, and those whose source and destination are the same after the translation.
	NoMasquerade bool
}

// maxShift bounds how far a stage moves: no stage reaches another one, or connection tracking.
const maxShift = 97

// check returns an error that wraps [ruleset.ErrConfig] if a priority is out of range.
func (s Stages) check() error {
	for _, p := range []int{s.DestinationNAT, s.Filter, s.SourceNAT} {
		if p < -maxShift || p > maxShift {
			return fmt.Errorf("%w: priority %d of a stage is not -%d to %d", ruleset.ErrConfig, p, maxShift, maxShift)
		}
	}
	return nil
}

// ErrTooLarge is wrapped by the error of a transaction that is larger than this process can send: see "Requirements" in the package documentation.
var ErrTooLarge = model.ErrTooLarge

// Error is the kernel's refusal of a transaction or of a request to read. [errors.As] finds it in
// the errors of this package.
type Error struct {
	// Errno is the kernel's error number.
	Errno syscall.Errno
	// What names the object that was refused, as "create set endpoints", or is "".
	What string
	// Message is the kernel's explanation (extended acknowledgement), often "".
	Message string
}

// Error returns all fields in one line.
func (e *Error) Error() string { return (*nfnl.Error)(e).Error() }

// Unwrap returns Errno, for [errors.Is].
func (e *Error) Unwrap() error { return e.Errno }

// maxName is the longest name of a table, in bytes.
const maxName = 55

// stagingOf returns the name of the staging table, which replaces the table of the given name where one transaction
// cannot replace its contents. Another suffix would orphan the tables of earlier versions.
func stagingOf(table string) string { return table + "-shadow" }

// packetsOf returns the name of the table that counted packets in version 0.2.0.
func packetsOf(table string) string { return table + "-packets" }

// probeTable is the name of a table that is created and deleted in one transaction.
const probeTable = "proxier-probe"

// withDefaults returns c with defaults for the fields that are not set, or an error
// that wraps [ruleset.ErrConfig].
func (c Config) withDefaults() (Config, error) {
	if c.Table == "" {
		c.Table = DefaultTable
	}
	err := backendconf.Complete(&c.Families, &c.MasqueradeMark, &c.Log)
	offload, errOffload := c.Offload.withDefaults()
	switch {
	case len(c.Table) > maxName || strings.ContainsAny(c.Table, " \t\n/\"{};\x00"):
		err = fmt.Errorf("%w: table name %q is not 1 to 55 bytes without blanks, quotes or slashes", ruleset.ErrConfig, c.Table)
	case strings.HasSuffix(c.Table, stagingOf("")) || strings.HasSuffix(c.Table, packetsOf("")) || c.Table == probeTable:
		err = fmt.Errorf("%w: table name %q is reserved", ruleset.ErrConfig, c.Table)
	}
	if err := errors.Join(err, errOffload, c.Stages.check()); err != nil {
		return c, fmt.Errorf("nftables: %w", err)
	}
	c.Offload = offload
	return c, nil
}

func (c Config) model(l model.Config) model.Config {
	l.FastPath = c.Offload != nil
	return l
}

// Probe returns nil if [New] would succeed, a [*dataplane.UnsupportedError], or another error of New. It changes
// nothing.
func Probe(ctx context.Context, c Config) error {
	return backendconf.Probe(New(ctx, c))
}

const defaultOffloadPackets = 20

// Offload configures the fast path for TCP connections of Services that cross the node, which they take after 20
// packets of both directions together: an nf_tables flowtable (Documentation/networking/nf_flowtable.rst of the
// kernel, KEP-4963). It was tested in Debian's Linux 5.10, 6.1 and 6.12. See "Offload" in DESIGN.md.
type Offload struct {
	// Interfaces are patterns of the names of interfaces, in the syntax of [path.Match], such as "veth*". A
	// connection takes the fast path if both its interfaces match one. The loopback interface is never chosen.
	// Required.
	Interfaces []string

	// afterPackets is the number of packets, of both directions together, after which a connection takes the fast
	// path; 0 means defaultOffloadPackets. Tests set it to 1.
	afterPackets int
	// udp offloads UDP in addition to TCP, in tests. It needs a kernel that lets programs delete the
	// connection-tracking entries of offloaded connections, because package conntrack must delete the flows to a
	// removed endpoint. Linux 6.4 does, and so do Debian's 5.10 and 6.1. Other kernels return EBUSY, which New cannot
	// probe.
	udp bool
}

// withDefaults returns a copy of o with defaults for the fields that are not set, or an
// error that wraps [ruleset.ErrConfig]. A nil o is valid.
func (o *Offload) withDefaults() (*Offload, error) {
	if o == nil {
		return nil, nil
	}
	out := *o
	out.Interfaces = slices.Clone(o.Interfaces)
	for _, p := range out.Interfaces {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			return nil, fmt.Errorf("%w: Offload.Interfaces: malformed pattern %q", ruleset.ErrConfig, p)
		}
	}
	switch {
	case len(o.Interfaces) == 0:
		return nil, fmt.Errorf("%w: Offload.Interfaces is empty", ruleset.ErrConfig)
	case o.afterPackets == 0:
		out.afterPackets = defaultOffloadPackets
	}
	return &out, nil
}

func (o *Offload) chooses(name string) bool {
	return name != layout.LoopbackInterface && slices.ContainsFunc(o.Interfaces, func(pattern string) bool {
		ok, _ := path.Match(pattern, name)
		return ok
	})
}
