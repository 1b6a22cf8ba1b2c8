package nftables

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Renderer turns rulesets into the table of one address family, on every system and without privileges. It plans with
// the model of a [Backend], and writes text instead of messages to the kernel. It does no I/O: the caller's deltas
// determine what is in effect. It is not safe for concurrent use. Its transactions can be printed, compared, sent to
// another node, or merged with a firewall's rules, as the program examples/noderules does. Package fake loads them
// into tables in memory. [NewRenderer] makes one; the zero value must not be used.
type Renderer struct {
	config Config
	layout model.Config
	family tracker.Family
	// tables is the model of what the Renderer has rendered, nil before the first full delta.
	tables *model.Tables
}

// NewRenderer returns a Renderer of the table that a [Backend] writes in a family. It uses c.Table, c.MasqueradeMark,
// c.Clients and c.Offload. The error wraps [ruleset.ErrConfig]. With c.Offload, the flowtable and the set
// fast-path-interfaces are empty: the caller adds interfaces to both.
func NewRenderer(c Config, f tracker.Family) (*Renderer, error) {
	c.Families = []tracker.Family{f}
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	l := c.model(model.DefaultConfig)
	l.GracePeriod = 0 // what a delta leads to must not depend on the time
	return &Renderer{config: c, layout: l, family: f}, nil
}

// Render returns the transaction from the table before d to the one after it. That of a full delta is for a network
// namespace without the table. Changes of the other family do not count. A transaction deletes the chains that the
// one before it made unused. The Renderer counts the transaction as applied; otherwise the caller must call
// [Transaction.Revert] before the next Render.
//
// A [*ruleset.PartialError] names Services as that of [Backend.Apply] does. Render returns [ruleset.ErrNeedFull] if d
// is not full although it must be, and no transaction.
func (r *Renderer) Render(d *ruleset.Delta) (*Transaction, error) {
	if !d.Full && (r.tables == nil || r.tables.List[0].NeedsRewrite(d.Node)) {
		return nil, ruleset.ErrNeedFull
	}
	t := &Transaction{table: r.config.Table, rules: r.config.rules(r.family, d.Node), revert: func() { r.tables = nil }}
	render := r.update
	if d.Full {
		render = r.fill
	}
	failed, err := render(d, t)
	if err != nil {
		r.tables = nil
		return nil, fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	}
	return t, partial(failed)
}

func (r *Renderer) fill(d *ruleset.Delta, t *Transaction) (map[tracker.Key]error, error) {
	table := model.NewTable(r.family, d.Node, r.layout, d.Changes, 0)
	create := &model.Tx{}
	create.Object(model.Object{Kind: model.CreateNewTable, Family: r.family})
	if r.config.Clients != nil {
		table.Affinity.Recall(r.config.Clients)
		defer table.Affinity.Recall(nil)
	}
	table.Create(nil, false, create)
	table.Hook(create)
	r.tables = model.NewTables(table)
	return r.tables.Fill(context.Background(), d, &t.parts, create, nil)
}

func (r *Renderer) update(d *ruleset.Delta, t *Transaction) (map[tracker.Key]error, error) {
	table := r.tables.List[0]
	// Kernels before 6.2 cannot delete a chain in the transaction that deletes what leads to it.
	tx := &model.Tx{}
	for _, name := range slices.Sorted(maps.Keys(table.Chains.Garbage())) {
		tx.Object(model.Object{Kind: model.DeleteChain, Family: r.family, Name: name})
	}
	table.Chains.DropGarbage(true)
	t.parts.Send(tx)
	return r.tables.Update(context.Background(), d, &t.parts)
}

// Transaction is a change of the table of one family, as a value. Its methods other than Revert may be
// called concurrently. The zero value must not be used.
type Transaction struct {
	table  string
	rules  kernel.Rules
	parts  recorder
	revert func()
}

// recorder is a [model.Sink] that keeps transactions. Each is for the state after the one before it.
type recorder []*model.Tx

func (*recorder) Limit() (int, model.Meter) { return math.MaxInt, nil }

func (r *recorder) Send(tx *model.Tx) error {
	if len(tx.Objects)+len(tx.Edits) != 0 {
		*r = append(*r, &model.Tx{Objects: slices.Clone(tx.Objects), Edits: slices.Clone(tx.Edits)})
	}
	return nil
}

func (r *recorder) Commit(tx *model.Tx) error { return r.Send(tx) }

// Chain is a chain with its rules.
type Chain struct {
	// Name is the name of the chain.
	Name string
	// Hook attaches the chain to a hook of netfilter, as "type nat hook output priority -102; policy accept;", or is
	// "".
	Hook string
	// Rules holds the rules in their order, each as nft reads it.
	Rules []string
}

// Family returns the family of the transaction.
func (t *Transaction) Family() tracker.Family { return t.rules.Family }

// Chains returns the chains of the table that the transaction creates, or whose rules it replaces, without the rules
// by which single chains let allowed sources pass.
func (t *Transaction) Chains() (out []Chain) {
	for _, tx := range t.parts {
		for i := range tx.Objects {
			for _, c := range t.rules.Chains(&tx.Objects[i]) {
				out = append(out, Chain{c.Name, c.Hook, c.Rules})
			}
		}
	}
	return out
}

// Empty reports whether the transaction changes nothing.
func (t *Transaction) Empty() bool { return len(t.parts) == 0 }

// String returns the transaction as "nft -f" reads it, which applies it as a whole or not at all. It has the rules
// that a Backend writes, with these exceptions:
//
//   - A connection of a client with affinity whose endpoint is gone counts once more. nft 1.0.6 does not make the
//     kernel remember clients over IPv6 (see DESIGN.md).
//   - The counters of destinations that a Service loses stay.
func (t *Transaction) String() string {
	text := kernel.NewText(t.table, t.rules)
	for _, tx := range t.parts {
		text.Add(tx)
		text.Finish()
	}
	return text.String()
}

// Revert makes the Renderer forget its last transaction, which was not applied, and all that it rendered: the next
// delta must be full.
func (t *Transaction) Revert() { t.revert() }
