package nftables

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/nftables/internal/model"
)

// Cleanup deletes the tables that a [Backend] with the same configuration owns, in all of its families in one
// transaction, and nothing else. Connections that were translated stay translated. The error is about the
// configuration, a [*dataplane.UnsupportedError], or the kernel's.
func Cleanup(ctx context.Context, c Config) error {
	err := ownTables(ctx, c, connection.Commit)
	if err != nil {
		return fmt.Errorf("nftables: cannot delete tables: %w", err)
	}
	return nil
}

// Owned reports whether the network namespace has a table that [Cleanup] would delete. Its errors are like those of
// Cleanup.
func Owned(ctx context.Context, c Config) (owned bool, err error) {
	err = ownTables(ctx, c, func(_ connection, w writer) error {
		owned = !w.Empty()
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("nftables: cannot find tables: %w", err)
	}
	return owned, nil
}

// ownTables calls fn with a writer that deletes each existing table of a Backend with the configuration, and again if
// another process changes the tables concurrently.
func ownTables(ctx context.Context, c Config, fn func(connection, writer) error) error {
	c, conn, err := c.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	return persist(func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		w := conn.NewWriter("")
		for _, table := range []string{c.Table, stagingOf(c.Table), packetsOf(c.Table)} {
			w.Use(table)
			for _, f := range c.Families {
				head, err := conn.Table(table, f)
				if err != nil {
					return err
				}
				if head.Exists {
					w.Add(&model.Tx{Objects: []model.Object{{Kind: model.DeleteTable, Family: f}}})
				}
			}
		}
		return fn(conn, w)
	})
}
