package model

import "net/netip"

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
	draft *draft
	now   T
	was   []T
}

func (c *cell[T]) set(v T) {
	if c.draft != nil {
		c.draft.log, c.was = append(c.draft.log, c), append(c.was, c.now)
	}
	c.now = v
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
	draft *draft
	now   map[K]V
	was   []page[K, V]
}

type page[K comparable, V any] struct {
	key   K
	value V
	had   bool
}

func newBook[K comparable, V any](d *draft) book[K, V] { return book[K, V]{draft: d, now: map[K]V{}} }

func (b *book[K, V]) save(key K) {
	value, had := b.now[key]
	b.draft.log, b.was = append(b.draft.log, b), append(b.was, page[K, V]{key, value, had})
}

func (b *book[K, V]) set(key K, v V) {
	b.save(key)
	b.now[key] = v
}

func (b *book[K, V]) delete(key K) {
	b.save(key)
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
func (u *uses) add(a netip.Addr, by int32) (changed bool) {
	key := a.As16()
	before := u.now[key]
	if before+by == 0 {
		u.delete(key)
		return true
	}
	u.set(key, before+by)
	return before == 0
}
