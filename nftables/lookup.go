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

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Lookup reads how the kernel handles new connections like the query's packet, from the
// tables of a [Backend] with the same configuration, in this process or another. Found.Where
// is the table and the chain that handles the connections. DESIGN.md, beside the source,
// explains the names of chains. The error wraps [ruleset.ErrNoRules] if there is no table.
//
// Lookup is a debugging aid. It reads whole maps one after the other, so a concurrent
// change can yield an inconsistent result.
func Lookup(ctx context.Context, c Config, q ruleset.Query) (ruleset.Found, error) {
	to := netip.AddrPortFrom(q.Packet.To.Addr().Unmap(), q.Packet.To.Port())
	family := tracker.FamilyOf(to.Addr())
	if family.Bits() == 0 {
		return ruleset.Found{}, fmt.Errorf("nftables: cannot look up invalid address %v", q.Packet.To)
	}
	c.Families = []tracker.Family{family}
	b, err := New(ctx, c)
	if err != nil {
		return ruleset.Found{}, err
	}
	defer b.Close()
	all, inside, key := frontendKey(q.NodePort, to.Addr(), q.Packet.Protocol, to.Port())
	for _, table := range []string{b.config.Table, stagingOf(b.config.Table)} {
		l := lookup{b: b, ctx: ctx, table: table, family: family, key: string(key.bytes())}
		found, err := l.find(all, setHandlers)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err == nil && found.Entry && q.Internal {
			if internal, err := l.find(inside, setInternalHandlers); err != nil || internal.Entry {
				return internal, err
			}
		}
		return found, err
	}
	return ruleset.Found{}, fmt.Errorf("nftables: cannot look up packet: %w", ruleset.ErrNoRules)
}

// lookup is one Lookup in one table.
type lookup struct {
	b      *Backend
	ctx    context.Context
	table  string
	family tracker.Family
	key    string
}

// find resolves the packet's dispatch key in one map, if the map has one.
func (l *lookup) find(dispatchKeys, handlers set) (found ruleset.Found, err error) {
	var dispatchKey uint32
	err = l.each(dispatchKeys, func(e kernelElement) {
		if string(e.key) == l.key {
			dispatchKey, found.Service, found.Entry = binary.NativeEndian.Uint32(e.data), e.comment, true
		}
	})
	if err != nil || !found.Entry {
		return ruleset.Found{}, err
	}
	chain := ""
	err = l.each(handlers, func(e kernelElement) {
		if binary.NativeEndian.Uint32(e.key) == dispatchKey&handlerMask {
			chain = e.chain
		}
	})
	if err != nil {
		return ruleset.Found{}, err
	}
	found.Where = fmt.Sprintf("table %s, chain %s", l.table, chain)
	found.Endpoints, err = l.pool(dispatchKey&poolMask, chain)
	return found, err
}

// pool returns the endpoints of a pool, sorted.
func (l *lookup) pool(number uint32, chain string) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	if chain == chainNoEndpoints || chain == chainNoLocalEndpoints {
		return nil, nil
	}
	// The name of a chain with client affinity ends in the timeout, as in 600s.
	if !strings.HasSuffix(chain, "s") {
		err := l.each(setEndpoints, func(e kernelElement) {
			if a, ok := parseAddrPort(e.data); ok && binary.NativeEndian.Uint32(e.key) == number {
				out = append(out, a)
			}
		})
		return sorted(out), err
	}
	members := map[uint32]bool{}
	err := l.each(setStickyBuckets, func(e kernelElement) {
		if binary.NativeEndian.Uint32(e.key)>>stickyShift == number {
			members[binary.NativeEndian.Uint32(e.data)] = true
		}
	})
	if err == nil {
		err = l.each(setStickyEndpoints, func(e kernelElement) {
			if a, ok := parseAddrPort(e.data); ok && members[binary.NativeEndian.Uint32(e.key)] {
				out = append(out, a)
			}
		})
	}
	return sorted(out), err
}

// sorted returns the addresses sorted and without duplicates. An endpoint may have several
// buckets.
func sorted(list []netip.AddrPort) []netip.AddrPort {
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Compact(list)
}

// each calls fn with the elements of a set.
func (l *lookup) each(s set, fn func(kernelElement)) error {
	if err := l.ctx.Err(); err != nil {
		return err
	}
	return l.b.elements(l.table, l.family, s, fn)
}
