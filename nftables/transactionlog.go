package nftables

import (
	"context"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// logger returns a function that logs a transaction about the tables of a name, at
// [dataplane.LevelTransaction], as "nft -f" reads it.
func (b *Backend) logger(name string, n *ruleset.Node) func(*model.Tx) {
	return func(tx *model.Tx) {
		ctx := context.Background()
		if !b.config.Log.Enabled(ctx, dataplane.LevelTransaction) {
			return
		}
		for _, f := range b.config.Families {
			text := kernel.NewText(name, b.config.rules(f, n))
			text.Add(&model.Tx{
				Objects: slices.DeleteFunc(slices.Clone(tx.Objects), func(o model.Object) bool { return o.Family != f }),
				Edits:   slices.DeleteFunc(slices.Clone(tx.Edits), func(e model.Edit) bool { return e.Family != f }),
			})
			if text.Len() != 0 {
				b.config.Log.Log(ctx, dataplane.LevelTransaction, "nftables: transaction", "family", f, "input", text.String())
			}
		}
	}
}
