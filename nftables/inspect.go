package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

type kernelTables struct {
	name     string
	families map[tracker.Family]*kernelTable
	// exist and hooked report whether a table exists and whether one is hooked. sound reports whether all existing
	// tables are sound. handle is the largest handle of the tables.
	exist, hooked, sound bool
	handle               uint64
}

// kernelTable is a table in the kernel that an earlier process, or a failure of this one, left.
type kernelTable struct {
	nft.Head
	// sound reports that the table has the present layout and can be rewritten in place. A dormant table, or one with
	// another hook of a chain, must be deleted: no other repair works on every kernel.
	sound bool
	// hooked reports whether packets meet the table.
	hooked     bool
	sets       map[string]nft.Set
	chains     map[string]nft.Chain
	flowtables map[string]nft.Flowtable
	ranges     map[layout.Set][]model.Range
	// hairpin lists the endpoints whose connections to themselves are masqueraded, nil if the set is very large.
	hairpin []netip.Addr
	// sticky holds the sticky pools, nil if they cannot be read.
	sticky *model.Adopted
}

func (b *Backend) inspectAll(name string) (*kernelTables, error) {
	out := &kernelTables{name: name, sound: true, families: map[tracker.Family]*kernelTable{}}
	for _, f := range b.config.Families {
		k, err := b.inspect(name, f)
		if err != nil {
			return nil, fmt.Errorf("read table: %w", err)
		}
		out.families[f] = k
		out.exist, out.hooked = out.exist || k.Exists, out.hooked || k.hooked
		out.sound, out.handle = out.sound && (k.sound || !k.Exists), max(out.handle, k.Handle)
	}
	return out, nil
}

// inspect reads the family's table of a name, but no large map, in order to replace it. If commits of other processes
// interrupt every attempt, it uses the last one. If these concern the table, the kernel refuses the transaction.
func (b *Backend) inspect(table string, f tracker.Family) (k *kernelTable, err error) {
	k = &kernelTable{ranges: map[layout.Set][]model.Range{}}
	if k.Head, err = b.conn.Table(table, f); err != nil || !k.Exists {
		return k, err
	}
	k.sets, err = b.conn.Sets(table, f)
	if err = kernel.IgnoreInterrupted(err); err != nil {
		return k, err
	}
	k.chains, err = b.conn.Chains(table, f)
	if err = kernel.IgnoreInterrupted(err); err != nil {
		return k, err
	}
	k.flowtables, err = b.conn.Flowtables(table, f)
	if err = kernel.IgnoreInterrupted(err); err != nil {
		return k, err
	}
	k.sound = k.Flags == 0
	base, _ := kernel.Rules{Family: f, Stages: kernel.Stages(b.config.Stages)}.Outline([]model.Object{{Kind: model.BaseChains}})
	for name, c := range k.chains {
		k.hooked = k.hooked || c.Base != nil
		k.sound = k.sound && c.Is(base[name])
	}
	version := uint32(0)
	err = b.readUsable(k, table, f, layout.VersionSet, func() { version = 0 }, func(e nft.Element) {
		version = binary.NativeEndian.Uint32(e.Key)
	})
	k.sound = k.sound && version == layout.Version && err == nil
	if err != nil || version < layout.OldestVersion || version > layout.Version {
		return k, err
	}
	if k.has(layout.StickyClients, f) {
		err = b.readUsable(k, table, f, layout.StickyEndpoints, func() { k.sticky = model.NewAdopted() }, func(e nft.Element) {
			k.sticky.Add(e.Key, e.Data, e.Comment)
		})
		if err != nil {
			return k, err
		}
	}
	for _, s := range intervalSets {
		if k.has(s, f) {
			k.ranges[s], err = b.readRanges(table, f, s)
			if err = kernel.IgnoreInterrupted(err); err != nil {
				return k, err
			}
		}
	}
	if k.sets[layout.Hairpin.Name()].Size > 2*countable {
		return k, nil
	}
	return k, b.readUsable(k, table, f, layout.Hairpin, func() { k.hairpin = nil }, func(e nft.Element) {
		if a, ok := netip.AddrFromSlice(e.Key[:len(e.Key)/2]); ok {
			k.hairpin = append(k.hairpin, a)
		}
	})
}

var intervalSets = [...]layout.Set{layout.NodePortIPs, layout.ServiceCIDRs}

// has reports whether the table has the set with this package's attributes.
func (k *kernelTable) has(s layout.Set, f tracker.Family) bool {
	found, ok := k.sets[s.Name()]
	return ok && found.Is(s.Spec(f))
}

// readUsable calls fn with the elements of a set, if the table has it, and begin before each attempt.
func (b *Backend) readUsable(k *kernelTable, table string, f tracker.Family, s layout.Set, begin func(), fn func(nft.Element)) error {
	if !k.has(s, f) {
		return nil
	}
	return kernel.IgnoreInterrupted(readAll(b.conn, table, f, s, begin, fn))
}

func (b *Backend) readRanges(table string, f tracker.Family, s layout.Set) ([]model.Range, error) {
	var bounds []model.Bound
	err := readAll(b.conn, table, f, s, func() { bounds = nil }, func(e nft.Element) {
		if a, ok := netip.AddrFromSlice(e.Key); ok {
			bounds = append(bounds, model.Bound{Addr: a, End: e.IntervalEnd})
		}
	})
	return model.RangesOf(bounds), err
}

// keeps reports whether a set stays in place when the table is rewritten: the remembered clients, the interval sets,
// whose elements would be missing for a moment after the transaction, and the counters, if they have room for size
// elements.
func (k *kernelTable) keeps(s layout.Set, f tracker.Family, size int) bool {
	if !k.sound || !k.has(s, f) {
		return false
	}
	switch {
	case s == layout.StickyClients:
		return k.sticky != nil
	case s.Interval():
		return true
	case s.Counts():
		return k.sets[s.Name()].Size >= size
	}
	return false
}
