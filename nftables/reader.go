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
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// reader reads a table for [Lookup], [Ready] and [Traffic].
type reader struct {
	ctx    context.Context
	conn   *nlbatch.Conn
	table  string
	family tracker.Family
}

// readTables calls fn with each family's table that packets meet. purpose is for errors. If
// there is no table, or a set is missing because another version wrote the table, the error
// wraps [ruleset.ErrNoRules].
func readTables(ctx context.Context, c Config, purpose string, fn func(reader) error) error {
	c, conn, err := c.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	found := false
	for _, f := range c.Families {
		table, err := tableInUse(conn, c.Table, f)
		if err == nil && table != "" {
			found = true
			err = fn(reader{ctx, conn, table, f})
		}
		if errors.Is(err, unix.ENOENT) {
			err = fmt.Errorf("table has another layout: %w", ruleset.ErrNoRules)
		}
		if err != nil {
			return fmt.Errorf("nftables: cannot %s: %w", purpose, err)
		}
	}
	if !found {
		return fmt.Errorf("nftables: cannot %s: %w", purpose, ruleset.ErrNoRules)
	}
	return nil
}

// tableInUse returns the name of the table that packets meet: the configured name, the name of
// the staging table, or "" if there is no such table.
func tableInUse(conn *nlbatch.Conn, name string, f tracker.Family) (string, error) {
	for _, name := range []string{name, stagingOf(name)} {
		head, err := readTable(conn, name, f)
		if err != nil {
			return "", err
		}
		if !head.exists {
			continue
		}
		request := nfnl.AppendString(nil, unix.NFTA_CHAIN_TABLE, name)
		request = nfnl.AppendString(request, unix.NFTA_CHAIN_NAME, chainNATPrerouting)
		err = conn.Get(unix.NFT_MSG_GETCHAIN, inet.AF(f), false, request, func([]byte) error { return nil })
		if !errors.Is(err, unix.ENOENT) {
			return name, err
		}
	}
	return "", nil
}

// each calls fn with the elements of a set. A concurrent change can make it call fn twice with
// an element, or not at all.
func (r reader) each(s set, fn func(kernelElement)) error {
	if err := r.ctx.Err(); err != nil {
		return err
	}
	return ignoreInterrupted(again(func() error { return readElements(r.conn, r.table, r.family, s.name(), fn) }))
}

// frontends calls fn with the element of each frontend and with its Service port.
func (r reader) frontends(fn func(kernelElement, tracker.Key)) error {
	for _, s := range []set{setServiceIPs, setNodePorts} {
		err := r.each(s, func(e kernelElement) {
			if len(e.key) >= portOffset && e.comment != "" && len(e.data) >= 4 {
				fn(e, tracker.Key{ServicePortName: parseName(e.comment, e.key[len(e.key)-portOffset]), Family: r.family})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// parseName returns the Service port that a comment names.
func parseName(comment string, protocol byte) tracker.ServicePortName {
	namespace, name, _ := strings.Cut(comment, "/")
	name, port, _ := strings.Cut(name, ":")
	return tracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, Port: port, Protocol: inet.ProtocolOf(protocol),
	}
}

// endpoints returns a function that returns the chain of a dispatch key's handler and the
// endpoints of its pool, sorted. For a sticky pool it returns the chain of the sticky handler, too,
// behind the other. handlers is the map of the handlers' chains.
func (r reader) endpoints(handlers set) (func(dispatchKey uint32) (chain string, pool []netip.AddrPort), error) {
	chains, stickyChains := map[uint32]string{}, map[uint32]string{}
	stickyKeys := map[uint32]uint32{}
	// The shifted number of a sticky pool has the highest bit, which numbers of other pools lack.
	pools := map[uint32][]netip.AddrPort{}
	inBucket := map[uint32]bool{}
	add := func(pool uint32, e kernelElement) {
		if a, ok := parseAddrPort(e.data); ok {
			pools[pool] = append(pools[pool], a)
		}
	}
	for _, read := range []struct {
		set set
		fn  func(key uint32, e kernelElement)
	}{
		{handlers, func(key uint32, e kernelElement) { chains[key] = e.chain }},
		{setStickyHandlers, func(key uint32, e kernelElement) { stickyChains[key] = e.chain }},
		{setStickyPools, func(key uint32, e kernelElement) { stickyKeys[key] = binary.NativeEndian.Uint32(e.data) }},
		{setEndpoints, add},
		{setStickyBuckets, func(_ uint32, e kernelElement) { inBucket[binary.NativeEndian.Uint32(e.data)] = true }},
		{setStickyEndpoints, func(member uint32, e kernelElement) {
			if inBucket[member] {
				add(member&stickyMask, e)
			}
		}},
	} {
		if err := r.each(read.set, func(e kernelElement) { read.fn(binary.NativeEndian.Uint32(e.key), e) }); err != nil {
			return nil, err
		}
	}
	for number, list := range pools {
		slices.SortFunc(list, netip.AddrPort.Compare)
		pools[number] = slices.Compact(list) // an endpoint may have several buckets
	}
	return func(dispatchKey uint32) (string, []netip.AddrPort) {
		chain, pool := chains[dispatchKey&handlerMask], dispatchKey&poolMask
		if !strings.HasSuffix(chain, chainSticky) {
			return chain, pools[pool]
		}
		key := stickyKeys[pool]
		if sticky := stickyChains[key&maxMember]; sticky != "" {
			chain += ", chain " + sticky
		}
		return chain, pools[key&stickyMask]
	}, nil
}
