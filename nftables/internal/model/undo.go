package model

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// undo holds what a Change did to a table, so that a Change that fails can take it back. It keeps
// its memory from one Change to the next.
type undo struct {
	uses []use
	// pools holds the pools that changed, and created the new ones.
	pools   []savedPool
	created []*pool
	steps   []func()
	grace   int
}

// use is a change of the number of uses of an address.
type use struct {
	of   uses
	addr netip.Addr
	by   int32
}

// savedPool is a pool before a change.
type savedPool struct {
	pool    *pool
	was     pool
	buckets []*tracker.Endpoint
	members []uint16
}

// begin starts a Change of t.
func (u *undo) begin(t *Table) {
	clear(u.steps)
	clear(u.created)
	u.uses, u.pools, u.created, u.steps = u.uses[:0], u.pools[:0], u.created[:0], u.steps[:0]
	u.grace = len(t.hairpin.grace)
}

// later adds a step to take back.
func (u *undo) later(step func()) { u.steps = append(u.steps, step) }

// maxSavedPool is the largest pool whose copy is kept from one Change to the next.
const maxSavedPool = 1 << 10

// save copies a pool that changes.
func (u *undo) save(p *pool) {
	if n := len(u.pools); n < cap(u.pools) {
		u.pools = u.pools[:n+1]
	} else {
		u.pools = append(u.pools, savedPool{})
	}
	s := &u.pools[len(u.pools)-1]
	if cap(s.buckets) > maxSavedPool {
		*s = savedPool{}
	}
	s.pool, s.was = p, *p
	s.buckets, s.members = append(s.buckets[:0], p.buckets...), append(s.members[:0], p.members...)
}

// run takes everything back. mark is where the Change began in tx.
func (u *undo) run(t *Table, tx *Tx, mark Mark) {
	tx.Truncate(mark)
	for _, c := range slices.Backward(u.uses) {
		c.of.add(c.addr, -c.by)
	}
	for _, p := range u.created {
		t.freeNumber(p)
	}
	for _, step := range slices.Backward(u.steps) {
		step()
	}
	for _, s := range slices.Backward(u.pools) {
		*s.pool = s.was
		s.pool.buckets, s.pool.members = slices.Clone(s.buckets), slices.Clone(s.members)
	}
	t.hairpin.grace = t.hairpin.grace[:u.grace]
	u.begin(t)
}

// use adds by to an address's number of uses, and reports whether the set gains or loses the
// address.
func (t *Table) use(of uses, a netip.Addr, by int32) bool {
	t.undo.uses = append(t.undo.uses, use{of, a, by})
	return of.add(a, by)
}
