//go:build linux

package nftables

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/tracker"
)

// Cleanup deletes the tables that a [Backend] with the same configuration owns, in all
// of its families in one transaction, and nothing else. It does nothing if there are
// none. Connections that were translated stay translated. The error is about the
// configuration, a [*ruleset.UnsupportedError], or the kernel's.
func Cleanup(ctx context.Context, c Config) error {
	err := ownTables(ctx, c, func(conn *nlbatch.Conn, found []ownedTable) error {
		w := newWriter("")
		for _, t := range found {
			w.table = t.name
			w.deleteTable(t.family)
		}
		batch, _ := w.finish()
		return conn.Commit(batch)
	})
	if err != nil {
		return fmt.Errorf("nftables: clean up: %w", err)
	}
	return nil
}

// Owned reports whether the network namespace has a table that [Cleanup] with the same
// configuration would delete. Its errors are like those of Cleanup.
func Owned(ctx context.Context, c Config) (owned bool, err error) {
	err = ownTables(ctx, c, func(_ *nlbatch.Conn, found []ownedTable) error {
		owned = len(found) != 0
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("nftables: look for tables: %w", err)
	}
	return owned, nil
}

// ownedTable is an existing table of a Backend.
type ownedTable struct {
	name   string
	family tracker.Family
}

// ownTables calls fn with the existing tables of a Backend with the configuration, again
// if another process changes them concurrently.
func ownTables(ctx context.Context, c Config, fn func(*nlbatch.Conn, []ownedTable) error) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	conn, err := nlbatch.Dial(c.NetNS)
	if err != nil {
		return unsupportedSocket(err)
	}
	defer conn.Close()
	return persist(func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		var found []ownedTable
		for _, name := range []string{c.Table, stagingOf(c.Table)} {
			for _, f := range c.Families {
				head, err := readTable(conn, name, f)
				if err != nil {
					return err
				}
				if head.exists {
					found = append(found, ownedTable{name, f})
				}
			}
		}
		return fn(conn, found)
	})
}
