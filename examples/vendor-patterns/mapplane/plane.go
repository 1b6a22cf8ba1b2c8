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
// Pools are named by [tracker.Key], not by [ruleset.Service.ID]. IDs are given out
// anew in each process: by them, what an earlier process left in the maps would
// mix with what this one writes, until it is pruned.
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
	"github.com/go-proxier/proxier/tracker"
)

// Map is a map of the data plane.
type Map[K comparable, V any] interface {
	// Put adds or replaces an entry.
	Put(K, V) error
	// Delete removes an entry; that there is none is no error.
	Delete(K) error
	// Keys yields all keys. What is deleted meanwhile need not be among them.
	Keys() iter.Seq[K]
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
	Masquerade   ruleset.Masquerade
	Affinity     time.Duration
}

// Member is an endpoint's place in a pool.
type Member struct {
	Service tracker.Key
	Pool    ruleset.Target
	Addr    netip.AddrPort
}

// Plane is the backend.
type Plane struct {
	Frontends Map[Frontend, Action]
	Members   Map[Member, uint16] // by weight
}

var pools = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// Apply writes what a delta has. It fails for single Services, unless the delta
// is full.
func (p *Plane) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
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
		}
		return nil
	})
	step(func(c *ruleset.Change) error {
		for _, t := range pools {
			come := c.UpsertedIn(t)
			if d.Full && c.New != nil { // somebody may have taken them away
				come = slices.Values(c.New.Pool(t))
			}
			for ep := range come {
				if err := p.Members.Put(Member{c.Key, t, ep.Addr}, ep.Weight); err != nil {
					return err
				}
			}
		}
		return nil
	})
	step(func(c *ruleset.Change) error {
		if c.New == nil || !d.Full && c.What&(ruleset.FieldFrontends|ruleset.FieldAffinity) == 0 {
			return nil
		}
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			a := Action{c.Key, f.Target, f.Near, f.Masquerade, c.New.Port.Affinity}
			if err := p.Frontends.Put(frontendOf(c.Key, f), a); err != nil {
				return err
			}
		}
		return nil
	})
	step(func(c *ruleset.Change) error {
		for _, to := range c.LostFrontends() {
			if failed[to] != nil {
				return nil
			}
		}
		for _, t := range pools {
			for ep := range c.RemovedFrom(t) {
				if err := p.Members.Delete(Member{c.Key, t, ep.Addr}); err != nil {
					return err
				}
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
		return p.prune(d)
	}
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// prune deletes what a full delta does not call for, frontends first.
func (p *Plane) prune(d *ruleset.Delta) error {
	frontends, members := map[Frontend]bool{}, map[Member]bool{}
	for i := range d.Changes {
		s := d.Changes[i].New
		if s == nil {
			continue
		}
		for j := range s.Frontends {
			frontends[frontendOf(s.Key, &s.Frontends[j])] = true
		}
		for _, t := range pools {
			for _, ep := range s.Pool(t) {
				members[Member{s.Key, t, ep.Addr}] = true
			}
		}
	}
	var errs []error
	for f := range p.Frontends.Keys() {
		if !frontends[f] {
			errs = append(errs, p.Frontends.Delete(f))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err // a frontend that is left may need its members
	}
	for m := range p.Members.Keys() {
		if !members[m] {
			errs = append(errs, p.Members.Delete(m))
		}
	}
	return errors.Join(errs...)
}

func frontendOf(k tracker.Key, f *ruleset.Frontend) Frontend {
	return Frontend{f.Addr, f.Port, k.Protocol, k.Family}
}
