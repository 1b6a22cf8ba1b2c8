package driver

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"reflect"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Driver is a [ruleset.Backend] that writes a [Plane]. [New] makes one. It is not safe for
// concurrent use: a [ruleset.Cursor] calls Apply from one goroutine at a time. It stores the
// value of every pool and frontend that it wrote.
type Driver[P, F any] struct {
	plane     Plane[P, F]
	endpoints shared[Endpoint]
	addresses shared[netip.Addr]
	pools     records[Pool, P]
	frontends records[Frontend, F]
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
	return &Driver[P, F]{
		plane:     p,
		endpoints: shared[Endpoint]{table: p.Endpoints}, addresses: shared[netip.Addr]{table: p.Addresses},
		pools:     records[Pool, P]{table: p.Pools, equal: p.EqualPools},
		frontends: records[Frontend, F]{table: p.Frontends, equal: p.EqualFrontends},
	}, nil
}

// run is the application of one delta.
type run[P, F any] struct {
	*Driver[P, F]
	ctx    context.Context
	delta  *ruleset.Delta
	failed map[tracker.Key]error
	// stale holds the errors of removing entries that are of no Service in the delta.
	stale []error
	// wanted holds the Services of a full delta.
	wanted map[tracker.Key]*ruleset.Service
	// oldFrontends means that frontends of an earlier process are left, which may refer to
	// every pool and address of that process. oldPools means that such pools may be left, which
	// may refer to every endpoint of that process.
	oldFrontends, oldPools bool
}

// Apply applies a delta. It returns a [*ruleset.PartialError] that names the Services that
// failed. After a full delta, Pruned is not set if entries that nothing needs are left: an
// entry could not be deleted, or a failed Service may still need it.
func (d *Driver[P, F]) Apply(ctx context.Context, delta *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r := &run[P, F]{Driver: d, ctx: ctx, delta: delta, failed: map[tracker.Key]error{}}
	all := delta.Full && !delta.Repeat
	if all {
		if err := r.adopt(); err != nil {
			return err
		}
	}
	if d.plane.Node != nil && (all || delta.Node != delta.OldNode) {
		if err := d.plane.Node(delta.Node); err != nil {
			return err
		}
	}
	if delta.Full {
		r.wanted = make(map[tracker.Key]*ruleset.Service, len(delta.Changes))
		for i := range delta.Changes {
			r.wanted[delta.Changes[i].Key] = delta.Changes[i].New
		}
	}
	r.step(r.deleteGone)
	r.step(r.fill)
	r.step(r.expose)
	r.prune(r.pruneFrontends)
	if r.oldFrontends = r.frontends.anyFound(); d.plane.Frontends.Put == nil {
		r.oldFrontends = len(r.failed) != 0 && len(r.pools.early) != 0 // another backend has them
	}
	r.step(r.deleteLost)
	r.step(r.trim)
	r.prune(r.prunePools)
	if r.oldPools = r.pools.anyFound(); d.plane.Pools.Put == nil {
		r.oldPools = r.oldFrontends
	}
	r.step(r.release)
	r.prune(r.pruneShared)
	stale := errors.Join(r.stale...)
	pruned := stale == nil && !r.oldFrontends && !r.oldPools
	if pruned {
		d.pools.early, d.endpoints.early, d.addresses.early = nil, nil, nil
	}
	if len(r.failed) == 0 && pruned {
		return nil
	}
	return errors.Join(&ruleset.PartialError{Failed: r.failed, Pruned: pruned}, stale)
}

// step calls f for the change of each Service that has not failed.
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

// prune calls f in a full delta.
func (r *run[P, F]) prune(f func() error) {
	if !r.delta.Full {
		return
	}
	err := r.ctx.Err()
	if err == nil {
		err = f()
	}
	if err != nil {
		r.stale = append(r.stale, err)
	}
}

// adopt reads the tables.
func (r *run[P, F]) adopt() error {
	for _, adopt := range []func() error{r.pools.adopt, r.frontends.adopt, r.endpoints.adopt, r.addresses.adopt} {
		if err := adopt(); err != nil {
			return err
		}
	}
	return nil
}

// deleteGone deletes the frontends that no Service has any more.
func (r *run[P, F]) deleteGone(c ruleset.Change) error {
	for f := range c.GoneFrontends() {
		if err := r.frontends.delete(r.plane.frontend(c.Key, &f)); err != nil {
			return err
		}
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
		at := Pool{c.Key, t}
		if len(c.New.Pool(t)) != 0 || r.plane.has(c.New, t) && !r.pools.have[at].exists {
			if err := r.putPool(c.New, t); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *run[P, F]) putPool(s *ruleset.Service, t ruleset.Target) error {
	if r.plane.Pools.Put == nil {
		return nil
	}
	at := Pool{s.Key, t}
	err := r.pools.put(at, r.plane.Pool(s, t))
	if err == nil && r.plane.Trim == nil {
		r.pools.confirm(at)
	}
	return err
}

// expose puts the frontends.
func (r *run[P, F]) expose(c ruleset.Change) error {
	p := &r.plane
	if c.New == nil || p.Frontends.Put == nil {
		return nil
	}
	for i := range c.New.Frontends {
		f := &c.New.Frontends[i]
		at := p.frontend(c.Key, f)
		if err := r.frontends.put(at, p.Frontend(c.New, f)); err != nil {
			return err
		}
		r.frontends.confirm(at)
	}
	return nil
}

// pruneFrontends deletes the frontends that a full delta does not have. It keeps those of
// earlier owners that a failed Service was to take over.
func (r *run[P, F]) pruneFrontends() error {
	keep := make(map[Frontend]bool)
	for k, s := range r.wanted {
		if s == nil {
			continue
		}
		for i := range s.Frontends {
			at := r.plane.frontend(k, &s.Frontends[i])
			keep[at] = true
			if at.Service = (tracker.Key{}); r.failed[k] != nil {
				keep[at] = true
			}
		}
	}
	var errs []error
	for at := range r.frontends.have {
		of := at
		if of.Service = (tracker.Key{}); !keep[at] && !keep[of] {
			errs = append(errs, r.frontends.delete(at))
		}
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
	if !r.plane.ByService || r.waits(c) {
		return nil
	}
	for f := range c.LostFrontends() {
		if err := r.frontends.delete(r.plane.frontend(c.Key, &f)); err != nil {
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

func (r *run[P, F]) trimPool(c ruleset.Change, t ruleset.Target) error {
	at := Pool{c.Key, t}
	if !r.plane.has(c.New, t) {
		return r.deletePool(at)
	}
	if len(c.New.Pool(t)) == 0 {
		// The frontends may contain the size of the pool.
		if err := r.putPool(c.New, t); err != nil {
			return err
		}
		if err := r.expose(c); err != nil {
			return err
		}
	}
	if r.plane.Trim == nil || r.plane.Pools.Put == nil || r.inUse(at) {
		return nil
	}
	if err := r.plane.Trim(at); err != nil {
		return err
	}
	r.pools.confirm(at)
	return nil
}

// inUse reports whether a frontend of an earlier process may refer to a pool.
func (r *run[P, F]) inUse(at Pool) bool {
	_, early := r.pools.early[at]
	return early && r.oldFrontends
}

func (r *run[P, F]) deletePool(at Pool) error {
	if r.inUse(at) {
		return nil
	}
	return r.pools.delete(at)
}

// prunePools deletes the pools of the Services that a full delta does not have.
func (r *run[P, F]) prunePools() error {
	var errs []error
	for at := range r.pools.have {
		if _, ok := r.wanted[at.Service]; !ok {
			errs = append(errs, r.deletePool(at))
		}
	}
	return errors.Join(errs...)
}

// release deletes the endpoints and addresses that no Service uses any more.
func (r *run[P, F]) release(c ruleset.Change) error {
	if r.waits(c) {
		return nil
	}
	if err := r.releaseEndpoints(c); err != nil {
		return err
	}
	return r.addresses.release(c.Key, r.addresses.except(c.Key, r.addressesOf(c.New)), r.oldFrontends)
}

func (r *run[P, F]) releaseEndpoints(c ruleset.Change) error {
	for _, t := range targets {
		if r.inUse(Pool{c.Key, t}) && (r.plane.Trim != nil || !r.plane.has(c.New, t)) {
			return nil // the pool was not trimmed
		}
	}
	var gone iter.Seq[Endpoint]
	if c.Old != nil && c.Fields != ruleset.FieldAll {
		gone = endpointsOf(c.Key, c.Removed())
	} else {
		c.Fields = ruleset.FieldAll // Upserted then yields all endpoints
		gone = r.endpoints.except(c.Key, endpointsOf(c.Key, c.Upserted()))
	}
	return r.endpoints.release(c.Key, gone, r.oldPools)
}

// pruneShared deletes the endpoints and addresses that no Service uses.
func (r *run[P, F]) pruneShared() error {
	for k := range r.endpoints.ledger.Owners() {
		_, ok := r.wanted[k]
		for _, t := range targets {
			_, kept := r.pools.have[Pool{k, t}]
			ok = ok || kept
		}
		if !ok {
			r.endpoints.disown(k)
		}
	}
	for k := range r.addresses.ledger.Owners() {
		if _, ok := r.wanted[k]; !ok {
			r.addresses.disown(k)
		}
	}
	return errors.Join(r.endpoints.sweep(r.oldPools), r.addresses.sweep(r.oldFrontends))
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
