//go:build linux

package nftables

import (
	"fmt"

	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/model"
)

// keepPacketCounters creates the tables that count packets if they are missing or differ, and without
// Config.CountPackets deletes those of an earlier process. It leaves tables with counters in place.
// A table of its own serves through all replacements of the others, so no packet is missed or
// counted twice.
func (b *Backend) keepPacketCounters() error {
	w := kernel.NewWriter(packetsOf(b.config.Table))
	for _, f := range b.config.Families {
		head, err := b.conn.Table(w.Table, f)
		if err != nil {
			return err
		}
		sound := false
		if head.Exists && b.config.CountPackets {
			if sound, err = b.conn.HasPacketCounters(w.Table, f); err != nil {
				return err
			}
		}
		if head.Exists && !sound {
			w.Add(&model.Tx{Objects: []model.Object{{Kind: model.DeleteTable, Family: f}}})
		}
		if b.config.CountPackets && !sound {
			w.PacketCounters(f)
		}
	}
	if err := w.Commit(b.conn); err != nil {
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
		sound, err := b.conn.HasPacketCounters(packetsOf(b.config.Table), f)
		switch {
		case err != nil:
			return err
		case !sound:
			return drifted(f, "the table that counts packets is missing or altered")
		}
	}
	return nil
}
