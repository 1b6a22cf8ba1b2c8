package nftables

import (
	"fmt"
	"path"

	"github.com/go-proxier/proxier/ruleset"
)

// DefaultOffloadPackets is the default of Offload.AfterPackets.
const DefaultOffloadPackets = 20

// Offload configures the fast path for connections of Services that cross the node: an
// nf_tables flowtable (Documentation/networking/nf_flowtable.rst of the kernel, KEP-4963).
// See "Offload" in the package documentation.
type Offload struct {
	// Interfaces reports whether packets that come in by an interface may take the fast
	// path. A connection takes it if both its interfaces are chosen. The loopback interface
	// is never chosen. Required; [InterfacesMatching] returns such a function. The backend
	// calls Interfaces with its lock held. Interfaces must always return the same result for
	// the same name.
	Interfaces func(name string) bool
	// AfterPackets is the number of packets, of both directions together, after which a
	// connection takes the fast path; 0 means [DefaultOffloadPackets]. It must not be
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
	switch {
	case o.Interfaces == nil:
		return nil, fmt.Errorf("%w: Offload.Interfaces is nil", ruleset.ErrConfig)
	case o.AfterPackets < 0:
		return nil, fmt.Errorf("%w: Offload.AfterPackets is negative: %d", ruleset.ErrConfig, o.AfterPackets)
	case o.AfterPackets == 0:
		out.AfterPackets = DefaultOffloadPackets
	}
	return &out, nil
}

// InterfacesMatching returns a function for Offload.Interfaces that chooses the interfaces
// whose name matches one of the patterns, in the syntax of [path.Match], such as "veth*". If a
// pattern is malformed, the error wraps [ruleset.ErrConfig].
func InterfacesMatching(patterns ...string) (func(name string) bool, error) {
	for _, p := range patterns {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			return nil, fmt.Errorf("nftables: %w: interface pattern %q is malformed", ruleset.ErrConfig, p)
		}
	}
	patterns = append([]string(nil), patterns...)
	return func(name string) bool {
		for _, p := range patterns {
			if ok, _ := path.Match(p, name); ok {
				return true
			}
		}
		return false
	}, nil
}
