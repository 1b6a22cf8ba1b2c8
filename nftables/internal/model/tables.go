package model

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Meter measures objects. ObjectSize returns the bytes of an object in a transaction, and changes nothing.
type Meter interface{ ObjectSize(*Object) int }

// Sink takes transactions.
type Sink interface {
	// Limit returns the largest size of a transaction in bytes, and what measures objects, if transactions can reach
	// that size.
	Limit() (int, Meter)
	// Send takes a transaction that others follow. It may commit the transaction later and return
	// its error from the next call. It must not keep tx.
	Send(tx *Tx) error
	// Commit takes the last transaction and returns when all transactions are committed.
	Commit(tx *Tx) error
}

// Chunk is the number of elements in one transaction, if a delta may be divided. Larger
// transactions are no faster and take more memory.
const Chunk = 10000

// Tables is the model of the tables of all families. It turns deltas into transactions. After an error of any method,
// its state and that of the kernel may differ, and it must be discarded.
type Tables struct {
	List []*Table
	// Unhooked is set while no packet meets the tables. Then a transaction may end within a Service.
	Unhooked bool

	sink     Sink
	tx, rest *Tx
	failed   map[tracker.Key]error // since begin
	err      error                 // of addPart
}

// NewTables returns the model of the tables in list.
func NewTables(list ...*Table) *Tables { return &Tables{List: list, tx: &Tx{}, rest: &Tx{}} }

// Table returns the model of the family's table, or nil.
func (m *Tables) Table(f tracker.Family) *Table {
	for _, t := range m.List {
		if t.Family == f {
			return t
		}
	}
	return nil
}

// Update passes the transactions of a delta that is not full to sink. It returns the Services for which there
// are no pools.
func (m *Tables) Update(ctx context.Context, d *ruleset.Delta, sink Sink) (map[tracker.Key]error, error) {
	m.begin(sink)
	for _, t := range m.List {
		if t.Node() != d.Node {
			t.SetNode(d.Node, m.tx)
		}
		t.Chains.collectSticky(m.tx)
	}
	// Services that exchange frontends change in one transaction.
	last := exchanges(d.Changes)
	for i := 0; i < len(d.Changes) && m.err == nil; {
		m.addPart(ctx, func() {
			for end := i + 1; i < end; i++ {
				end = max(end, last[i]+1)
				m.addChange(&d.Changes[i])
			}
		})
	}
	m.retryLacking(ctx, d.Changes)
	for _, t := range m.List {
		for more := true; more && m.err == nil; {
			m.addPart(ctx, func() { more = t.Hairpin.expireGrace(m.tx) })
		}
	}
	return m.failed, m.commit()
}

// exchanges returns, by index, the last of the changes behind a change that exchange frontends with it.
func exchanges(changes []ruleset.Change) map[int]int {
	var last map[int]int
	var index map[tracker.Key]int
	for i := range changes {
		for _, taker := range changes[i].LostFrontends() {
			if index == nil {
				last, index = map[int]int{}, make(map[tracker.Key]int, len(changes))
				for k := range changes {
					index[changes[k].Key] = k
				}
			}
			first := min(i, index[taker])
			last[first] = max(last[first], i, index[taker])
		}
	}
	return last
}

func (m *Tables) addChange(c *ruleset.Change) {
	t := m.Table(c.Key.Family)
	if t == nil || m.err != nil {
		return
	}
	if m.err = t.Change(c, m.tx); errors.Is(m.err, ErrTooManyPools) {
		if m.failed == nil {
			m.failed = map[tracker.Key]error{}
		}
		m.failed[c.Key], m.err = m.err, nil
	}
}

// Fill passes transactions with the Services of a full delta to sink, after the creation of the
// tables, which create holds. grace holds endpoints in their grace period by
// family.
func (m *Tables) Fill(ctx context.Context, d *ruleset.Delta, sink Sink, create *Tx, grace map[tracker.Family][]GraceEntry) (map[tracker.Key]error, error) {
	changes := m.oldestFirst(d.Changes)
	m.begin(sink)
	m.tx.Edits = slices.Grow(m.tx.Edits, min(Chunk, 8*len(changes)))
	m.tx.append(create)
	m.prepare(ctx, changes)
	for _, t := range m.List {
		for _, g := range grace[t.Family] {
			m.addPart(ctx, func() { t.Hairpin.addGrace(g, m.tx) })
		}
	}
	// Untranslated packets to cluster IPs are rejected or dropped only once every Service is in the
	// table.
	clusterIPs := make([]Edit, 0, len(changes))
	for i := range changes {
		m.addPart(ctx, func() {
			mark := m.tx.Mark()
			m.addChange(&changes[i])
			clusterIPs = m.tx.takeClusterIPs(mark, clusterIPs)
		})
	}
	for i := range clusterIPs {
		m.addPart(ctx, func() { m.tx.edit(clusterIPs[i]) })
	}
	for _, t := range m.List {
		m.addPart(ctx, func() { t.Intervals.setServiceCIDRs(m.tx) })
	}
	err := m.commit()
	m.tx, m.rest = &Tx{}, &Tx{} // they were large
	return m.failed, err
}

// prepare creates the handlers that the Services need, before elements are added to the maps: the kernel walks
// through a whole map when it gets a chain with a rule that looks it up.
//
// For the same reason prepare creates the chains of all pools of up to layout.ExactBuckets endpoints. Otherwise the
// first Service with a new number of endpoints would wait for such a walk, several milliseconds in a large cluster.
// Each of these chains costs each new element about 15 ns.
func (m *Tables) prepare(ctx context.Context, changes []ruleset.Change) {
	for _, t := range m.List {
		for n := range layout.ExactBuckets {
			m.addPart(ctx, func() { t.Chains.handlerChain(layout.Handler{Buckets: n + 1}, m.tx) })
		}
	}
	for i := range changes {
		s, t := changes[i].New, m.Table(changes[i].Key.Family)
		if s == nil || t == nil {
			continue
		}
		for i := range s.Frontends {
			h, own := HandlersOf(s, &s.Frontends[i])
			m.addPart(ctx, func() { t.Chains.handler(h, false, m.tx) })
			if own.HasPool() {
				m.addPart(ctx, func() { t.Chains.handler(own, true, m.tx) })
			}
		}
		for _, target := range targets {
			if s.Spec.Affinity != 0 && len(s.Pool(target)) != 0 {
				m.addPart(ctx, func() { t.Chains.stickyHandler(StickyHandlerOf(s, target), m.tx) })
			}
		}
	}
}

func (m *Tables) begin(sink Sink) {
	m.sink, m.failed, m.err = sink, nil, nil
	m.tx.Reset()
	m.tx.Limit, m.tx.meter = sink.Limit()
}

// addPart adds a part to the transaction, and sends the transaction if it is large. After an error it
// does nothing, and sendIfLarge and commit return the error.
func (m *Tables) addPart(ctx context.Context, add func()) {
	if m.err == nil {
		mark := m.tx.Mark()
		add()
		m.err = m.sendIfLarge(ctx, mark)
	}
}

// sendIfLarge sends the transaction if it is large: without what is behind mark if it would be too large
// otherwise.
func (m *Tables) sendIfLarge(ctx context.Context, mark Mark) error {
	large := m.tx.Size() > m.tx.Limit
	switch {
	case m.err != nil:
		return m.err
	case large && mark.edits+mark.objects != 0:
		m.tx.Cut(mark, m.rest)
		if err := m.send(m.tx); err != nil {
			return err
		}
		m.tx.Reset()
		m.tx.append(m.rest)
		return m.sendIfLarge(ctx, Mark{})
	case large || len(m.tx.Edits) >= Chunk:
		if err := m.send(m.tx); err != nil {
			return err
		}
		m.tx.Reset()
	default:
		return nil
	}
	return ctx.Err()
}

// send sends a transaction. It divides one that is too large if no packet meets the tables.
func (m *Tables) send(tx *Tx) error {
	if n := len(tx.Edits) / 2; n != 0 && m.Unhooked && tx.Size() > m.tx.Limit {
		first, second := Tx{Objects: tx.Objects, Edits: tx.Edits[:n]}, Tx{Edits: tx.Edits[n:], Lost: tx.Lost}
		first.measureAll()
		second.measureAll()
		if err := m.send(&first); err != nil {
			return err
		}
		return m.send(&second)
	}
	if err := m.countElements(tx); err != nil {
		return err
	}
	return m.sink.Send(tx)
}

func (m *Tables) commit() error {
	defer func() { m.sink = nil }() // it may refer to the delta
	if err := cmp.Or(m.err, m.countElements(m.tx)); err != nil {
		return err
	}
	return m.sink.Commit(m.tx)
}

// countElements counts the elements of the transaction. It fails if a set has more than its size then.
func (m *Tables) countElements(tx *Tx) error {
	for i := range tx.Edits {
		e := &tx.Edits[i]
		m.Table(e.Family).Room.countElement(e)
	}
	for _, t := range m.List {
		if t.Room.overflows() {
			return ErrOverflow
		}
	}
	return nil
}

// retryLacking adds Services that lack client affinity again, except those in changes, once there
// are numbers of sticky pools for them. The oldest come first.
func (m *Tables) retryLacking(ctx context.Context, changes []ruleset.Change) {
	for _, t := range m.List {
		if len(t.Affinity.lacking) == 0 || t.Pools.sticky.exhausted() {
			continue
		}
		waiting := maps.Clone(t.Affinity.lacking)
		for i := range changes {
			delete(waiting, changes[i].ID())
		}
		for _, s := range slices.SortedFunc(maps.Values(waiting), compareAge) {
			if t.Pools.sticky.exhausted() {
				break
			}
			m.addPart(ctx, func() { m.addChange(&ruleset.Change{Key: s.Key, Old: s, New: s, Fields: ruleset.FieldAll}) })
		}
	}
}

// oldestFirst returns the changes of a full delta in the order in which Services get the numbers of sticky
// pools, if there may be too few. Those that have one in the kernel keep it in any case: see [pools.Adopt].
func (m *Tables) oldestFirst(changes []ruleset.Change) []ruleset.Change {
	if !slices.ContainsFunc(m.List, func(t *Table) bool { return t.Room.fewSticky }) {
		return changes
	}
	out := slices.DeleteFunc(slices.Clone(changes), func(c ruleset.Change) bool { return c.New == nil })
	slices.SortFunc(out, func(a, b ruleset.Change) int { return compareAge(a.New, b.New) })
	return out
}

// compareAge orders Services by age, the oldest first. Services of unknown age come last.
func compareAge(a, b *ruleset.Port) int {
	return cmp.Or(a.Spec.CompareAge(b.Spec), a.Key.Compare(b.Key))
}

// Lacking calls fn with one of the Services of each table that lack client affinity since the last
// call, and an error that counts the others.
func (m *Tables) Lacking(fn func(tracker.Key, error)) {
	for _, t := range m.List {
		if n := t.Affinity.newlyLacking.count; n != 0 {
			fn(t.Affinity.newlyLacking.key, fmt.Errorf("%w: %d more Services", errTooManySticky, n-1))
			t.Affinity.newlyLacking.count = 0
		}
	}
}
