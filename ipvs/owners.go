//go:build linux

package ipvs

// owned holds the objects of one kind that are in the kernel. Each has a number of owners,
// which are the Service ports that want it. An object without owners was found in the
// kernel, or is about to be removed.
type owned[K comparable, V any] map[K]held[V]

// held is one object.
type held[V any] struct {
	owners int
	// value is the value that the kernel stores with the object.
	value V
}

// has reports whether the kernel holds an object.
func (o owned[K, V]) has(k K) bool {
	_, ok := o[k]
	return ok
}

// take adds an owner. It reports whether the object is new and must be added to the
// kernel.
func (o owned[K, V]) take(k K) (added bool) {
	h, there := o[k]
	h.owners++
	o[k] = h
	return !there
}

// drop removes an owner. It reports whether the object has no owner left. The object stays
// in o until it is deleted from the kernel.
func (o owned[K, V]) drop(k K) (unused bool) {
	h := o[k]
	h.owners--
	o[k] = h
	return h.owners <= 0
}

// found records an object that the kernel holds, without an owner.
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
