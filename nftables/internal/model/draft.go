package model

import (
	"net/netip"
)

// draft is what plans changed in a table since the last keep. Departments store what a plan may
// change in a [book] or a [cell], so a plan that fails is dropped as a whole.
type draft struct{ log []drafted }

// drafted is a value of a department.
type drafted interface {
	drop() // takes the last change back
	keep() // makes all changes final
}

// mark returns the end of the draft.
func (d *draft) mark() int { return len(d.log) }

// drop takes back everything behind mark.
func (d *draft) drop(mark int) {
	for len(d.log) > mark {
		d.log[len(d.log)-1].drop()
		d.log = d.log[:len(d.log)-1]
	}
}

// keep makes the draft final.
func (d *draft) keep() {
	for _, v := range d.log {
		v.keep()
	}
	d.log = d.log[:0]
}

// cell is a value.
type cell[T any] struct {
	now T
	was []T
}

func (c *cell[T]) set(d *draft, v T) {
	d.log, c.was, c.now = append(d.log, c), append(c.was, c.now), v
}

func (c *cell[T]) drop() {
	last := len(c.was) - 1
	c.now, c.was = c.was[last], c.was[:last]
}

func (c *cell[T]) keep() {
	clear(c.was)
	c.was = c.was[:0]
}

// book is a map.
type book[K comparable, V any] struct {
	now map[K]V
	was []page[K, V]
}

type page[K comparable, V any] struct {
	key   K
	value V
	had   bool
}

func (b *book[K, V]) save(d *draft, key K) {
	value, had := b.now[key]
	d.log, b.was = append(d.log, b), append(b.was, page[K, V]{key, value, had})
}

func (b *book[K, V]) set(d *draft, key K, v V) {
	b.save(d, key)
	if b.now == nil {
		b.now = map[K]V{}
	}
	b.now[key] = v
}

func (b *book[K, V]) delete(d *draft, key K) {
	b.save(d, key)
	delete(b.now, key)
}

func (b *book[K, V]) drop() {
	last := &b.was[len(b.was)-1]
	if last.had {
		b.now[last.key] = last.value
	} else {
		delete(b.now, last.key)
	}
	b.was = b.was[:len(b.was)-1]
}

func (b *book[K, V]) keep() {
	clear(b.was)
	b.was = b.was[:0]
}

// uses counts the uses of addresses. Its keys have no pointers, so the garbage collector does not
// read them: there may be a hundred thousand.
type uses struct{ book[[16]byte, int32] }

// of returns the number of uses of an address.
func (u *uses) of(a netip.Addr) int { return int(u.now[a.As16()]) }

// add adds by to an address's number of uses, and reports whether the set gains or loses the
// address. Within a transaction a count may drop to 0 and come back, because deletions precede
// additions. The reverse cannot happen: each Service changes at most once.
func (u *uses) add(d *draft, a netip.Addr, by int32) (changed bool) {
	key := a.As16()
	before := u.now[key]
	if before+by == 0 {
		u.delete(d, key)
		return true
	}
	u.set(d, key, before+by)
	return before == 0
}

// numbers allocates the numbers of pools, from 1 to max. It reuses a number only after all
// others, so that no packet still carries the number for its last owner.
type numbers struct {
	max uint32
	// The first number is start+1.
	start uint32
	// kept holds numbers to skip.
	kept map[uint32]bool
	cell cell[supply]
}

// supply is what numbers can still give out: those from next on, which counts the numbers given out
// or skipped, and then those in free.
type supply struct {
	next uint32
	free []uint32
}

// take returns a number, or false if all are in use.
func (n *numbers) take(d *draft) (v uint32, ok bool) {
	s := n.cell.now
	for s.next < n.max && !ok {
		v = (n.start+s.next)%n.max + 1
		s.next++
		ok = !n.kept[v]
	}
	if !ok && len(s.free) != 0 {
		v, ok, s.free = s.free[0], true, s.free[1:]
	}
	n.cell.set(d, s)
	return v, ok
}

// exhausted reports whether all numbers are in use.
func (n *numbers) exhausted() bool { return n.cell.now.next == n.max && len(n.cell.now.free) == 0 }

// give makes a number free that no plan may need again.
func (n *numbers) give(v uint32) { n.cell.now.free = append(n.cell.now.free, v) }
