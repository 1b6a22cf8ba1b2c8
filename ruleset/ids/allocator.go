package ids

import (
	"errors"
	"fmt"
	"iter"
	"maps"
)

var (
	// ErrExhausted means that every ID of the range is in use.
	ErrExhausted = errors.New("ids: no free ID")
	// ErrConflict means that a key and an ID that were found together cannot both be
	// adopted: the ID is another key's, the key has another ID, or the ID is reserved
	// or out of range.
	ErrConflict = errors.New("ids: conflict")
)

// Allocator gives each key an ID of its own. It must not be used by several
// goroutines at once. [New] returns one.
type Allocator[K comparable] struct {
	low, high uint32
	ids       map[K]uint32
	keys      map[uint32]K
	reserved  map[uint32]struct{}
	// freed holds IDs that were released, oldest first. Some may be in use again.
	freed []uint32
	// next is the lowest number that was not tried yet, beyond 32 bits after the last.
	next uint64
}

// New returns an Allocator of the IDs from low to high, inclusive. It returns an
// error if low is greater than high.
func New[K comparable](low, high uint32) (*Allocator[K], error) {
	if low > high {
		return nil, fmt.Errorf("ids: empty range %d to %d", low, high)
	}
	return &Allocator[K]{
		low: low, high: high, next: uint64(low),
		ids: map[K]uint32{}, keys: map[uint32]K{}, reserved: map[uint32]struct{}{},
	}, nil
}

// Adopt records that the data plane has key under id, as an earlier process left it.
// It returns an error that wraps [ErrConflict] and changes nothing if the two cannot
// go together with what is recorded. To adopt the same again is no error.
func (a *Allocator[K]) Adopt(key K, id uint32) error {
	if id < a.low || id > a.high {
		return fmt.Errorf("%w: ID %d is not in the range %d to %d", ErrConflict, id, a.low, a.high)
	}
	if other, ok := a.keys[id]; ok {
		if other == key {
			return nil
		}
		return fmt.Errorf("%w: ID %d of %v is taken by %v", ErrConflict, id, key, other)
	}
	if _, ok := a.reserved[id]; ok {
		return fmt.Errorf("%w: ID %d of %v is reserved", ErrConflict, id, key)
	}
	if other, ok := a.ids[key]; ok {
		return fmt.Errorf("%w: %v has ID %d, not %d", ErrConflict, key, other, id)
	}
	a.ids[key], a.keys[id] = id, key
	return nil
}

// Get returns the ID of key. A key without one gets a free ID. The error is
// [ErrExhausted] if no ID is free.
func (a *Allocator[K]) Get(key K) (uint32, error) {
	if id, ok := a.ids[key]; ok {
		return id, nil
	}
	id, ok := a.free()
	if !ok {
		return 0, ErrExhausted
	}
	a.ids[key], a.keys[id] = id, key
	return id, nil
}

// free takes a free ID.
func (a *Allocator[K]) free() (uint32, bool) {
	for len(a.freed) > 0 {
		id := a.freed[0]
		a.freed = a.freed[1:]
		if !a.used(id) {
			return id, true
		}
	}
	for a.next <= uint64(a.high) {
		id := uint32(a.next)
		a.next++
		if !a.used(id) {
			return id, true
		}
	}
	return 0, false
}

func (a *Allocator[K]) used(id uint32) bool {
	if _, ok := a.keys[id]; ok {
		return true
	}
	_, ok := a.reserved[id]
	return ok
}

// Lookup returns the ID of key, and false if it has none.
func (a *Allocator[K]) Lookup(key K) (uint32, bool) {
	id, ok := a.ids[key]
	return id, ok
}

// Key returns the key that has id, and false if no key has it.
func (a *Allocator[K]) Key(id uint32) (K, bool) {
	k, ok := a.keys[id]
	return k, ok
}

// Release frees the ID of key, if it has one. It must be called only after the data
// plane has nothing under the ID.
func (a *Allocator[K]) Release(key K) {
	if id, ok := a.ids[key]; ok {
		delete(a.ids, key)
		delete(a.keys, id)
		a.freed = append(a.freed, id)
	}
}

// Reserve keeps id from being given out, though no key has it: for what was found in
// the data plane and belongs to no key that is known. An ID that a key has stays
// with it, and is reserved after its release.
func (a *Allocator[K]) Reserve(id uint32) { a.reserved[id] = struct{}{} }

// Unreserve undoes Reserve, after what was found has been removed.
func (a *Allocator[K]) Unreserve(id uint32) {
	if _, ok := a.reserved[id]; !ok {
		return
	}
	delete(a.reserved, id)
	if id >= a.low && id <= a.high {
		a.freed = append(a.freed, id)
	}
}

// Len returns how many keys have an ID.
func (a *Allocator[K]) Len() int { return len(a.ids) }

// All yields the keys and their IDs in no order. Keys may be released while it runs.
func (a *Allocator[K]) All() iter.Seq2[K, uint32] { return maps.All(a.ids) }
