//go:build linux

package ipvs

// owned is the objects of one kind that the kernel holds. Each has a number of owners:
// Service ports that want it. An object without owners was found in the kernel, or is
// about to be removed.
type owned[K comparable, V any] map[K]held[V]

// held is one object.
type held[V any] struct {
	owners int
	// value is what the kernel keeps with the object.
	value V
}

// has reports whether the kernel holds an object.
func (o owned[K, V]) has(k K) bool {
	_, ok := o[k]
	return ok
}

// take adds an owner, and reports whether the object is new, so that it has to be added
// to the kernel.
func (o owned[K, V]) take(k K) (added bool) {
	h, there := o[k]
	h.owners++
	o[k] = h
	return !there
}

// drop removes an owner, and reports whether none is left. The object stays until it is
// deleted from the kernel, and then from o.
func (o owned[K, V]) drop(k K) (unused bool) {
	h := o[k]
	h.owners--
	o[k] = h
	return h.owners <= 0
}

// found notes an object that the kernel holds, without an owner.
func (o owned[K, V]) found(k K, value V) { o[k] = held[V]{value: value} }

// set changes the value of an object.
func (o owned[K, V]) set(k K, value V) {
	h := o[k]
	h.value = value
	o[k] = h
}

// unowned calls yield with each object that has no owner.
func (o owned[K, V]) unowned(yield func(K) bool) {
	for k, h := range o {
		if h.owners <= 0 && !yield(k) {
			return
		}
	}
}
