package ruleset

import "slices"

// finder finds the first element of a list with a given key. It does not allocate for
// short lists, which are the rule, and does no quadratic work for long ones.
type finder[T any, K comparable] struct {
	list  []T
	key   func(T) K
	index map[K]int // nil for a short list
}

func newFinder[T any, K comparable](list []T, key func(T) K) finder[T, K] {
	f := finder[T, K]{list: list, key: key}
	if len(list) <= 16 {
		return f
	}
	f.index = make(map[K]int, len(list))
	for i, x := range list {
		if _, ok := f.index[key(x)]; !ok {
			f.index[key(x)] = i
		}
	}
	return f
}

// first returns the index of the first element with key k, or -1.
func (f finder[T, K]) first(k K) int {
	if f.index == nil {
		return slices.IndexFunc(f.list, func(x T) bool { return f.key(x) == k })
	}
	if i, ok := f.index[k]; ok {
		return i
	}
	return -1
}

func (f finder[T, K]) has(k K) bool { return f.first(k) >= 0 }
