// Package mapplane is a backend for a data plane that consists of two maps, such as the maps
// of a BPF program: a frontend leads to a pool, and a pool has an entry for each of its
// endpoints. It shows how package ruleset/driver writes entries, which may fail, while
// packets use the maps, and how [driver.Slots] numbers a pool's entries without gaps.
//
// A program picks an endpoint by a number below the pool's size, which is part of the
// frontend's entry. A change of the size therefore writes the frontend again. The key of a pool
// is a [tracker.Key], not a [ruleset.Port.ID], which each process assigns again.
package mapplane

import (
	"iter"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// Map is a map of the data plane.
type Map[K comparable, V any] interface {
	// Put adds or replaces entries.
	Put([]K, []V) error
	// Delete removes entries. Deleting a missing entry is not an error.
	Delete([]K) error
	// All yields all entries. It may omit entries that are deleted during the iteration.
	All() iter.Seq2[K, V]
}

// Action is the treatment of packets to a frontend.
type Action struct {
	Service tracker.Key
	// Target sends packets to a pool of the Service, refuses them, drops them or lets them pass.
	// Internal is the target of packets from this node.
	Target, Internal ruleset.Target
	// Size and InternalSize are the sizes of the two pools.
	Size, InternalSize int
	Masquerade         ruleset.Masquerade
	Affinity           time.Duration
}

// Endpoint is the content of a slot.
type Endpoint struct {
	Addr   netip.AddrPort
	Weight uint16
}

// New returns a [ruleset.Backend] that writes two maps, which may have entries of an earlier
// process.
func New(frontends Map[driver.Frontend, Action], members Map[driver.Slot[driver.Pool], Endpoint]) (*driver.Driver, error) {
	slots, actions := &driver.Slots[driver.Pool, Endpoint]{Table: table(members)}, table(frontends)
	var pool []Endpoint
	return driver.New(driver.Plane{
		Tables: []driver.Ordered{slots, &actions},
		Want: func(s *ruleset.Port) {
			for name, eps := range driver.Pools(s, false) {
				pool = pool[:0]
				for _, ep := range eps {
					pool = append(pool, Endpoint{ep.Addr, ep.Weight})
				}
				slots.WantPool(name, pool)
			}
			for at, f := range driver.Frontends(s) {
				actions.Want(at, actionOf(s, f))
			}
		},
	})
}

func table[K, V comparable](m Map[K, V]) driver.Table[K, V] {
	return driver.Table[K, V]{
		Installed: func(*ruleset.Delta) (iter.Seq2[K, V], error) { return m.All(), nil },
		PutAll:    m.Put,
		DeleteAll: m.Delete,
		Equal:     func(a, b V) bool { return a == b },
	}
}

func actionOf(s *ruleset.Port, f *ruleset.Frontend) Action {
	return Action{
		Service: s.Key, Target: f.Target, Internal: f.Internal,
		Size: len(s.Pool(f.Target)), InternalSize: len(s.Pool(f.Internal)),
		Masquerade: f.Masquerade, Affinity: s.Spec.Affinity,
	}
}
