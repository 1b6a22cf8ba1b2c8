package driver

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Driver is a [ruleset.Backend] that writes a [Plane]. [New] makes one. It is not safe for
// concurrent use: a [ruleset.Cursor] calls Apply from one goroutine at a time.
type Driver[P, F any] struct {
	plane     Plane[P, F]
	endpoints shared[Endpoint]
	addresses shared[netip.Addr]
}

// New returns a Driver. The error wraps [ruleset.ErrConfig]: a table has Put without Delete,
// or Pool or Frontend is missing.
func New[P, F any](p Plane[P, F]) (*Driver[P, F], error) {
	missing := ""
	switch {
	case p.Endpoints.Put != nil && p.Endpoints.Delete == nil:
		missing = "Endpoints.Delete"
	case p.Addresses.Put != nil && p.Addresses.Delete == nil:
		missing = "Addresses.Delete"
	case p.Pools.Put != nil && p.Pools.Delete == nil:
		missing = "Pools.Delete"
	case p.Frontends.Put != nil && p.Frontends.Delete == nil:
		missing = "Frontends.Delete"
	case p.Pools.Put != nil && p.Pool == nil:
		missing = "Pool"
	case p.Frontends.Put != nil && p.Frontend == nil:
		missing = "Frontend"
	}
	if missing != "" {
		return nil, fmt.Errorf("driver: %w: %s is required", ruleset.ErrConfig, missing)
	}
	if p.EqualPools == nil {
		p.EqualPools = func(a, b P) bool { return reflect.DeepEqual(a, b) }
	}
	if p.EqualFrontends == nil {
		p.EqualFrontends = func(a, b F) bool { return reflect.DeepEqual(a, b) }
	}
	return &Driver[P, F]{plane: p, endpoints: shared[Endpoint]{table: p.Endpoints}, addresses: shared[netip.Addr]{table: p.Addresses}}, nil
}

// run is the application of one delta.
type run[P, F any] struct {
	*Driver[P, F]
	ctx   context.Context
	delta *ruleset.Delta
	// pools and frontends are the entries found at the start of a full delta.
	pools     map[Pool]P
	frontends map[Frontend]F
	failed    map[tracker.Key]error
}

// Apply applies a delta. It returns a [*ruleset.PartialError] if single Services fail. If
// something fails in a full delta, it returns another error, so that the next delta is full,
// too.
func (d *Driver[P, F]) Apply(ctx context.Context, delta *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r := &run[P, F]{Driver: d, ctx: ctx, delta: delta, failed: map[tracker.Key]error{}}
	if delta.Full {
		if err := r.adopt(); err != nil {
			return err
		}
	}
	if d.plane.Node != nil && (delta.Full || delta.Node != delta.OldNode) {
		if err := d.plane.Node(delta.Node); err != nil {
			return err
		}
	}
	r.step(r.deleteGone)
	r.step(r.fill)
	r.step(r.expose)
	if delta.Full {
		// An earlier frontend of a failed Service may refer to any entry.
		if len(r.failed) != 0 {
			return errors.Join(slices.Collect(maps.Values(r.failed))...)
		}
		if err := r.pruneFrontends(); err != nil {
			return err
		}
	}
	r.step(r.deleteLost)
	r.step(r.trim)
	if delta.Full {
		// A found pool that is not in the delta may refer to any endpoint.
		if err := errors.Join(append(slices.Collect(maps.Values(r.failed)), r.prunePools())...); err != nil {
			return err
		}
	}
	r.step(r.release)
	switch {
	case delta.Full:
		errs := slices.Collect(maps.Values(r.failed))
		return errors.Join(append(errs, r.endpoints.sweep(), r.addresses.sweep())...)
	case len(r.failed) != 0:
		return &ruleset.PartialError{Failed: r.failed}
	}
	return nil
}

// step calls f for the change of each Service that has not failed. In a full delta every
// change has all Fields.
func (r *run[P, F]) step(f func(c ruleset.Change) error) {
	for _, c := range r.delta.Changes {
		if r.failed[c.Key] != nil {
			continue
		}
		if r.delta.Full {
			c.Fields = ruleset.FieldAll
		}
		err := r.ctx.Err()
		if err == nil {
			err = f(c)
		}
		if err != nil {
			r.failed[c.Key] = err
		}
	}
}

// adopt reads the tables. What the Driver wrote before is in the changes.
func (r *run[P, F]) adopt() error {
	var err error
	if r.pools, err = collect(r.plane.Pools); err != nil {
		return err
	}
	if r.frontends, err = collect(r.plane.Frontends); err != nil {
		return err
	}
	if err := r.endpoints.adopt(); err != nil {
		return err
	}
	if err := r.addresses.adopt(); err != nil {
		return err
	}
	for i := range r.delta.Changes {
		for s := range r.delta.Changes[i].Before() {
			r.endpoints.had(s.Key, endpointsOf(s.Key, slices.Values(s.Selection.Reachable)))
			r.addresses.had(s.Key, r.addressesOf(s))
		}
	}
	return nil
}

func collect[K comparable, V any](t Table[K, V]) (map[K]V, error) {
	if t.Put == nil || t.Installed == nil {
		return nil, nil
	}
	all, err := t.Installed()
	if err != nil {
		return nil, err
	}
	return maps.Collect(all), nil
}

// deleteGone deletes the frontends that no Service has any more.
func (r *run[P, F]) deleteGone(c ruleset.Change) error {
	if r.plane.Frontends.Put == nil {
		return nil
	}
	for f := range c.GoneFrontends() {
		at := r.plane.frontend(c.Key, &f)
		if err := r.plane.Frontends.Delete(at); err != nil {
			return err
		}
		delete(r.frontends, at)
	}
	return nil
}

// fill puts what the frontends of a Service refer to. Pools that become empty may still be in
// use.
func (r *run[P, F]) fill(c ruleset.Change) error {
	if c.New == nil {
		return nil
	}
	if err := r.endpoints.claim(c.Key, endpointsOf(c.Key, c.Upserted())); err != nil {
		return err
	}
	if err := r.addresses.claim(c.Key, r.addressesOf(c.New)); err != nil {
		return err
	}
	for _, t := range targets {
		if len(c.New.Pool(t)) != 0 {
			if err := r.putPool(c, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// putPool puts a pool whose value differs.
func (r *run[P, F]) putPool(c ruleset.Change, t ruleset.Target) error {
	p := &r.plane
	if p.Pools.Put == nil {
		return nil
	}
	at, now := Pool{c.Key, t}, p.Pool(c.New, t)
	if c.Fields == ruleset.FieldAll {
		if was, ok := r.pools[at]; ok && p.EqualPools(was, now) {
			return nil
		}
	} else if p.has(c.Old, t) && p.EqualPools(p.Pool(c.Old, t), now) {
		return nil
	}
	return p.Pools.Put(at, now)
}

// expose puts the frontends whose value differs.
func (r *run[P, F]) expose(c ruleset.Change) error {
	p := &r.plane
	if c.New == nil || p.Frontends.Put == nil {
		return nil
	}
	was := map[Frontend]F{}
	if c.Fields == ruleset.FieldAll {
		was = r.frontends
	} else {
		for i := range c.Old.Frontends {
			f := &c.Old.Frontends[i]
			was[p.frontend(c.Key, f)] = p.Frontend(c.Old, f)
		}
	}
	for i := range c.New.Frontends {
		f := &c.New.Frontends[i]
		at, now := p.frontend(c.Key, f), p.Frontend(c.New, f)
		if old, ok := was[at]; ok && p.EqualFrontends(old, now) {
			continue
		}
		if err := p.Frontends.Put(at, now); err != nil {
			return err
		}
	}
	return nil
}

// pruneFrontends deletes the found frontends that a full delta does not have.
func (r *run[P, F]) pruneFrontends() error {
	if len(r.frontends) == 0 {
		return nil
	}
	for i := range r.delta.Changes {
		c := &r.delta.Changes[i]
		if c.New != nil {
			for j := range c.New.Frontends {
				delete(r.frontends, r.plane.frontend(c.Key, &c.New.Frontends[j]))
			}
		}
		if r.plane.ByService {
			// deleteLost deletes these.
			for f := range c.LostFrontends() {
				delete(r.frontends, r.plane.frontend(c.Key, &f))
			}
		}
	}
	var errs []error
	for at := range r.frontends {
		errs = append(errs, r.plane.Frontends.Delete(at))
	}
	return errors.Join(errs...)
}

// waits reports whether a Service loses a frontend to one that failed. Until its new owner is
// in place, the Service serves the frontend's clients.
func (r *run[P, F]) waits(c ruleset.Change) bool {
	for _, to := range c.LostFrontends() {
		if r.failed[to] != nil {
			return true
		}
	}
	return false
}

// deleteLost deletes the entries of frontends that another Service has now.
func (r *run[P, F]) deleteLost(c ruleset.Change) error {
	if !r.plane.ByService || r.plane.Frontends.Put == nil || r.waits(c) {
		return nil
	}
	for f := range c.LostFrontends() {
		if err := r.plane.Frontends.Delete(r.plane.frontend(c.Key, &f)); err != nil {
			return err
		}
	}
	return nil
}

// trim empties and deletes the pools that no frontend refers to any more.
func (r *run[P, F]) trim(c ruleset.Change) error {
	if r.waits(c) {
		return nil
	}
	for _, t := range targets {
		if err := r.trimPool(c, t); err != nil {
			return err
		}
	}
	return nil
}

// release deletes the endpoints and addresses that no Service uses any more.
func (r *run[P, F]) release(c ruleset.Change) error {
	if r.waits(c) {
		return nil
	}
	if err := r.endpoints.release(c.Key, endpointsOf(c.Key, c.Removed())); err != nil {
		return err
	}
	return r.addresses.release(c.Key, r.addresses.except(c.Key, r.addressesOf(c.New)))
}

func (r *run[P, F]) trimPool(c ruleset.Change, t ruleset.Target) error {
	p := &r.plane
	if p.Pools.Put == nil {
		return nil
	}
	at := Pool{c.Key, t}
	if !p.has(c.New, t) {
		had := false
		for s := range c.Before() {
			had = had || p.has(s, t)
		}
		if _, found := r.pools[at]; !had && !found {
			return nil
		}
		delete(r.pools, at)
		return p.Pools.Delete(at)
	}
	if len(c.New.Pool(t)) == 0 {
		if err := r.putPool(c, t); err != nil {
			return err
		}
	}
	if p.Trim == nil {
		return nil
	}
	return p.Trim(at)
}

// prunePools deletes the found pools that a full delta does not have.
func (r *run[P, F]) prunePools() error {
	if len(r.pools) == 0 {
		return nil
	}
	for i := range r.delta.Changes {
		if c := &r.delta.Changes[i]; c.New != nil {
			for _, t := range targets {
				delete(r.pools, Pool{c.Key, t})
			}
		}
	}
	var errs []error
	for at := range r.pools {
		errs = append(errs, r.plane.Pools.Delete(at))
	}
	return errors.Join(errs...)
}

// addressesOf yields the addresses of a Service that the plane has a table for. s may be nil.
func (r *run[P, F]) addressesOf(s *ruleset.Service) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		if s == nil {
			return
		}
		for i := range s.Frontends {
			f := &s.Frontends[i]
			if f.Addr.IsValid() && (r.plane.HasAddress == nil || r.plane.HasAddress(f)) && !yield(f.Addr) {
				return
			}
		}
	}
}

// endpointsOf returns the keys of endpoints of the Service with key k.
func endpointsOf(k tracker.Key, eps iter.Seq[*tracker.Endpoint]) iter.Seq[Endpoint] {
	return func(yield func(Endpoint) bool) {
		for ep := range eps {
			if !yield(Endpoint{ep.Addr, k.Protocol}) {
				return
			}
		}
	}
}
