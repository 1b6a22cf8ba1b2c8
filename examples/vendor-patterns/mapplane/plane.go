// Package mapplane is a backend for a data plane that consists of two maps, such as the maps
// of a BPF program: a frontend leads to a pool, and a pool has an entry for each of its
// endpoints. The backend writes single entries, without transactions, while packets use
// the maps, and any write may fail.
//
// The order of writes ensures that no frontend ever leads to a pool without its endpoints:
// removed frontends first, then new endpoints, new and changed frontends, and removed
// endpoints last. Each step covers all Services before the next begins, because a frontend
// may move from one Service to another. A frontend's key is its address alone, so the new
// owner's entry replaces the old one, and lost frontends need no step of their own.
//
// A Service whose write fails skips the further steps of this Apply, and the
// [ruleset.PartialError] names it. A Service that loses a frontend to the failed Service
// keeps its endpoints, because packets still reach them. The cursor offers both Services
// again, with all their changes.
//
// A program picks an endpoint by a number below the pool's size. [slots.Table] numbers a
// pool's entries without gaps, and the frontend's entry holds the size. A change of the size
// therefore writes the frontend again.
//
// The key of a pool is a [tracker.Key], not a [ruleset.Service.ID], which each process
// assigns again. A full delta reads both maps and writes the differences alone.
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
	// Delete removes an entry. Deleting a missing entry is no error.
	Delete(K) error
	// All yields all entries. It may omit entries that are deleted during the iteration.
	All() iter.Seq2[K, V]
}

// Frontend is the destination of a packet.
type Frontend struct {
	Addr   netip.Addr // the zero Addr for a NodePort
	Port   uint16
	Proto  v1.Protocol
	Family tracker.Family
}

// Action is the treatment of packets to a frontend.
type Action struct {
	Service tracker.Key
	// Target is the pool of the Service that packets are sent to, or refuses or drops them.
	// Internal is the target of packets from this node.
	Target, Internal ruleset.Target
	// Size and InternalSize are the sizes of the two pools.
	Size, InternalSize int
	Masquerade         ruleset.Masquerade
	Affinity           time.Duration
}

// Pool identifies a pool of a Service.
type Pool struct {
	Service tracker.Key
	Target  ruleset.Target
}

// Member is a slot of a pool, numbered from 0.
type Member struct {
	Pool Pool
	Slot int
}

// Endpoint is the content of a slot.
type Endpoint struct {
	Addr   netip.AddrPort
	Weight uint16
}

// Plane is a [ruleset.Backend] that writes two maps.
type Plane struct {
	Frontends Map[Frontend, Action]
	Members   Map[Member, Endpoint]
	pools     map[Pool]*slots.Table[netip.AddrPort, uint16]
}

var targets = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// Apply applies a delta. A failure affects one Service, or a full delta as a whole.
func (p *Plane) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var found map[Frontend]Action // the entries before a full delta
	if d.Full {
		found = maps.Collect(p.Frontends.All())
		p.adopt()
	}
	failed := map[tracker.Key]error{}
	// step calls f for each Service that has not failed.
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
		// A failed Service may still use entries of an earlier process. With an error
		// other than PartialError the next delta is full again.
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
// FieldLocal affect only the sizes in the entry, and most changes of a pool keep its size.
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

// adopt reads the pools that this process or an earlier one wrote from the map.
func (p *Plane) adopt() {
	clear(p.pools)
	for m, ep := range p.Members.All() {
		p.table(m.Pool).Adopt(m.Slot, ep.Addr, ep.Weight)
	}
}

// fill writes the new endpoints of a pool. It leaves an empty pool to trim.
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

// trim deletes the entries above a pool's size. No frontend's size may cover them.
func (p *Plane) trim(pool Pool) error {
	t := p.table(pool)
	err := t.Trim(func(slot int) error { return p.Members.Delete(Member{pool, slot}) })
	if err == nil && t.Len() == 0 {
		delete(p.pools, pool)
	}
	return err
}

// prune deletes the entries that are not in a full delta: frontends first, because a
// frontend of an earlier process may lead to any of its entries. found holds the earlier
// frontends. The pools of Services in the delta are up to date except for entries above
// their size.
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
		return err // a remaining frontend may need its members
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
		Service: s.Key, Target: f.Target, Internal: f.Internal,
		Size: len(s.Pool(f.Target)), InternalSize: len(s.Pool(f.Internal)),
		Masquerade: f.Masquerade, Affinity: s.Port.Affinity,
	}
}
