//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

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
	all, inside, key := frontendKey(q.NodePort, to.Addr(), q.Packet.Protocol, to.Port())
	var found ruleset.Found
	err := readTables(ctx, c, "look up packet", func(r reader) (err error) {
		found, err = r.find(string(key.bytes()), all, setHandlers)
		if err != nil || !found.Entry || !q.Internal {
			return err
		}
		internal, err := r.find(string(key.bytes()), inside, setInternalHandlers)
		if err != nil || internal.Entry {
			found = internal
		}
		return err
	})
	return found, err
}

// find resolves the key of a packet's destination in a map of dispatch keys, if the map has
// the key.
func (r reader) find(key string, dispatchKeys, handlers set) (found ruleset.Found, err error) {
	var dispatchKey uint32
	err = r.each(dispatchKeys, func(e kernelElement) {
		if string(e.key) == key {
			dispatchKey, found.Service, found.Entry = binary.NativeEndian.Uint32(e.data), e.comment, true
		}
	})
	if err != nil || !found.Entry {
		return ruleset.Found{}, err
	}
	endpoints, err := r.endpoints(handlers)
	if err != nil {
		return ruleset.Found{}, err
	}
	chain, pool := endpoints(dispatchKey)
	found.Where, found.Endpoints = fmt.Sprintf("table %s, chain %s", r.table, chain), pool
	return found, nil
}

// Ready returns the number of endpoints to which each Service port forwards new connections.
// It reads the kernel's tables of a [Backend] with the same configuration, in this process or
// another. If the frontends of a Service port have different endpoints, the largest number
// counts. Names of Service ports are as in [Traffic]. The error wraps [ruleset.ErrNoRules] if
// there is no table.
//
// Ready is a debugging aid. It reads all endpoints, without a snapshot, so a concurrent change
// can yield an inconsistent result.
func Ready(ctx context.Context, c Config) (map[tracker.Key]int, error) {
	out := map[tracker.Key]int{}
	err := readTables(ctx, c, "read endpoints", func(r reader) error {
		endpoints, err := r.endpoints(setHandlers)
		if err != nil {
			return err
		}
		return r.frontends(func(e kernelElement, k tracker.Key) {
			_, pool := endpoints(binary.NativeEndian.Uint32(e.data))
			out[k] = max(out[k], len(pool))
		})
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
