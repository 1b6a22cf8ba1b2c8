package driver

import (
	"errors"
	"iter"
	"reflect"

	"github.com/go-proxier/proxier/ruleset"
)

// Table is a table of the data plane. A table with neither Put nor PutAll does not exist.
type Table[K comparable, V any] struct {
	// Installed yields the entries that the data plane has, including those of an earlier
	// process. The Driver reads all of them before it writes. Nil means that only the
	// Driver's own entries exist; then a full delta writes every entry, unless it is a
	// [ruleset.Delta].Repeat.
	Installed func() (iter.Seq2[K, V], error)
	// Put adds or replaces an entry. After an error the state of the entry is unknown, unless
	// the error wraps [ruleset.ErrRefused]: then the entry is as it was.
	Put func(K, V) error
	// Replace, if not nil, is called instead of Put and PutAll if the table has the entry with
	// a known value. Its errors are like those of Put.
	Replace func(k K, old, new V) error
	// PutAll, if not nil, is called instead of Put for several entries: those that one Service
	// writes in one step. An error concerns all of them.
	PutAll func([]K, []V) error
	// Delete removes an entry. Deleting a missing entry is not an error.
	Delete func(K) error
	// DeleteAll, if not nil, is called instead of Delete for several entries: those that one
	// Service deletes in one step, or that nothing needs after a full delta. An error
	// concerns all of them.
	DeleteAll func([]K) error
	// Trim, if not nil, is called for pools that were written before, after the frontends
	// have been written. A table whose Put leaves what earlier frontends may use deletes it
	// there. It is meant for Plane.Pools.
	Trim func(K) error
	// Equal compares values. Nil means reflect.DeepEqual.
	Equal func(a, b V) bool
}

// exists reports whether the data plane has the table.
func (t *Table[K, V]) exists() bool { return t.Put != nil || t.PutAll != nil }

// complete sets Equal and reports whether the table can delete what it can put.
func (t *Table[K, V]) complete() bool {
	if t.Equal == nil {
		t.Equal = func(a, b V) bool { return reflect.DeepEqual(a, b) }
	}
	return !t.exists() || t.Delete != nil || t.DeleteAll != nil
}

// putAll puts entries in one call or in order. It returns the number of entries that it put.
func (t *Table[K, V]) putAll(keys []K, values []V) (int, error) {
	if t.PutAll != nil && (len(keys) > 1 || t.Put == nil) {
		if err := t.PutAll(keys, values); err != nil {
			return 0, err
		}
		return len(keys), nil
	}
	for i, k := range keys {
		if err := t.Put(k, values[i]); err != nil {
			return i, err
		}
	}
	return len(keys), nil
}

// deleteAll deletes entries, in one call or one after the other, and calls deleted for those
// that are gone.
func (t *Table[K, V]) deleteAll(keys []K, deleted func(K)) error {
	one := t.DeleteAll == nil || t.Delete != nil && len(keys) == 1
	if !one {
		if err := t.DeleteAll(keys); err != nil {
			return err
		}
	}
	var errs []error
	for _, k := range keys {
		if one {
			if err := t.Delete(k); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		deleted(k)
	}
	return errors.Join(errs...)
}

// records is a table and the entries that it has.
type records[K comparable, V any] struct {
	Table[K, V]
	have map[K]record[V]
	// early holds the keys of entries that adopt found and that were not in have. It is nil
	// once nothing that adopt found is left except what Services need.
	early map[K]struct{}
	// keys and values are the entries to write, and gone the entries to delete.
	keys, gone []K
	values     []V
	// writes counts the writes that may have had an effect.
	writes *int
}

// record describes an entry.
type record[V any] struct {
	value V
	// known means that the entry has the value. After a failed write it is not set.
	known bool
	// exists means that the entry was written or found since the last adopt.
	exists bool
	// found means that adopt found the entry and that it may still refer to what it referred to
	// then, which is not known.
	found bool
}

// adopt starts a full delta: it reads the table. If that is not possible, the values of the
// entries become unknown.
func (t *records[K, V]) adopt() error {
	if !t.exists() {
		return nil
	}
	if t.Installed == nil {
		for k := range t.have {
			t.have[k] = record[V]{}
		}
		return nil
	}
	all, err := t.Installed()
	if err != nil {
		return err
	}
	before := t.have
	t.have = map[K]record[V]{}
	if t.early == nil {
		t.early = map[K]struct{}{}
	}
	for k, v := range all {
		old, ok := before[k]
		if !ok {
			t.early[k] = struct{}{}
		}
		t.have[k] = record[V]{value: v, known: true, exists: true, found: !ok || old.found}
	}
	return nil
}

// set requests an entry, which the next write puts unless the table has it.
func (t *records[K, V]) set(k K, v V) {
	if !t.exists() {
		return
	}
	r := t.have[k]
	if !r.known || !t.Equal(r.value, v) {
		t.keys, t.values = append(t.keys, k), append(t.values, v)
		return
	}
	r.value = v // the older value may hold memory of an older Service
	t.have[k] = r
}

// write puts the entries that set requested.
func (t *records[K, V]) write() error {
	keys, values := t.keys, t.values
	t.keys, t.values = keys[:0], values[:0]
	defer clear(values)
	if t.Replace != nil {
		n := 0
		for i, k := range keys {
			old := t.have[k]
			if !old.known {
				keys[n], values[n] = k, values[i]
				n++
				continue
			}
			if err := t.attempt(keys[i:i+1], values[i:i+1], func(k []K, v []V) (int, error) { return 0, t.Replace(k[0], old.value, v[0]) }); err != nil {
				return err
			}
		}
		keys, values = keys[:n], values[:n]
	}
	return t.attempt(keys, values, t.putAll)
}

// attempt calls put, which returns the number of entries that it put before an error, and
// records the outcome.
func (t *records[K, V]) attempt(keys []K, values []V, put func([]K, []V) (int, error)) error {
	if len(keys) == 0 {
		return nil
	}
	n, err := put(keys, values)
	if err == nil {
		n = len(keys)
	}
	if n != 0 {
		*t.writes++
	}
	if t.have == nil {
		t.have = map[K]record[V]{}
	}
	for i, k := range keys[:n] {
		t.have[k] = record[V]{value: values[i], known: true, exists: true, found: t.have[k].found}
	}
	if err == nil || errors.Is(err, ruleset.ErrRefused) {
		return err
	}
	*t.writes++
	keys = keys[n:]
	if t.PutAll == nil || t.Put != nil && len(keys) == 1 {
		keys = keys[:1]
	}
	for _, k := range keys {
		old := t.have[k]
		t.have[k] = record[V]{exists: old.exists, found: old.found}
	}
	return err
}

// confirm records that an entry refers only to what its value says.
func (t *records[K, V]) confirm(k K) {
	if r := t.have[k]; r.found {
		r.found = false
		t.have[k] = r
	}
}

// drop requests the removal of an entry, which the next erase deletes if the table may have it.
func (t *records[K, V]) drop(k K) {
	if _, ok := t.have[k]; ok {
		t.gone = append(t.gone, k)
	}
}

// erase deletes the entries that drop requested.
func (t *records[K, V]) erase() error {
	keys := t.gone
	if t.gone = keys[:0]; len(keys) == 0 {
		return nil
	}
	*t.writes++
	for _, k := range keys {
		t.have[k] = record[V]{found: t.have[k].found}
	}
	return t.deleteAll(keys, func(k K) { delete(t.have, k) })
}

// anyFound reports whether an entry is left that adopt found and that was not confirmed. If adopt
// found nothing new, the time is constant.
func (t *records[K, V]) anyFound() bool {
	if t.early == nil {
		return false
	}
	for _, r := range t.have {
		if r.found {
			return true
		}
	}
	return false
}
