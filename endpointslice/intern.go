package endpointslice

import (
	"encoding/binary"
	"slices"
	"strings"
)

// recent holds at least the last limit of the recently used values, and at most twice as many. Dropping a value only
// loses sharing.
type recent[V any] struct {
	young, old map[string]V
	limit      int
}

// lookup returns the value of key, a string or, to avoid an allocation, a byte slice.
func lookup[V any, K string | []byte](r *recent[V], key K) (V, bool) {
	v, ok := r.young[string(key)]
	if ok {
		return v, true
	}
	if v, ok = r.old[string(key)]; ok {
		r.put(strings.Clone(string(key)), v)
	}
	return v, ok
}

func (r *recent[V]) put(key string, v V) {
	if r.young == nil || len(r.young) >= r.limit {
		r.young, r.old = make(map[string]V), r.young
	}
	r.young[key] = v
}

// shared bounds the tables of names and of hints. Kubernetes is tested with up to 5,000 nodes.
const shared = 1 << 14

// interned shares the memory of equal strings and of equal lists of strings. Its strings are copies, so none keeps an
// API object in memory.
type interned struct {
	one  recent[string]
	many recent[[]string]
	list []string // the argument of set
	key  []byte   // scratch of set
}

func (n *interned) name(s string) string {
	if s == "" {
		return ""
	}
	v, ok := lookup(&n.one, s)
	if !ok {
		v = strings.Clone(s)
		n.one.put(v, v)
	}
	return v
}

// set returns the sorted set of the strings in n.list, nil if there are none, and
// empties n.list.
func (n *interned) set() []string {
	if len(n.list) == 0 {
		return nil
	}
	slices.Sort(n.list)
	n.list = slices.Compact(n.list)
	n.key = n.key[:0]
	for _, s := range n.list {
		n.key = binary.AppendUvarint(n.key, uint64(len(s)))
		n.key = append(n.key, s...)
	}
	v, ok := lookup(&n.many, n.key)
	if !ok {
		v = make([]string, len(n.list))
		for i, s := range n.list {
			v[i] = n.name(s)
		}
		n.many.put(string(n.key), v)
	}
	clear(n.list)
	n.list = n.list[:0]
	return v
}
