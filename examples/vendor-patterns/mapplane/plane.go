// Package mapplane is a backend for a data plane that consists of two maps, such as
// a BPF program's: a frontend leads to a pool, and a pool has an entry for each of
// its endpoints. It is written to by entry, without transactions, while packets
// look things up, and any write may fail.
//
// Entries are written in such an order that no frontend ever leads to a pool
// without the endpoints it should have: frontends that go first, then endpoints
// that come, frontends that come or change, and at last endpoints that go. Each
// step is done for all Services before the next, because a frontend may move from
// one to another. A frontend's key is its address alone, so writing the new owner's
// entry replaces the old one, and frontends that a Service lost need no step of
// their own.
//
// A Service for which a write fails has no further steps in this Apply, and is named
// in a [ruleset.PartialError]. A Service that loses a frontend to it keeps its
// endpoints for now: packets are still sent to them. Both are offered again, with
// everything that was ever offered for them, so nothing is forgotten.
//
// A program picks an endpoint by a number below the pool's size, so a pool's entries
// are numbered without gaps, by [slots.Table], and the frontend's entry holds the
// size. A frontend is therefore written again when the size of its pool changes.
//
// Pools are named by [tracker.Key], not by [ruleset.Service.ID], which each process
// gives out again. A full delta reads both maps and writes what differs: nothing, if
// an earlier process left them as they must be.
package mapplane

import (
	"context"
	"errors"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/slots"
	"github.com/go-proxier/proxier/tracker"
)

// Map is a map of the data plane.
type Map[K comparable, V any] interface {
	// Put adds or replaces an entry.
	Put(K, V) error
	// Delete removes an entry; that there is none is no error.
	Delete(K) error
	// All yields all entries. Entries that are deleted while it runs need not be among
	// them.
	All() iter.Seq2[K, V]
}

// Frontend is where a packet is addressed to.
type Frontend struct {
	Addr   netip.Addr // the zero Addr for a NodePort
	Port   uint16
	Proto  v1.Protocol
	Family tracker.Family
}

// Action is what becomes of it.
type Action struct {
	Service tracker.Key
	// Target is which of the Service's pools it is sent to, or that it is refused or
	// dropped; Near is the same for packets from this node.
	Target, Near ruleset.Target
	// Size and NearSize are the sizes of the two pools.
	Size, NearSize int
	Masquerade     ruleset.Masquerade
	Affinity       time.Duration
}

// Pool names a pool of a Service.
type Pool struct {
	Service tracker.Key
	Target  ruleset.Target
}

// Member is a slot of a pool, numbered from 0.
type Member struct {
	Pool Pool
	Slot int
}

// Endpoint is what a slot holds.
type Endpoint struct {
	Addr   netip.AddrPort
	Weight uint16
}

// Plane is the backend.
type Plane struct {
	Frontends Map[Frontend, Action]
	Members   Map[Member, Endpoint]
	pools     map[Pool]*slots.Table[netip.AddrPort, uint16]
}

var targets = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// Apply writes what a delta has. It fails for single Services, unless the delta
// is full.
func (p *Plane) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var found map[Frontend]Action // what is there, if the delta is full
	if d.Full {
		found = maps.Collect(p.Frontends.All())
		p.adopt()
	}
	failed := map[tracker.Key]error{}
	// step does something for each Service that has not failed.
	step := func(f func(c *ruleset.Change) error) {
		for i := range d.Changes {
			c := &d.Changes[i]
			if failed[c.Key] != nil {
				continue
			}
			if err := f(c); err != nil {
				failed[c.Key] = err
			}
		}
	}
	step(func(c *ruleset.Change) error {
		for f := range c.GoneFrontends() {
			if err := p.Frontends.Delete(frontendOf(c.Key, &f)); err != nil {
				return err
			}
			delete(found, frontendOf(c.Key, &f))
		}
		return nil
	})
	step(func(c *ruleset.Change) error {
		for _, t := range targets {
			if err := p.fill(c, t, d.Full); err != nil {
				return err
			}
		}
		return nil
	})
	step(func(c *ruleset.Change) error {
		if c.New == nil || !d.Full && !frontendsDiffer(c) {
			return nil
		}
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			at, a := frontendOf(c.Key, f), actionOf(c.New, f)
			if was, ok := found[at]; ok && was == a {
				continue
			}
			if err := p.Frontends.Put(at, a); err != nil {
				return err
			}
		}
		return nil
	})
	if d.Full {
		// While a Service has failed, what an earlier process left may still be in
		// use. An error that is no PartialError makes the next delta full again.
		if len(failed) != 0 {
			return errors.Join(slices.Collect(maps.Values(failed))...)
		}
		return p.prune(d, found)
	}
	step(func(c *ruleset.Change) error {
		for _, to := range c.LostFrontends() {
			if failed[to] != nil {
				return nil
			}
		}
		for _, t := range targets {
			if err := p.trim(Pool{c.Key, t}); err != nil {
				return err
			}
		}
		return nil
	})
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// frontendsDiffer reports whether the entry of a frontend may change. FieldCluster and
// FieldLocal matter for the sizes in the entry only, and most changes of a pool keep its
// size.
func frontendsDiffer(c *ruleset.Change) bool {
	if c.What&(ruleset.FieldFrontends|ruleset.FieldAffinity) != 0 {
		return true
	}
	return c.What&ruleset.FieldCluster != 0 && len(c.Old.Selection.Cluster) != len(c.New.Selection.Cluster) ||
		c.What&ruleset.FieldLocal != 0 && len(c.Old.Selection.Local) != len(c.New.Selection.Local)
}

// table returns the slots of a pool.
func (p *Plane) table(pool Pool) *slots.Table[netip.AddrPort, uint16] {
	t := p.pools[pool]
	if t == nil {
		if p.pools == nil {
			p.pools = map[Pool]*slots.Table[netip.AddrPort, uint16]{}
		}
		t = &slots.Table[netip.AddrPort, uint16]{}
		p.pools[pool] = t
	}
	return t
}

// adopt takes the pools from the map, as this process or an earlier one left them.
func (p *Plane) adopt() {
	clear(p.pools)
	for m, ep := range p.Members.All() {
		p.table(m.Pool).Adopt(m.Slot, ep.Addr, ep.Weight)
	}
}

// fill writes the endpoints of a pool that a Change brings. A pool without any is left
// for trim.
func (p *Plane) fill(c *ruleset.Change, target ruleset.Target, full bool) error {
	pool := Pool{c.Key, target}
	t := p.table(pool)
	if full {
		t.Replace(func(yield func(netip.AddrPort, uint16) bool) {
			if c.New == nil {
				return
			}
			for _, ep := range c.New.Pool(target) {
				if !yield(ep.Addr, ep.Weight) {
					return
				}
			}
		})
	} else {
		for ep := range c.RemovedFrom(target) {
			t.Delete(ep.Addr)
		}
		for ep := range c.UpsertedIn(target) {
			t.Set(ep.Addr, ep.Weight)
		}
	}
	return t.Write(func(slot int, addr netip.AddrPort, weight uint16) error {
		return p.Members.Put(Member{pool, slot}, Endpoint{addr, weight})
	})
}

// trim deletes the entries above a pool's size, when no frontend's size covers them.
func (p *Plane) trim(pool Pool) error {
	t := p.table(pool)
	err := t.Trim(func(slot int) error { return p.Members.Delete(Member{pool, slot}) })
	if err == nil && t.Len() == 0 {
		delete(p.pools, pool)
	}
	return err
}

// prune deletes what a full delta does not call for: frontends first, because those of
// an earlier process may lead to any entry that it left. found is the frontends that
// were there before. The pools of Services in the delta are up to date but for the
// entries above their size.
func (p *Plane) prune(d *ruleset.Delta, found map[Frontend]Action) error {
	frontends, services := map[Frontend]bool{}, map[tracker.Key]bool{}
	for i := range d.Changes {
		services[d.Changes[i].Key] = true
		if s := d.Changes[i].New; s != nil {
			for j := range s.Frontends {
				frontends[frontendOf(s.Key, &s.Frontends[j])] = true
			}
		}
	}
	var errs []error
	for f := range found {
		if !frontends[f] {
			errs = append(errs, p.Frontends.Delete(f))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err // a frontend that is left may need its members
	}
	for pool, t := range p.pools {
		if !services[pool.Service] {
			for addr := range t.All() {
				t.Delete(addr)
			}
		}
		errs = append(errs, t.Write(nil), p.trim(pool))
	}
	return errors.Join(errs...)
}

func frontendOf(k tracker.Key, f *ruleset.Frontend) Frontend {
	return Frontend{f.Addr, f.Port, k.Protocol, k.Family}
}

func actionOf(s *ruleset.Service, f *ruleset.Frontend) Action {
	return Action{
		Service: s.Key, Target: f.Target, Near: f.Internal,
		Size: len(s.Pool(f.Target)), NearSize: len(s.Pool(f.Internal)),
		Masquerade: f.Masquerade, Affinity: s.Port.Affinity,
	}
}
