package driver

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
)

// Named is an entry of a table whose keys are IDs, with the key that has the ID.
type Named[K comparable, V any] struct {
	// Name is the key.
	Name K
	// Value is the value of the entry.
	Value V
}

// Numbered returns a Table whose keys have a number in the data plane's table t, for example
// groups. The values of entries that refer to them contain the number, which ids has.
// Installed replaces the contents of ids by the numbers that it finds. If it finds two entries of
// one name, Trim and Delete delete the second one. Equal of t is not used.
func Numbered[K comparable, V any](ids *IDs[K], t Table[uint32, Named[K, V]]) Table[K, V] {
	n := &numbered[K, V]{ids: ids, table: t, spare: map[K][]uint32{}}
	out := Table[K, V]{
		Put:    func(k K, v V) error { return n.putAll([]K{k}, []V{v}) },
		Delete: func(k K) error { return n.deleteAll([]K{k}) },
		Trim:   n.trim,
	}
	if t.PutAll != nil {
		out.PutAll = n.putAll
	}
	if t.DeleteAll != nil {
		out.DeleteAll = n.deleteAll
	}
	if t.Replace != nil {
		out.Replace = func(k K, old, new V) error {
			id, _ := ids.Lookup(k)
			return t.Replace(id, Named[K, V]{k, old}, Named[K, V]{k, new})
		}
	}
	if t.Installed != nil {
		out.Installed = n.installed
	}
	return out
}

type numbered[K comparable, V any] struct {
	ids   *IDs[K]
	table Table[uint32, Named[K, V]]
	// spare holds the reserved IDs of further entries of a name.
	spare map[K][]uint32
}

func (n *numbered[K, V]) installed() (iter.Seq2[K, V], error) {
	all, err := n.table.Installed()
	if err != nil {
		return nil, err
	}
	fresh, err := NewIDs[K](n.ids.low, n.ids.high)
	if err != nil {
		return nil, err
	}
	*n.ids = *fresh
	clear(n.spare)
	found := map[K]V{}
	for id, e := range all {
		if n.ids.Adopt(e.Name, id) == nil {
			found[e.Name] = e.Value
			continue
		}
		n.ids.Reserve(id)
		n.spare[e.Name] = append(n.spare[e.Name], id)
	}
	return maps.All(found), nil
}

func (n *numbered[K, V]) putAll(keys []K, values []V) (err error) {
	at, named, added := make([]uint32, len(keys)), make([]Named[K, V], len(keys)), []K(nil)
	defer func() {
		if errors.Is(err, ruleset.ErrRefused) {
			for _, k := range added {
				n.ids.Release(k)
			}
		}
	}()
	for i, k := range keys {
		if _, had := n.ids.Lookup(k); !had {
			added = append(added, k)
		}
		if at[i], err = n.ids.Get(k); err != nil {
			return fmt.Errorf("%w: %w", ruleset.ErrRefused, err)
		}
		named[i] = Named[K, V]{k, values[i]}
	}
	_, err = n.table.putAll(at, named)
	return err
}

func (n *numbered[K, V]) deleteAll(keys []K) error {
	owner, at := map[uint32]K{}, []uint32(nil)
	for _, k := range keys {
		all := n.spare[k]
		if id, ok := n.ids.Lookup(k); ok {
			all = append(slices.Clone(all), id)
		}
		for _, id := range all {
			owner[id], at = k, append(at, id)
		}
	}
	return n.delete(at, owner)
}

// trim deletes further entries of a name, and trims the first one.
func (n *numbered[K, V]) trim(k K) error {
	owner := make(map[uint32]K, len(n.spare[k]))
	for _, id := range n.spare[k] {
		owner[id] = k
	}
	if err := n.delete(slices.Clone(n.spare[k]), owner); err != nil || n.table.Trim == nil {
		return err
	}
	id, _ := n.ids.Lookup(k)
	return n.table.Trim(id)
}

func (n *numbered[K, V]) delete(at []uint32, owner map[uint32]K) error {
	if len(at) == 0 {
		return nil
	}
	return n.table.deleteAll(at, func(id uint32) {
		k := owner[id]
		if main, ok := n.ids.Lookup(k); ok && main == id {
			n.ids.Release(k)
			return
		}
		n.ids.Unreserve(id)
		if n.spare[k] = slices.DeleteFunc(n.spare[k], func(o uint32) bool { return o == id }); len(n.spare[k]) == 0 {
			delete(n.spare, k)
		}
	})
}
