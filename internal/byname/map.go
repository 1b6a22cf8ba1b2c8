// Package byname has a map of objects by namespace and name that is smaller and
// grows faster than Go's own.
package byname

import (
	"hash/maphash"
	"iter"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Named is a value, usually a pointer, with a name. The name must not change while the
// value is in a [Map].
type Named interface {
	comparable
	Name() types.NamespacedName
}

// Map holds values by their names. Its keys are hashes of the names, which the values
// hold: an entry has 16 bytes instead of 40, and a growing map need not read the names.
// It is not safe for concurrent use. [New] returns one.
type Map[V Named] struct {
	hash func(types.NamespacedName) uint64
	m    map[uint64]V
	// rest holds values whose hash another value already had, which is very unlikely.
	rest map[types.NamespacedName]V
}

// New returns an empty map.
func New[V Named]() Map[V] {
	seed := maphash.MakeSeed()
	return Map[V]{
		hash: func(n types.NamespacedName) uint64 { return maphash.Comparable(seed, n) },
		m:    map[uint64]V{},
	}
}

// Get returns the value of the name, or the zero V.
func (m *Map[V]) Get(n types.NamespacedName) V {
	var none V
	if v := m.m[m.hash(n)]; v != none && v.Name() == n {
		return v
	}
	if len(m.rest) == 0 {
		return none
	}
	return m.rest[n]
}

// Put adds a value whose name no value in the map has.
func (m *Map[V]) Put(v V) {
	n := v.Name()
	h := m.hash(n)
	if _, taken := m.m[h]; !taken {
		m.m[h] = v
		return
	}
	if m.rest == nil {
		m.rest = map[types.NamespacedName]V{}
	}
	m.rest[n] = v
}

// Delete removes a value if the map has it.
func (m *Map[V]) Delete(v V) {
	n := v.Name()
	if h := m.hash(n); m.m[h] == v {
		delete(m.m, h)
	} else {
		delete(m.rest, n)
	}
}

// Len returns the number of values.
func (m *Map[V]) Len() int { return len(m.m) + len(m.rest) }

// All yields the values in an unspecified order.
func (m *Map[V]) All() iter.Seq[V] {
	return func(yield func(V) bool) {
		for _, v := range m.m {
			if !yield(v) {
				return
			}
		}
		for _, v := range m.rest {
			if !yield(v) {
				return
			}
		}
	}
}

// Compare orders names by namespace and then by name.
func Compare(a, b types.NamespacedName) int {
	if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}
