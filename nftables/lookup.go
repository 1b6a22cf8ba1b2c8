//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// ErrNoTable is returned by [Lookup] where there is no table to look in.
var ErrNoTable = errors.New("nftables: there is no table")

// Found is what the kernel does with new connections to an address and port, as
// [Lookup] read it.
type Found struct {
	// Table is the table it was read from.
	Table string
	// Service is the comment of the entry: the Service port's name.
	Service string
	// Chain is the chain that handles the connections; the package documentation
	// tells what each name stands for. Endpoints is where it sends them, sorted.
	Chain     string
	Endpoints []netip.AddrPort
	// NearChain and NearEndpoints are the same for connections from this node and
	// its pods, "" and nil if those are handled alike.
	NearChain     string
	NearEndpoints []netip.AddrPort
}

// Lookup reads from the kernel what becomes of new connections to an address, port
// and protocol, in the tables of a [Backend] with the same configuration, in this
// process or another. ok reports whether there is an entry for them. A NodePort is
// found at the unspecified address of its family, as in ruleset's Snapshot.Lookup.
// It fails if the tables cannot be read.
//
// It is for people who ask: it reads whole maps, several times, so that what it
// finds may be neither of before nor of after a change that is made meanwhile.
func Lookup(ctx context.Context, c Config, to netip.AddrPort, p v1.Protocol) (f Found, ok bool, err error) {
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	family := tracker.FamilyOf(to.Addr())
	if family.Bits() == 0 {
		return Found{}, false, fmt.Errorf("nftables: bad address %v", to)
	}
	c.Families = []tracker.Family{family}
	b, err := New(c)
	if err != nil {
		return Found{}, false, err
	}
	defer b.Close()
	all, near := setServiceIPs, setNearIPs
	var key buffer
	n := 0
	if to.Addr().IsUnspecified() {
		all, near = setNodePorts, setNearNodePorts
	} else {
		n = key.addr(0, to.Addr())
	}
	n = key.port(key.proto(n, inet.Protocol(p)), to.Port())
	for _, table := range []string{b.config.Table, shadowOf(b.config.Table)} {
		l := lookup{b: b, ctx: ctx, table: table, family: family, key: string(key[:n])}
		f = Found{Table: table}
		f.Service, f.Chain, f.Endpoints, ok, err = l.find(all, setClasses)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err == nil && ok {
			_, f.NearChain, f.NearEndpoints, _, err = l.find(near, setNearClasses)
		}
		return f, ok, err
	}
	return Found{}, false, ErrNoTable
}

// lookup is one Lookup in one table.
type lookup struct {
	b      *Backend
	ctx    context.Context
	table  string
	family tracker.Family
	key    string
}

// find resolves the ticket in one map, if there is one.
func (l *lookup) find(tickets, classes set) (service, chain string, eps []netip.AddrPort, ok bool, err error) {
	var ticket uint32
	err = l.each(tickets, func(e element) {
		if string(e.key) == l.key {
			ticket, service, ok = binary.NativeEndian.Uint32(e.data), e.comment, true
		}
	})
	if err != nil || !ok {
		return "", "", nil, false, err
	}
	err = l.each(classes, func(e element) {
		if binary.NativeEndian.Uint32(e.key) == ticket&classMask {
			chain = e.chain
		}
	})
	if err != nil {
		return "", "", nil, false, err
	}
	eps, err = l.pool(ticket&poolMask, chain)
	return service, chain, eps, true, err
}

// pool returns the endpoints of a pool, sorted.
func (l *lookup) pool(number uint32, chain string) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	if chain == chainNoEndpoints || chain == chainNoLocalEndpoints {
		return nil, nil
	}
	// The names of chains of Services with affinity end in its seconds.
	if !strings.HasSuffix(chain, "s") {
		err := l.each(setEndpoints, func(e element) {
			if a, ok := parseAddrPort(e.data); ok && binary.NativeEndian.Uint32(e.key) == number {
				out = append(out, a)
			}
		})
		return sorted(out), err
	}
	members := map[uint32]bool{}
	err := l.each(setStickySlots, func(e element) {
		if binary.NativeEndian.Uint32(e.key)>>stickyShift == number {
			members[binary.NativeEndian.Uint32(e.data)] = true
		}
	})
	if err == nil {
		err = l.each(setStickyEndpoints, func(e element) {
			if a, ok := parseAddrPort(e.data); ok && members[binary.NativeEndian.Uint32(e.key)] {
				out = append(out, a)
			}
		})
	}
	return sorted(out), err
}

// sorted returns each address once: one may have several slots.
func sorted(list []netip.AddrPort) []netip.AddrPort {
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Compact(list)
}

// each calls fn with the elements of a set.
func (l *lookup) each(s set, fn func(element)) error {
	if err := l.ctx.Err(); err != nil {
		return err
	}
	return l.b.elements(l.table, l.family, s, fn)
}
