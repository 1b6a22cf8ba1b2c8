package driver

import "fmt"

// IDs assigns a unique ID to each key, such as the number of a group in a switch or an index of a BPF array, and
// keeps them across restarts, as [ruleset.Port.ID] does not. IDs is not safe for concurrent use. [NewIDs] returns an
// IDs; the zero value is not usable.
//
// [IDs.Get] returns the same ID for a key until the key is released, so a failed step can be repeated. Released IDs
// are allocated again, the longest unused first, before numbers that were never used.
type IDs[K comparable] struct {
	low, high uint32
	ids       map[K]uint32
	keys      map[uint32]K
	reserved  map[uint32]struct{}
	// freed holds released IDs, oldest first. Some may be in use again.
	freed []uint32
	// next is the lowest number not tried yet. It exceeds 32 bits after the last one.
	next uint64
}

// NewIDs returns an IDs for the IDs from low to high, inclusive. It returns an
// error if low is greater than high.
func NewIDs[K comparable](low, high uint32) (*IDs[K], error) {
	if low > high {
		return nil, fmt.Errorf("driver: range %d to %d is empty", low, high)
	}
	return &IDs[K]{
		low: low, high: high, next: uint64(low),
		ids: map[K]uint32{}, keys: map[uint32]K{}, reserved: map[uint32]struct{}{},
	}, nil
}

// Adopt records that the data plane has key under id, written by an earlier process. If this conflicts with an
// earlier record, or the ID is reserved or out of range, it returns an error and changes nothing. Adopting the same
// pair again is not an error.
func (a *IDs[K]) Adopt(key K, id uint32) error {
	if id < a.low || id > a.high {
		return fmt.Errorf("driver: ID %d is out of the range %d to %d", id, a.low, a.high)
	}
	if other, ok := a.keys[id]; ok {
		if other == key {
			return nil
		}
		return fmt.Errorf("driver: ID %d of %v belongs to %v", id, key, other)
	}
	if _, ok := a.reserved[id]; ok {
		return fmt.Errorf("driver: ID %d of %v is reserved", id, key)
	}
	if other, ok := a.ids[key]; ok {
		return fmt.Errorf("driver: %v has ID %d, not %d", key, other, id)
	}
	a.ids[key], a.keys[id] = id, key
	return nil
}

// Get returns the ID of key. It allocates a free ID if key has none, and returns an
// error if no ID is free.
func (a *IDs[K]) Get(key K) (uint32, error) {
	if id, ok := a.ids[key]; ok {
		return id, nil
	}
	id, ok := a.free()
	if !ok {
		return 0, fmt.Errorf("driver: every ID from %d to %d is in use", a.low, a.high)
	}
	a.ids[key], a.keys[id] = id, key
	return id, nil
}

func (a *IDs[K]) free() (uint32, bool) {
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

func (a *IDs[K]) used(id uint32) bool {
	if _, ok := a.keys[id]; ok {
		return true
	}
	_, ok := a.reserved[id]
	return ok
}

// Lookup returns the ID of key. The bool is false if key has none.
func (a *IDs[K]) Lookup(key K) (uint32, bool) {
	id, ok := a.ids[key]
	return id, ok
}

// Key returns the key with the given ID. The bool is false if no key has the ID.
func (a *IDs[K]) Key(id uint32) (K, bool) {
	k, ok := a.keys[id]
	return k, ok
}

// Release frees the ID of key, if it has one. It must be called only after the data
// plane has removed the object with this ID.
func (a *IDs[K]) Release(key K) {
	if id, ok := a.ids[key]; ok {
		delete(a.ids, key)
		delete(a.keys, id)
		a.freed = append(a.freed, id)
	}
}

// Reserve excludes id from allocation, for objects in the data plane without a known key. A key that has the ID keeps
// it until its release.
func (a *IDs[K]) Reserve(id uint32) { a.reserved[id] = struct{}{} }

// Unreserve reverts Reserve, after the object has been removed.
func (a *IDs[K]) Unreserve(id uint32) {
	if _, ok := a.reserved[id]; !ok {
		return
	}
	delete(a.reserved, id)
	if id >= a.low && id <= a.high {
		a.freed = append(a.freed, id)
	}
}
