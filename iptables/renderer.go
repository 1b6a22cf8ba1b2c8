package iptables

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Renderer turns rulesets into the rules of one address family, on every system and without privileges. A [Backend]
// is a Renderer for each family that commits the transactions. A Renderer does no I/O: the caller's deltas determine
// what is in effect. It is not safe for concurrent use. [NewRenderer] makes one; the zero value must not be used.
type Renderer struct {
	*settings
	// model holds the rules that the Renderer has rendered, nil before the first full delta.
	model *model
}

// NewRenderer returns a Renderer of the rules that a [Backend] writes in a family. It uses c.MasqueradeMark and
// c.LocalhostNodePorts. The rules count into no accounting objects, drop packets that connection tracking considers
// invalid, and guard the loopback range if NodePorts answer there. The error wraps [ruleset.ErrConfig].
func NewRenderer(c Config, f tracker.Family) (*Renderer, error) {
	c.Families = []tracker.Family{f}
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	s := newSettings(c, f)
	s.guarded = s.localhost
	return &Renderer{settings: s}, nil
}

func newSettings(c Config, f tracker.Family) *settings {
	return &settings{family: f, mark: uint32(c.MasqueradeMark), localhost: c.LocalhostNodePorts && f == tracker.IPv4}
}

// Render returns the transaction from the rules before d to those after it. That of a full delta is for tables that
// have none of our chains. Changes of the other family do not count. The Renderer counts the transaction as applied;
// otherwise the caller must call [Transaction.Revert] before the next Render.
//
// Render returns [ruleset.ErrNeedFull] if d is not full although it must be, and no transaction.
func (r *Renderer) Render(d *ruleset.Delta) (*Transaction, error) {
	changes := changesOf(d.Changes, r.family)
	if !d.Full {
		if r.model == nil || !sameRules(r.model.node, d.Node) {
			return nil, ruleset.ErrNeedFull
		}
		return r.update(d.Node, r.model.fromWritten(changes)), nil
	}
	before := r.model
	t := &Transaction{family: r.family, batch: newBatch(), revert: func() { r.model = before }}
	m, err := r.full(d.Node, changes, t.put, nil)
	if err != nil {
		return nil, err
	}
	t.hooks, r.model = m.hooks(), m
	return t, nil
}

// full returns a model of the changes' new Services. It calls put with each chain, those that others lead to first,
// and pause, unless it is nil, where the chains so far can be written.
func (r *Renderer) full(node *ruleset.Node, changes []ruleset.Change, put func(chain), pause func() error) (*model, error) {
	m, err := newModel(r.settings, node)
	if err != nil {
		return nil, err
	}
	for _, c := range m.fixed() {
		if c.rank == rankMark {
			put(c)
		}
	}
	for _, c := range changes {
		m.change(c.Key, c.New, func(_, now []chain) {
			for _, c := range now {
				put(c)
			}
		})
		if pause != nil {
			if err := pause(); err != nil {
				return m, err
			}
		}
	}
	m.allChains(func(c chain) {
		if c.rank != rankMark {
			put(c)
		}
	})
	m.forgetChanged()
	return m, nil
}

// fromWritten returns the changes that change something, with what the tables have as Old.
func (m *model) fromWritten(changes []ruleset.Change) (out []ruleset.Change) {
	for _, c := range changes {
		if c.Old = m.services[c.Key]; c.Old != c.New {
			out = append(out, c)
		}
	}
	return out
}

// update makes the changes, which fromWritten returned, in the model and returns the chains that differ.
func (r *Renderer) update(node *ruleset.Node, changes []ruleset.Change) *Transaction {
	b, m, before := newBatch(), r.model, r.model.node
	m.setNode(node)
	for _, c := range changes {
		m.change(c.Key, c.New, b.difference)
	}
	m.takeChanged(b)
	return &Transaction{family: r.family, batch: b, revert: func() {
		m.setNode(before)
		for _, c := range slices.Backward(changes) {
			m.change(c.Key, c.Old, nil)
		}
		m.forgetChanged()
	}}
}

// Transaction is a change of the rules of one family, as a value. Its methods other than Revert may be called
// concurrently. The zero value must not be used.
type Transaction struct {
	family tracker.Family
	batch  *batch
	hooks  []hook
	revert func()
}

// Chain is a chain and all of its rules.
type Chain struct {
	// Table is "filter" or "nat".
	Table string
	// Name is the name of the chain.
	Name string
	// Rules holds the rules in their order, each as iptables-save prints it, without "-A NAME" in
	// front.
	Rules []string
}

// Input is the input of one call of iptables-restore --noflush, or ip6tables-restore, about one table. The program
// applies it as a whole or not at all.
type Input struct {
	// Table is "filter" or "nat".
	Table string
	// Text is the input.
	Text string
	// Rules is how many rules it writes.
	Rules int
}

func (t *Transaction) put(c chain) { t.batch.put(c) }

// Family returns the family of the transaction.
func (t *Transaction) Family() tracker.Family { return t.family }

// Chains returns the chains that the transaction creates or replaces, each after the chains that it
// leads to.
func (t *Transaction) Chains() (out []Chain) {
	for i := range tables {
		for _, c := range t.batch.sorted(i) {
			out = append(out, Chain{Table: i.String(), Name: c.name, Rules: slices.Clone(c.rules)})
		}
	}
	return out
}

// Jumps returns the rules of the kernel's own chains that lead to ours, in the order in which they must be at the
// beginning of their chains. Only the transaction of a full delta has any.
func (t *Transaction) Jumps() (out []Chain) {
	for i := range tables {
		for _, name := range kernelChains {
			c := Chain{Table: i.String(), Name: name}
			for _, h := range slices.Backward(t.hooks) {
				if h.table == i && h.chain == name {
					c.Rules = append(c.Rules, h.rule)
				}
			}
			if len(c.Rules) != 0 {
				out = append(out, c)
			}
		}
	}
	return out
}

// Empty reports whether the transaction changes nothing.
func (t *Transaction) Empty() bool {
	return len(t.hooks) == 0 && t.batch.empty()
}

// Inputs returns the inputs that apply the transaction, in order: filter first, and in each table every chain before
// the chains that lead to it. An input has about limit lines, at least one chain; 0 means one input for a table.
func (t *Transaction) Inputs(limit int) (out []Input) {
	if limit <= 0 {
		limit = legacyLimit
	}
	for i := range tables {
		for _, in := range t.batch.inputs(i, hookCommands(i, t.hooks, nil), limit, nil) {
			out = append(out, Input{Table: i.String(), Text: in.String(), Rules: in.rules})
		}
	}
	return out
}

// String returns the inputs for both tables, with a comment that names the program.
func (t *Transaction) String() string {
	var b bytes.Buffer
	program := "iptables-restore"
	if t.family == tracker.IPv6 {
		program = "ip6tables-restore"
	}
	fmt.Fprintf(&b, "# %s --noflush\n", program)
	for _, in := range t.Inputs(0) {
		b.WriteString(in.Text)
	}
	return b.String()
}

// Revert makes the Renderer forget its last transaction, which was not applied.
func (t *Transaction) Revert() { t.revert() }
