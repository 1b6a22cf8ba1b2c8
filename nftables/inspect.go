//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// kernelTables are the tables of one name in the kernel.
type kernelTables struct {
	name     string
	families map[tracker.Family]*kernelTable
	// exist and hooked report whether a table exists and whether one is hooked. sound reports
	// whether all existing tables are sound. handle is the largest handle of the tables.
	exist, hooked, sound bool
	handle               uint64
}

// kernelTable is a table in the kernel that an earlier process left, or that this process left
// after a failure.
type kernelTable struct {
	kernelHead
	// sound reports that the table has the present layout of this package and can be rewritten
	// in place. A dormant table, or one with another hook of a chain, must be deleted: no other
	// repair works on every kernel.
	sound bool
	// hooked reports whether packets meet the table.
	hooked bool
	sets   map[string]kernelSet
	chains map[string]kernelChain
	// flowtables holds the table's flowtables by name.
	flowtables map[string]kernelFlowtable
	// ranges holds the contents of the existing interval sets.
	ranges map[set][]addrRange
	// hairpin lists the endpoints whose connections to themselves are masqueraded. It is nil if
	// the set is very large.
	hairpin []netip.Addr
	// sticky holds the sticky pools, nil if they cannot be read. stickyNumbers holds their
	// numbers.
	sticky        map[stickyOwner]*adoptedPool
	stickyNumbers map[uint32]bool
}

// inspectAll inspects the tables of a name in all families.
func (b *Backend) inspectAll(name string) (*kernelTables, error) {
	out := &kernelTables{name: name, sound: true, families: map[tracker.Family]*kernelTable{}}
	for _, f := range b.config.Families {
		k, err := b.inspect(name, f)
		if err != nil {
			return nil, fmt.Errorf("read table: %w", err)
		}
		out.families[f] = k
		out.exist, out.hooked = out.exist || k.exists, out.hooked || k.hooked
		out.sound, out.handle = out.sound && (k.sound || !k.exists), max(out.handle, k.handle)
	}
	return out, nil
}

// inspect reads the family's table of a name, but no large map, in order to replace it. If
// commits of other processes interrupt every attempt, inspect uses the last one. The commits
// most likely concern other tables. If they do not, the kernel refuses the transaction.
func (b *Backend) inspect(table string, f tracker.Family) (k *kernelTable, err error) {
	k = &kernelTable{ranges: map[set][]addrRange{}}
	if k.kernelHead, err = readTable(b.conn, table, f); err != nil || !k.exists {
		return k, err
	}
	k.sets, err = b.readSets(table, f)
	if err = ignoreInterrupted(err); err != nil {
		return k, err
	}
	k.chains, err = b.readChains(table, f)
	if err = ignoreInterrupted(err); err != nil {
		return k, err
	}
	k.flowtables, err = b.readFlowtables(table, f)
	if err = ignoreInterrupted(err); err != nil {
		return k, err
	}
	k.sound = k.flags == 0
	base := rules{family: f, mark: b.mark()}.baseChains()
	for name, c := range k.chains {
		k.hooked = k.hooked || c.base != nil
		k.sound = k.sound && c.is(base[name])
	}
	version := uint32(0)
	err = b.readUsable(k, table, f, setLayout, func() { version = 0 }, func(e kernelElement) {
		version = binary.NativeEndian.Uint32(e.key)
	})
	k.sound = k.sound && version == layoutVersion && err == nil
	if err != nil || version < adoptableVersion || version > layoutVersion {
		return k, err
	}
	if k.has(setStickyClients, f) {
		err = b.readUsable(k, table, f, setStickyEndpoints, func() {
			k.sticky, k.stickyNumbers = map[stickyOwner]*adoptedPool{}, map[uint32]bool{}
		}, k.addSticky)
		if err != nil {
			return k, err
		}
	}
	for _, s := range []set{setNodePortIPs, setServiceCIDRs} {
		if k.has(s, f) {
			k.ranges[s], err = b.readRanges(table, f, s)
			if err = ignoreInterrupted(err); err != nil {
				return k, err
			}
		}
	}
	if k.sets[setHairpin.name()].size > 2*countable {
		return k, nil
	}
	return k, b.readUsable(k, table, f, setHairpin, func() { k.hairpin = nil }, func(e kernelElement) {
		if a, ok := netip.AddrFromSlice(e.key[:len(e.key)/2]); ok {
			k.hairpin = append(k.hairpin, a)
		}
	})
}

// has reports whether the table has the set with this package's attributes.
func (k *kernelTable) has(s set, f tracker.Family) bool {
	found, ok := k.sets[s.name()]
	return ok && found.is(s.spec(f))
}

// readUsable calls fn with the elements of a set, and begin before each attempt. If the table
// does not have the set, readUsable calls neither.
func (b *Backend) readUsable(k *kernelTable, table string, f tracker.Family, s set, begin func(), fn func(kernelElement)) error {
	if !k.has(s, f) {
		return nil
	}
	return ignoreInterrupted(b.readAll(table, f, s, begin, fn))
}

// readRanges returns the contents of an interval set.
func (b *Backend) readRanges(table string, f tracker.Family, s set) ([]addrRange, error) {
	var bounds []bound
	err := b.readAll(table, f, s, func() { bounds = nil }, func(e kernelElement) { bounds = appendBound(bounds, e) })
	return rangesOf(bounds), err
}

// keeps reports whether a set stays in place when the table is rewritten. These sets do: the
// remembered clients, the interval sets, whose elements would be missing for a moment after the
// transaction, and the counters, if they have room for size elements.
func (k *kernelTable) keeps(s set, f tracker.Family, size int) bool {
	if !k.sound || !k.has(s, f) {
		return false
	}
	switch s {
	case setStickyClients:
		return k.sticky != nil
	case setNodePortIPs, setServiceCIDRs:
		return true
	case setConnections, setRefused, setDropped:
		return k.sets[s.name()].size >= size
	}
	return false
}

// addSticky adds an element of sticky-endpoints to its pool.
func (k *kernelTable) addSticky(e kernelElement) {
	addr, ok := parseAddrPort(e.data)
	if !ok || len(e.key) != 4 || e.comment == "" {
		return
	}
	number := binary.NativeEndian.Uint32(e.key)
	if number&dispatchMark == 0 {
		return
	}
	owner := stickyOwner(e.comment)
	p, pool := k.sticky[owner], number>>stickyShift
	if p == nil {
		if k.stickyNumbers[pool] {
			return // the table was altered: two owners have the same number
		}
		p = &adoptedPool{number: pool, members: map[netip.AddrPort]uint16{}}
		k.sticky[owner], k.stickyNumbers[pool] = p, true
	}
	if p.number == pool {
		p.members[addr] = uint16(number)
	}
}
