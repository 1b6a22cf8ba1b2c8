// Package mapplane is a backend for a data plane that consists of two maps, such as the maps
// of a BPF program: a frontend leads to a pool, and a pool has an entry for each of its
// endpoints. It shows how package ruleset/driver writes single entries, which may fail, while
// packets use the maps, and how [driver.Slots] numbers a pool's entries without gaps.
//
// A program picks an endpoint by a number below the pool's size, which is part of the
// frontend's entry. A change of the size therefore writes the frontend again. Entries above
// the new size are deleted after that ([driver.Plane].Trim). The key of a pool is a
// [tracker.Key], not a [ruleset.Service.ID], which each process assigns again.
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
	// Put adds or replaces an entry.
	Put(K, V) error
	// Delete removes an entry. Deleting a missing entry is no error.
	Delete(K) error
	// All yields all entries. It may omit entries that are deleted during the iteration.
	All() iter.Seq2[K, V]
}

// Action is the treatment of packets to a frontend.
type Action struct {
	Service tracker.Key
	// Target is the pool of the Service that packets are sent to, or refuses or drops them
	// or lets them pass.
	// Internal is the target of packets from this node.
	Target, Internal ruleset.Target
	// Size and InternalSize are the sizes of the two pools.
	Size, InternalSize int
	Masquerade         ruleset.Masquerade
	Affinity           time.Duration
}

// Member is a slot of a pool, numbered from 0.
type Member struct {
	Pool driver.Pool
	Slot int
}

// Endpoint is the content of a slot.
type Endpoint struct {
	Addr   netip.AddrPort
	Weight uint16
}

// New returns a [ruleset.Backend] that writes two maps, which may have entries of an earlier
// process.
func New(frontends Map[driver.Frontend, Action], members Map[Member, Endpoint]) (*driver.Driver[[]Endpoint, Action], error) {
	p := &pools{members: members, slots: map[driver.Pool]*driver.Slots[netip.AddrPort, uint16]{}}
	return driver.New(driver.Plane[[]Endpoint, Action]{
		Pools: driver.Table[driver.Pool, []Endpoint]{Installed: p.installed, Put: p.put, Delete: p.delete},
		Frontends: driver.Table[driver.Frontend, Action]{
			Installed: func() (iter.Seq2[driver.Frontend, Action], error) { return frontends.All(), nil },
			Put:       frontends.Put,
			Delete:    frontends.Delete,
		},
		Pool:           contents,
		Frontend:       actionOf,
		EqualFrontends: func(a, b Action) bool { return a == b },
		Trim:           p.trim,
	})
}

// pools writes the map of members.
type pools struct {
	members Map[Member, Endpoint]
	slots   map[driver.Pool]*driver.Slots[netip.AddrPort, uint16]
}

// table returns the slots of a pool.
func (p *pools) table(pool driver.Pool) *driver.Slots[netip.AddrPort, uint16] {
	t := p.slots[pool]
	if t == nil {
		t = &driver.Slots[netip.AddrPort, uint16]{}
		p.slots[pool] = t
	}
	return t
}

// installed reads the pools. It yields no contents, so that put compares each slot.
func (p *pools) installed() (iter.Seq2[driver.Pool, []Endpoint], error) {
	clear(p.slots)
	for m, ep := range p.members.All() {
		p.table(m.Pool).Adopt(m.Slot, ep.Addr, ep.Weight)
	}
	found := make(map[driver.Pool]bool, len(p.slots))
	for pool := range p.slots {
		found[pool] = true
	}
	return func(yield func(driver.Pool, []Endpoint) bool) {
		for pool := range found {
			if !yield(pool, nil) {
				return
			}
		}
	}, nil
}

// put writes the slots that differ. Earlier frontends may still use slots above the new size.
func (p *pools) put(pool driver.Pool, eps []Endpoint) error {
	t := p.table(pool)
	t.Replace(func(yield func(netip.AddrPort, uint16) bool) {
		for _, ep := range eps {
			if !yield(ep.Addr, ep.Weight) {
				return
			}
		}
	})
	return t.Write(func(slot int, addr netip.AddrPort, weight uint16) error {
		return p.members.Put(Member{pool, slot}, Endpoint{addr, weight})
	})
}

// trim deletes the slots above a pool's size.
func (p *pools) trim(pool driver.Pool) error {
	return p.table(pool).Trim(func(slot int) error { return p.members.Delete(Member{pool, slot}) })
}

func (p *pools) delete(pool driver.Pool) error {
	if err := p.put(pool, nil); err != nil {
		return err
	}
	if err := p.trim(pool); err != nil {
		return err
	}
	delete(p.slots, pool)
	return nil
}

func contents(s *ruleset.Service, t ruleset.Target) (out []Endpoint) {
	for _, ep := range s.Pool(t) {
		out = append(out, Endpoint{ep.Addr, ep.Weight})
	}
	return out
}

func actionOf(s *ruleset.Service, f *ruleset.Frontend) Action {
	return Action{
		Service: s.Key, Target: f.Target, Internal: f.Internal,
		Size: len(s.Pool(f.Target)), InternalSize: len(s.Pool(f.Internal)),
		Masquerade: f.Masquerade, Affinity: s.Port.Affinity,
	}
}
