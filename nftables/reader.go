package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// reader reads a table for [Lookup], [Ready] and [Traffic].
type reader struct {
	ctx    context.Context
	conn   lister
	table  string
	family tracker.Family
	stages kernel.Stages
}

// readTables calls fn with each family's table that packets meet. purpose is for errors. If there is no table, or a
// set is missing because another version wrote the table, the error wraps [dataplane.ErrNoRules].
func readTables(ctx context.Context, c Config, purpose string, fn func(reader) error) error {
	c, conn, err := c.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	return readTablesBy(ctx, conn, c, purpose, fn)
}

// readTablesBy is readTables with a connection. c has its defaults.
func readTablesBy(ctx context.Context, conn lister, c Config, purpose string, fn func(reader) error) error {
	found := false
	for _, f := range c.Families {
		table, err := tableInUse(conn, c.Table, f)
		if err == nil && table != "" {
			found = true
			err = fn(reader{ctx, conn, table, f, kernel.Stages(c.Stages)})
		}
		if errors.Is(err, syscall.ENOENT) {
			err = fmt.Errorf("table has another layout: %w", dataplane.ErrNoRules)
		}
		if err != nil {
			return fmt.Errorf("nftables: cannot %s: %w", purpose, err)
		}
	}
	if !found {
		return fmt.Errorf("nftables: cannot %s: %w", purpose, dataplane.ErrNoRules)
	}
	return nil
}

// tableInUse returns the name of the table that packets meet: the configured name, the name of
// the staging table, or "" if there is no such table.
func tableInUse(conn lister, name string, f tracker.Family) (string, error) {
	for _, name := range []string{name, stagingOf(name)} {
		found, err := conn.HasBaseChain(name, f, layout.ChainNATPrerouting)
		if found || err != nil {
			return name, err
		}
	}
	return "", nil
}

// each calls fn with the elements of a set. A concurrent change can make it repeat or miss an element.
func (r reader) each(s layout.Set, fn func(nft.Element)) error {
	if err := r.ctx.Err(); err != nil {
		return err
	}
	return kernel.IgnoreInterrupted(nfnl.Again(r.ctx, func() error { return r.conn.Elements(r.table, r.family, s, fn) }))
}

func readAll(conn lister, table string, f tracker.Family, s layout.Set, begin func(), fn func(nft.Element)) error {
	return nfnl.Again(context.Background(), func() error {
		begin()
		return conn.Elements(table, f, s, fn)
	})
}

// frontends calls fn with the element of each frontend and with its Service port.
func (r reader) frontends(fn func(nft.Element, tracker.Key)) error {
	for _, s := range [...]layout.Set{layout.ServiceIPs, layout.NodePorts} {
		err := r.each(s, func(e nft.Element) {
			if len(e.Key) >= layout.PortOffset && e.Comment != "" && len(e.Data) >= 4 {
				fn(e, tracker.Key{ServicePortName: layout.ParseServiceComment(e.Comment, inet.ProtocolOf(e.Key[len(e.Key)-layout.PortOffset])), Family: r.family})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// endpoints returns a function that returns the chain of a dispatch key's handler and the endpoints of its pool,
// sorted. For a sticky pool it adds the chain of the sticky handler. handlers is the map of the handlers' chains.
func (r reader) endpoints(handlers layout.Set) (func(dispatchKey uint32) (chain string, pool []netip.AddrPort), error) {
	chains, stickyChains := map[uint32]string{}, map[uint32]string{}
	stickyKeys := map[uint32]uint32{}
	// The shifted number of a sticky pool has the highest bit, which numbers of other pools lack.
	pools := map[uint32][]netip.AddrPort{}
	inBucket := map[uint32]bool{}
	add := func(pool uint32, e nft.Element) {
		if a, ok := layout.ParseAddrPort(e.Data); ok {
			pools[pool] = append(pools[pool], a)
		}
	}
	for _, read := range []struct {
		set layout.Set
		fn  func(key uint32, e nft.Element)
	}{
		{handlers, func(key uint32, e nft.Element) { chains[key] = e.Chain }},
		{layout.StickyHandlers, func(key uint32, e nft.Element) { stickyChains[key] = e.Chain }},
		{layout.StickyPools, func(key uint32, e nft.Element) { stickyKeys[key] = binary.NativeEndian.Uint32(e.Data) }},
		{layout.Endpoints, add},
		{layout.UDPEndpoints, add},
		{layout.SCTPEndpoints, add},
		{layout.StickyBuckets, func(_ uint32, e nft.Element) { inBucket[binary.NativeEndian.Uint32(e.Data)] = true }},
		{layout.StickyEndpoints, func(member uint32, e nft.Element) {
			if inBucket[member] {
				add(member&layout.StickyMask, e)
			}
		}},
	} {
		if err := r.each(read.set, func(e nft.Element) { read.fn(binary.NativeEndian.Uint32(e.Key), e) }); err != nil {
			return nil, err
		}
	}
	for number, list := range pools {
		slices.SortFunc(list, netip.AddrPort.Compare)
		pools[number] = slices.Compact(list) // an endpoint may have several buckets
	}
	return func(dispatchKey uint32) (string, []netip.AddrPort) {
		chain, pool := chains[dispatchKey&layout.HandlerMask], dispatchKey&layout.PoolMask
		if !strings.HasSuffix(chain, layout.ChainSticky) {
			return chain, pools[pool]
		}
		key := stickyKeys[pool]
		if sticky := stickyChains[key&layout.MaxMember]; sticky != "" {
			chain += ", chain " + sticky
		}
		return chain, pools[key&layout.StickyMask]
	}, nil
}
