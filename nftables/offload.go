package nftables

import (
	"fmt"
	"path"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// defaultOffloadPackets is the default of Offload.AfterPackets.
const defaultOffloadPackets = 20

// Offload configures the fast path for connections of Services that cross the node: an
// nf_tables flowtable (Documentation/networking/nf_flowtable.rst of the kernel, KEP-4963).
// See "What offloaded packets skip" in DESIGN.md.
type Offload struct {
	// Interfaces are patterns of the names of interfaces, in the syntax of [path.Match], such as
	// "veth*". A connection takes the fast path if both its interfaces match one. The loopback
	// interface is never chosen. Required.
	Interfaces []string
	// AfterPackets is the number of packets, of both directions together, after which a
	// connection takes the fast path; 0 means 20. It must not be
	// negative. With 1, connections take the fast path as soon as they are established.
	AfterPackets int
	// UDP offloads UDP in addition to TCP. It needs a kernel that lets programs delete the
	// connection-tracking entries of offloaded connections, because package conntrack must
	// delete the flows to a removed endpoint. Linux 6.4 does, and so do Debian's 5.10 and
	// 6.1. Other kernels return EBUSY, which New cannot probe.
	UDP bool
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
	case o.AfterPackets < 0:
		return nil, fmt.Errorf("%w: Offload.AfterPackets is negative: %d", ruleset.ErrConfig, o.AfterPackets)
	case o.AfterPackets == 0:
		out.AfterPackets = defaultOffloadPackets
	}
	return &out, nil
}

// chooses reports whether the interface of a name is chosen.
func (o *Offload) chooses(name string) bool {
	return name != layout.LoopbackInterface && slices.ContainsFunc(o.Interfaces, func(pattern string) bool {
		ok, _ := path.Match(pattern, name)
		return ok
	})
}
