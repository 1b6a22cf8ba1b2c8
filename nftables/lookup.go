package nftables

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Lookup reads how the kernel handles new connections like the query's packet, from the tables of a [Backend] with
// the same configuration, in this process or another. Found.Where is the table and the chain that handles the
// connections, which DESIGN.md explains. The error wraps [dataplane.ErrNoRules] if there is no table, and a
// [*dataplane.DriftError] if chains that connections to the destination meet have lost their rules.
//
// Lookup is a debugging aid. It reads whole maps without a snapshot, so a concurrent change can yield an inconsistent
// result.
func Lookup(ctx context.Context, c Config, q dataplane.Query) (dataplane.Found, error) {
	to := netip.AddrPortFrom(q.Packet.To.Addr().Unmap(), q.Packet.To.Port())
	family := tracker.FamilyOf(to.Addr())
	if family.Bits() == 0 {
		return dataplane.Found{}, fmt.Errorf("nftables: cannot look up invalid address %v", q.Packet.To)
	}
	c.Families = []tracker.Family{family}
	all, inside, key := layout.FrontendKey(q.NodePort, to.Addr(), inet.Protocol(q.Packet.Protocol), to.Port())
	var found dataplane.Found
	err := readTables(ctx, c, "look up packet", func(r reader) (err error) {
		found, err = r.find(string(key.Bytes()), all, layout.Handlers)
		if err == nil && !found.Entry {
			return r.flushed(layout.ChainNATPrerouting)
		}
		if err != nil || !q.Internal {
			return err
		}
		internal, err := r.find(string(key.Bytes()), inside, layout.InternalHandlers)
		if err != nil || internal.Entry {
			found = internal
		}
		return err
	})
	return found, err
}

// find resolves the key of a packet's destination in a map of dispatch keys, if the map has
// the key.
func (r reader) find(key string, dispatchKeys, handlers layout.Set) (found dataplane.Found, err error) {
	var dispatchKey uint32
	err = r.each(dispatchKeys, func(e nft.Element) {
		if string(e.Key) == key {
			dispatchKey, found.Service, found.Entry = binary.NativeEndian.Uint32(e.Data), e.Comment, true
		}
	})
	if err != nil || !found.Entry {
		return dataplane.Found{}, err
	}
	endpoints, err := r.endpoints(handlers)
	if err != nil {
		return dataplane.Found{}, err
	}
	chain, pool := endpoints(dispatchKey)
	found.Where, found.Endpoints = fmt.Sprintf("table %s, chain %s", r.table, chain), pool
	return found, r.flushed(chain)
}

// flushed returns a [*dataplane.DriftError] if a chain that every table fills, or one of those that find names, has
// no rules: "nft flush table", as of a firewall's reload, deletes rules and keeps the maps.
func (r reader) flushed(chains string) error {
	var filled map[string]bool
	err := nfnl.Again(r.ctx, func() error {
		filled = map[string]bool{}
		rules, err := r.conn.Rules(r.table, r.family)
		for _, rule := range rules {
			filled[rule.Chain] = true
		}
		return err
	})
	if err != nil {
		return kernel.IgnoreInterrupted(err)
	}
	_, want := kernel.Rules{Family: r.family, Stages: r.stages}.Outline([]model.Object{{Kind: model.FixedChains}, {Kind: model.BaseChains}})
	for name := range strings.SplitSeq(chains, ", chain ") {
		want[name] = 1
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if want[name] > 0 && !filled[name] {
			return drifted(r.family, "chain %s has no rules", name)
		}
	}
	return nil
}

// Ready returns the number of endpoints to which each Service port forwards new connections, from the kernel's
// tables, as Lookup does. If the frontends of a Service port have different endpoints, the largest number counts.
// Names of Service ports are as in [Traffic]. The error wraps [dataplane.ErrNoRules] if there is no table. A
// concurrent change can yield an inconsistent result.
func Ready(ctx context.Context, c Config) (map[tracker.Key]int, error) {
	out := map[tracker.Key]int{}
	err := readTables(ctx, c, "read endpoints", func(r reader) error {
		endpoints, err := r.endpoints(layout.Handlers)
		if err != nil {
			return err
		}
		add := func(e nft.Element, k tracker.Key) {
			_, pool := endpoints(binary.NativeEndian.Uint32(e.Data))
			out[k] = max(out[k], len(pool))
		}
		return r.frontends(add)
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
