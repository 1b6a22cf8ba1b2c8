package driver

import (
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"reflect"

	"github.com/go-proxier/proxier/ruleset"
)

// Table is a table of a [Plane]. Services may share an entry: it is put before the first entry that needs it and
// deleted after the last one. If their values differ, the last written one counts. A Driver calls the functions from
// one goroutine at a time, within Apply. It stores keys and values, which must not be modified. A Table must not be
// copied after [New] got it, and is not safe for concurrent use.
type Table[K comparable, V any] struct {
	// Installed yields the entries that the data plane has, including those of an earlier process, for each full
	// delta, after [Plane].Node and before a write. Nil means that only the Driver's own entries exist; then a full
	// delta writes every entry.
	Installed func(*ruleset.Delta) (iter.Seq2[K, V], error)
	// Put adds or replaces an entry. After an error the state of the entry is unknown. An error
	// fails the Service, and one that wraps [ruleset.ErrNeedFull] the delta.
	Put func(K, V) error
	// Replace, if not nil, is called instead of Put and PutAll if the table has the entry with
	// a known value.
	Replace func(k K, old, new V) error
	// PutAll, if not nil, is called instead of Put for several entries of one Service. An error
	// concerns all of them.
	PutAll func([]K, []V) error
	// Delete removes an entry. Deleting a missing entry is not an error.
	Delete func(K) error
	// DeleteAll, if not nil, is called instead of Delete for several entries: those of one Service, or those that no
	// Service wants after a full delta. An error concerns all of them.
	DeleteAll func([]K) error
	// Equal compares values. Nil means reflect.DeepEqual.
	Equal func(a, b V) bool
	// Place, if not nil, returns what an entry serves, such as an address and port, if the keys contain the Service:
	// an entry then stays while a Service that wants one of the same place fails.
	Place func(K) any
	// gone, if not nil, is called for a key that no Service wants and the table no longer has.
	gone func(K)
	// entries holds the entries by the hashes of their keys, in half the memory of a map with the keys.
	entries map[uint64]*entry[K, V]
	seed    maphash.Seed
	// owned holds the entries that an owner wants, by its number, and left those that it no longer wants. It is a
	// user of both.
	owned [][]*entry[K, V]
	left  map[int][]*entry[K, V]
	// puts holds what the Services of the delta want and the table does not have, and ends the
	// end of the part of each.
	puts []put[K, V]
	ends []int
	// before, next, now and round are those of the Service that is planned: what it had, what is probably wanted
	// next, and what it wants.
	before, now []*entry[K, V]
	next        int
	round       uint64
	// held holds the entries that stay because an owner failed, and places what they serve.
	held   map[*entry[K, V]]bool
	places map[any]bool
	// stale means that there may be early entries, with or without users.
	stale bool
}

// entry is an entry that the table has or a Service wants.
type entry[K comparable, V any] struct {
	key   K
	value V
	// users counts the owners that want the entry or did so, and wants those that do.
	users, wants int32
	state        state
	// early means that an earlier process wrote the entry, and that entries of that process may refer to it.
	early bool
	// round is a mark of the last Service that was planned and has the entry.
	round uint64
	// next has the same hash.
	next *entry[K, V]
}

type put[K comparable, V any] struct {
	*entry[K, V]
	value V
}

// state is what a Driver knows about an entry.
type state uint8

const (
	absent  state = iota
	unknown       // a write failed
	present       // with its value
)

func (t *Table[K, V]) complete() error {
	if t.Put == nil && t.PutAll == nil || t.Delete == nil && t.DeleteAll == nil {
		return fmt.Errorf("%w: a function that puts or deletes is missing", ruleset.ErrConfig)
	}
	if t.Equal == nil {
		t.Equal = func(a, b V) bool { return reflect.DeepEqual(a, b) }
	}
	t.held, t.places = map[*entry[K, V]]bool{}, map[any]bool{}
	t.entries, t.left, t.seed = map[uint64]*entry[K, V]{}, map[int][]*entry[K, V]{}, maphash.MakeSeed()
	return nil
}

func (t *Table[K, V]) read(d *ruleset.Delta) error {
	if t.Installed == nil {
		for e := range t.all() {
			e.state = min(e.state, unknown)
		}
		return nil
	}
	all, err := t.Installed(d)
	if err != nil {
		return err
	}
	for e := range t.all() {
		e.state = absent
	}
	for k, v := range all {
		e := t.get(k)
		e.value, e.state, e.early = v, present, e.early || e.users == 0
		t.stale = t.stale || e.early
	}
	for e := range t.all() {
		if e.users == 0 && e.state == absent {
			t.forget(e)
		}
	}
	return nil
}

// all yields the entries, which may be forgotten during the iteration.
func (t *Table[K, V]) all() iter.Seq[*entry[K, V]] {
	return func(yield func(*entry[K, V]) bool) {
		for _, e := range t.entries {
			for ; e != nil; e = e.next {
				if !yield(e) {
					return
				}
			}
		}
	}
}

func (t *Table[K, V]) get(k K) *entry[K, V] {
	h := maphash.Comparable(t.seed, k)
	first := t.entries[h]
	for e := first; e != nil; e = e.next {
		if e.key == k {
			return e
		}
	}
	e := &entry[K, V]{key: k, next: first}
	t.entries[h] = e
	return e
}

func (t *Table[K, V]) forget(e *entry[K, V]) {
	if e.state = absent; e.users != 0 {
		return
	}
	h := maphash.Comparable(t.seed, e.key)
	first := t.entries[h]
	at := &first
	for *at != e {
		at = &(*at).next
	}
	if *at = e.next; first != nil {
		t.entries[h] = first
	} else {
		delete(t.entries, h)
	}
	if t.gone != nil {
		t.gone(e.key)
	}
}

func (t *Table[K, V]) reset() {
	clear(t.puts)
	clear(t.held)
	clear(t.places)
	if t.puts, t.ends = t.puts[:0], t.ends[:0]; cap(t.puts) > 4096 {
		t.puts, t.ends = nil, nil // of a full delta
	}
}

// begin starts the plan of a Service.
func (t *Table[K, V]) begin(owner int) {
	for owner >= len(t.owned) {
		t.owned = append(t.owned, nil)
	}
	t.round += 2
	t.before, t.next, t.now = append(t.owned[owner], t.left[owner]...), 0, nil
	for _, e := range t.owned[owner] {
		e.wants--
	}
	for _, e := range t.before {
		e.round = t.round
	}
}

// Want requests an entry for the Service of the current call of [Plane].Want. The first value for a
// key counts.
func (t *Table[K, V]) Want(k K, v V) { t.want(t.find(k), v) }

func (t *Table[K, V]) want(e *entry[K, V], v V) {
	if e.round > t.round {
		return
	}
	if e.round < t.round {
		e.users++
	}
	e.round = t.round + 1
	e.wants++
	if t.now == nil {
		t.now = make([]*entry[K, V], 0, len(t.before))
	}
	if t.now = append(t.now, e); t.has(e, v) {
		e.value = v // the older value may hold memory of an older Service
	} else {
		t.puts = append(t.puts, put[K, V]{e, v})
	}
}

// All yields the entries that the table has, as far as the Driver knows, in no particular order.
func (t *Table[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for e := range t.all() {
			if e.state == present && !yield(e.key, e.value) {
				return
			}
		}
	}
}

func (t *Table[K, V]) has(e *entry[K, V], v V) bool { return e.state == present && t.Equal(e.value, v) }

// find returns the entry of a key. A Service usually wants what it had, in the same order.
func (t *Table[K, V]) find(k K) *entry[K, V] {
	for i := t.next; i < min(t.next+2, len(t.before)); i++ {
		if t.before[i].key == k {
			t.next = i + 1
			return t.before[i]
		}
	}
	return t.get(k)
}

func (t *Table[K, V]) end(owner int) error {
	var left []*entry[K, V]
	for _, e := range t.before {
		if e.round == t.round {
			left = append(left, e)
		}
	}
	if t.owned[owner] = t.now; len(left) != 0 {
		t.left[owner] = left
	} else {
		delete(t.left, owner)
	}
	t.ends = append(t.ends, len(t.puts))
	t.before, t.now = nil, nil
	return nil
}

// write puts the entries that a Service wants and the table does not have.
func (t *Table[K, V]) write(change int) error {
	var batch []put[K, V]
	first := 0
	if change > 0 {
		first = t.ends[change-1]
	}
	for _, p := range t.puts[first:t.ends[change]] {
		switch {
		case t.has(p.entry, p.value):
		case t.Replace != nil && p.state == present:
			if err := p.note(t.Replace(p.key, p.entry.value, p.value)); err != nil {
				return err
			}
		case t.PutAll != nil:
			batch = append(batch, p)
		default:
			if err := p.note(t.Put(p.key, p.value)); err != nil {
				return err
			}
		}
	}
	if len(batch) == 1 && t.Put != nil {
		return batch[0].note(t.Put(batch[0].key, batch[0].value))
	}
	if len(batch) == 0 {
		return nil
	}
	keys, values := make([]K, len(batch)), make([]V, len(batch))
	for i, p := range batch {
		keys[i], values[i] = p.key, p.value
	}
	err := t.PutAll(keys, values)
	for _, p := range batch {
		_ = p.note(err)
	}
	return err
}

// note records and returns the result of a write.
func (p put[K, V]) note(err error) error {
	if p.entry.value, p.state = p.value, present; err != nil {
		p.state = unknown
	}
	return err
}

// hold keeps what an owner leaves, because later entries of it may refer to that, and what it wants if it
// failed: the entry may be that of an earlier owner, to whose entries it then refers.
func (t *Table[K, V]) hold(owner int, failed bool) {
	for _, e := range t.left[owner] {
		t.held[e] = true
	}
	if !failed || owner >= len(t.owned) {
		return
	}
	for _, e := range t.owned[owner] {
		if t.held[e] = true; t.Place != nil {
			t.places[t.Place(e.key)] = true
		}
	}
}

// isHeld reports whether an entry that an owner leaves, or that has none, must stay.
func (t *Table[K, V]) isHeld(e *entry[K, V]) bool {
	return len(t.held) != 0 && (t.held[e] || t.Place != nil && t.places[t.Place(e.key)])
}

// remove deletes what an owner does not want any more, unless another one uses it.
func (t *Table[K, V]) remove(owner int, early bool) (all bool, err error) {
	left := t.left[owner]
	if len(left) == 0 {
		return true, nil
	}
	var kept, gone []*entry[K, V]
	for _, e := range left {
		if t.isHeld(e) || e.early && !early && e.wants == 0 {
			kept = append(kept, e)
			continue
		}
		if e.users--; e.wants == 0 {
			gone = append(gone, e)
		}
	}
	all = len(kept) == 0
	stay, err := t.erase(gone)
	for _, e := range stay {
		e.users++
	}
	if t.left[owner] = append(kept, stay...); len(t.left[owner]) == 0 {
		delete(t.left, owner)
	}
	return all, err
}

// sweep deletes the entries that no Service wants.
func (t *Table[K, V]) sweep() error {
	if !t.stale {
		return nil
	}
	var kept, gone []*entry[K, V]
	for e := range t.all() {
		switch e.early = false; {
		case e.users != 0:
		case t.isHeld(e):
			kept = append(kept, e)
		default:
			gone = append(gone, e)
		}
	}
	stay, err := t.erase(gone)
	kept = append(kept, stay...)
	for _, e := range kept {
		e.early = true
	}
	t.stale = len(kept) != 0
	return err
}

// erase deletes entries, in one call or one after the other. It returns those that may be there.
func (t *Table[K, V]) erase(gone []*entry[K, V]) (kept []*entry[K, V], err error) {
	var keys []K
	for _, e := range gone {
		if e.state != absent {
			e.state, keys = unknown, append(keys, e.key)
		}
	}
	all := t.DeleteAll != nil && (len(keys) > 1 || t.Delete == nil && len(keys) != 0)
	if all {
		err = t.DeleteAll(keys)
	}
	for _, e := range gone {
		one := err
		if !all && e.state != absent {
			one = t.Delete(e.key)
			err = errors.Join(err, one)
		}
		if one != nil && e.state != absent {
			kept = append(kept, e)
		} else {
			t.forget(e)
		}
	}
	return kept, err
}
