package nftables

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
)

// Cleanup deletes the tables that a [Backend] with the same configuration owns,
// in each of its families, and nothing else. That there is none is no error.
// Connections that were translated stay as they are.
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
	for _, f := range c.Families {
		for _, name := range []string{c.Table, shadowOf(c.Table)} {
			if err := ctx.Err(); err != nil {
				return err
			}
			w := newWriter(name, c.mark())
			w.deleteTable(f)
			batch, _ := w.finish(nil)
			if err := ignore(conn.Commit(batch), unix.ENOENT); err != nil {
				return fmt.Errorf("nftables: clean up %s: %w", f, err)
			}
		}
	}
	return nil
}
