//go:build linux

package nftables

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/tracker"
)

// Cleanup deletes the tables that a [Backend] with the same configuration owns,
// in all of its families at once, and nothing else. That there is none is no
// error. Connections that were translated stay as they are.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	conn, err := nlbatch.Dial(c.NetNS)
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	defer conn.Close()
	err = persist(func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		var batch nlbatch.Batch
		batch.Reset()
		for _, name := range []string{c.Table, shadowOf(c.Table)} {
			for _, f := range c.Families {
				found, err := readTable(conn, name, f)
				if err != nil {
					return err
				}
				if found.exists {
					deleteTable(&batch, f, name)
				}
			}
		}
		return conn.Commit(&batch)
	})
	if err != nil {
		return fmt.Errorf("nftables: clean up: %w", err)
	}
	return nil
}

func deleteTable(batch *nlbatch.Batch, f tracker.Family, name string) {
	batch.Note("delete table")
	batch.Begin(unix.NFT_MSG_DELTABLE, 0, inet.AF(f))
	batch.String(unix.NFTA_TABLE_NAME, name)
	batch.End()
}
