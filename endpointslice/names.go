package endpointslice

import (
	"encoding/binary"
	"slices"
	"strings"
)

// recent remembers the values it was asked for most recently: at least the last
// limit and at most twice as many. Forgetting costs sharing, never correctness,
// so there is no need to count references; and memory stays bounded however many
// names come and go.
type recent[V any] struct {
	young, old map[string]V
	limit      int
}

// lookup takes the key as bytes too, so that one can be built without allocating.
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

// shared bounds the tables of names and of hints. Clusters have up to 5,000 nodes
// (the size Kubernetes is tested to), a few zones, and about as many hint lists.
const shared = 1 << 14

// names shares the memory of equal strings and of equal lists of strings, and
// thereby keeps API objects from being kept alive by a substring.
type names struct {
	one  recent[string]
	many recent[[]string]
	list []string // the argument of set
	key  []byte   // scratch of set
}

// name returns a string equal to s.
func (n *names) name(s string) string {
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
func (n *names) set() []string {
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
