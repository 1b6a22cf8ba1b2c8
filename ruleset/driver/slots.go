package driver

import (
	"iter"
	"maps"
	"slices"
)

// Slots assigns the keys of a pool to the slots from 0 to Len-1 and records which
// slots must be written. The zero value is an empty table for an empty data plane. A
// Slots must not be copied and is not safe for concurrent use.
type Slots[K, V comparable] struct {
	slots []entry[K, V]
	at    map[K]int // the slot of each key
	// gaps holds each unused slot, and perhaps others.
	gaps []int
	// dirty holds the slots that may differ in the data plane.
	dirty map[int]struct{}
	// high is one more than the last slot that the data plane may have.
	high int
}

// entry is one slot.
type entry[K, V comparable] struct {
	key   K
	value V
	used  bool
}

// Len returns the number of keys, which is the size of the pool after a Write.
func (t *Slots[K, V]) Len() int { return len(t.at) }

// Slot returns the slot of a key. The bool is false if the table does not have the
// key. A later Write may move the key to a lower slot.
func (t *Slots[K, V]) Slot(k K) (int, bool) {
	i, ok := t.at[k]
	return i, ok
}

// All yields the keys and their values in no particular order. Keys may be deleted
// during the iteration.
func (t *Slots[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for k, i := range t.at {
			if !yield(k, t.slots[i].value) {
				return
			}
		}
	}
}

// Set adds a key or changes its value. Setting a key to its current value is not a
// change.
func (t *Slots[K, V]) Set(k K, v V) {
	i, ok := t.at[k]
	if ok && t.slots[i].value == v {
		return
	}
	if !ok {
		i = t.free()
		t.put(i, k)
	}
	t.slots[i].value = v
	t.markDirty(i)
}

// Delete removes a key, if the table has it.
func (t *Slots[K, V]) Delete(k K) {
	i, ok := t.at[k]
	if !ok {
		return
	}
	delete(t.at, k)
	delete(t.dirty, i)
	t.slots[i] = entry[K, V]{}
	t.gaps = append(t.gaps, i)
}

// Replace makes the contents of the table equal to want, for a Full delta. It takes
// time proportional to the whole table. The resulting writes are proportional to the
// differences.
func (t *Slots[K, V]) Replace(want iter.Seq2[K, V]) {
	now := map[K]V{}
	var order []K // the order of want, which new slots follow
	for k, v := range want {
		now[k] = v
		order = append(order, k)
	}
	for k := range t.at {
		if _, ok := now[k]; !ok {
			t.Delete(k)
		}
	}
	for _, k := range order {
		t.Set(k, now[k])
	}
}

// Adopt records that the data plane holds a key in a slot, left by an earlier
// process. It must be called before all other methods, at most once per slot, in any
// order of slots. A key may be in two slots if a process ended while it moved the
// key; it then keeps the slot that was adopted first. Adopt panics if slot is
// negative.
func (t *Slots[K, V]) Adopt(slot int, k K, v V) {
	for slot >= len(t.slots) {
		t.gaps = append(t.gaps, len(t.slots))
		t.slots = append(t.slots, entry[K, V]{})
	}
	t.high = max(t.high, slot+1)
	if _, ok := t.at[k]; ok || t.slots[slot].used {
		return
	}
	t.put(slot, k)
	t.slots[slot].value = v
}

// Rewrite makes the next Write write every slot, for a data plane that other programs
// may have changed.
func (t *Slots[K, V]) Rewrite() {
	for _, i := range t.at {
		t.markDirty(i)
	}
}

// Write calls put, in ascending order, for each slot that may differ in the data
// plane. Before that it moves keys to lower slots to fill gaps. It returns the first
// error of put. The failed slot and those after it remain to be written.
func (t *Slots[K, V]) Write(put func(slot int, k K, v V) error) error {
	t.compact()
	for _, i := range slices.Sorted(maps.Keys(t.dirty)) {
		t.high = max(t.high, i+1) // a put that fails may have taken effect
		if err := put(i, t.slots[i].key, t.slots[i].value); err != nil {
			return err
		}
		delete(t.dirty, i)
	}
	return nil
}

// Trim calls del, in descending order, for each slot at or above Len that the data
// plane may have. It must be called only after a successful Write, while Len is the
// size stored in the data plane. It returns the first error of del; another Trim
// continues from there.
func (t *Slots[K, V]) Trim(del func(slot int) error) error {
	for t.high > len(t.slots) {
		if err := del(t.high - 1); err != nil {
			return err
		}
		t.high--
	}
	return nil
}

// put assigns a slot to a key.
func (t *Slots[K, V]) put(slot int, k K) {
	if t.at == nil {
		t.at = map[K]int{}
	}
	t.at[k] = slot
	t.slots[slot].key, t.slots[slot].used = k, true
}

// markDirty records that a slot must be written.
func (t *Slots[K, V]) markDirty(slot int) {
	if t.dirty == nil {
		t.dirty = map[int]struct{}{}
	}
	t.dirty[slot] = struct{}{}
}

// free returns an unused slot: a gap, or a new last slot.
func (t *Slots[K, V]) free() int {
	for n := len(t.gaps); n > 0; n = len(t.gaps) {
		i := t.gaps[n-1]
		t.gaps = t.gaps[:n-1]
		if i < len(t.slots) && !t.slots[i].used {
			return i
		}
	}
	t.slots = append(t.slots, entry[K, V]{})
	return len(t.slots) - 1
}

// compact moves the keys of the last slots into the gaps.
func (t *Slots[K, V]) compact() {
	cut := func() {
		for n := len(t.slots); n > 0 && !t.slots[n-1].used; n = len(t.slots) {
			t.slots = t.slots[:n-1]
		}
	}
	cut()
	for _, gap := range t.gaps {
		if gap >= len(t.slots) || t.slots[gap].used {
			continue
		}
		last := len(t.slots) - 1
		e := t.slots[last]
		t.slots[last] = entry[K, V]{}
		delete(t.dirty, last)
		t.put(gap, e.key)
		t.slots[gap].value = e.value
		t.markDirty(gap)
		cut()
	}
	t.gaps = nil
}
