package nftables

import (
	"fmt"
	"maps"

	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// keepPacketCounters creates the tables that count packets if they are missing or differ, and without
// Config.CountPackets deletes those of an earlier process. It leaves tables with counters in place.
// A table of its own serves through all replacements of the others, so no packet is missed or
// counted twice.
func (b *Backend) keepPacketCounters() error {
	table := packetsOf(b.config.Table)
	var rules []kernel.Rules
	for _, f := range b.config.Families {
		rules = append(rules, kernel.Rules{Family: f})
	}
	w := b.conn.NewWriter(table, rules...)
	for _, f := range b.config.Families {
		head, err := b.conn.Table(table, f)
		if err != nil {
			return err
		}
		sound, kept := false, false
		if head.Exists && b.config.CountPackets {
			if sound, kept, err = b.hasPacketCounters(f); err != nil {
				return err
			}
		}
		switch {
		case head.Exists && kept && !sound:
			w.Add(&model.Tx{Objects: []model.Object{{Kind: model.DeleteRules, Family: f}}})
		case head.Exists && !sound:
			w.Add(&model.Tx{Objects: []model.Object{{Kind: model.DeleteTable, Family: f}}})
		}
		if b.config.CountPackets && !sound {
			w.Add(&model.Tx{Objects: packetCounterObjects(f)})
		}
	}
	if err := b.conn.Commit(w); err != nil {
		return fmt.Errorf("cannot write the tables that count packets: %w", err)
	}
	return nil
}

// examinePacketCounters returns a drift error if a table that counts packets is missing or altered.
func (b *Backend) examinePacketCounters() error {
	if !b.config.CountPackets {
		return nil
	}
	for _, f := range b.config.Families {
		sound, _, err := b.hasPacketCounters(f)
		switch {
		case err != nil:
			return err
		case !sound:
			return drifted(f, "the table that counts packets is missing or altered")
		}
	}
	return nil
}

// packetCounterObjects creates the table that counts packets.
func packetCounterObjects(f tracker.Family) []model.Object {
	return []model.Object{{Kind: model.PacketCounters, Family: f}}
}

// hasPacketCounters reports whether the table that counts packets is as this package creates it. kept
// reports whether new rules suffice to make it so: then its counters stay.
func (b *Backend) hasPacketCounters(f tracker.Family) (sound, kept bool, err error) {
	table := packetsOf(b.config.Table)
	head, err := b.conn.Table(table, f)
	if err != nil || !head.Exists || head.Flags != 0 {
		return false, false, err
	}
	sets, err := b.conn.Sets(table, f)
	if err != nil || len(sets) != 1 || !sets[layout.Packets.Name()].Is(layout.Packets.Spec(f)) {
		return false, false, err
	}
	chains, err := b.conn.Chains(table, f)
	if err != nil {
		return false, false, err
	}
	rules, err := b.conn.Rules(table, f)
	if err != nil {
		return false, false, err
	}
	counts := map[string]int{}
	for _, r := range rules {
		counts[r.Chain]++
	}
	base, want := kernel.Rules{Family: f}.Outline(packetCounterObjects(f))
	missing := len(want)
	for name, chain := range chains {
		if _, ok := want[name]; !ok || !chain.Is(base[name]) {
			return false, false, nil
		}
		missing--
	}
	return missing == 0 && maps.Equal(counts, want), true, nil
}
