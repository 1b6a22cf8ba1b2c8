package driver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Driver is a [ruleset.Backend] that writes a [Tables]. [New] makes one. It is not safe for
// concurrent use: a [ruleset.Cursor] calls Apply from one goroutine at a time. It stores the
// value of every entry that it wrote.
type Driver struct {
	apply  func(context.Context, *ruleset.Delta) error
	limits ruleset.Limits
}

// New returns a Driver. The error wraps [ruleset.ErrConfig]: a table can put entries but not
// delete them, or Pool or Frontend is missing.
func New[E, P, F any](p Tables[E, P, F]) (*Driver, error) {
	missing := ""
	switch {
	case !p.Endpoints.complete():
		missing = "Endpoints.Delete"
	case !p.Addresses.complete():
		missing = "Addresses.Delete"
	case !p.Pools.complete():
		missing = "Pools.Delete"
	case !p.Frontends.complete():
		missing = "Frontends.Delete"
	case p.Pools.exists() && p.Pool == nil:
		missing = "Pool"
	case p.Frontends.exists() && p.Frontend == nil:
		missing = "Frontend"
	}
	if missing != "" {
		return nil, fmt.Errorf("driver: %w: %s is required", ruleset.ErrConfig, missing)
	}
	w := &writer[E, P, F]{plane: p}
	w.endpoints.records = records[Endpoint, E]{Table: p.Endpoints, writes: &w.writes}
	w.addresses.records = records[netip.Addr, struct{}]{Table: p.Addresses, writes: &w.writes}
	w.pools = records[Pool, P]{Table: p.Pools, writes: &w.writes}
	w.frontends = records[Frontend, F]{Table: p.Frontends, writes: &w.writes}
	return &Driver{w.apply, p.Limits}, nil
}

// Apply applies a delta. It returns a [*ruleset.PartialError] that names the Services that
// failed. After a full delta, Pruned is not set if entries that nothing needs are left: an
// entry could not be deleted, or a failed Service may still need it.
func (d *Driver) Apply(ctx context.Context, delta *ruleset.Delta) error { return d.apply(ctx, delta) }

// Limits returns the limits of the Plane.
func (d *Driver) Limits(tracker.Family) ruleset.Limits { return d.limits }

// writer writes a plane.
type writer[E, P, F any] struct {
	plane     Tables[E, P, F]
	endpoints shared[Endpoint, E]
	addresses shared[netip.Addr, struct{}]
	pools     records[Pool, P]
	frontends records[Frontend, F]
	// writes counts the writes to all tables that may have had an effect.
	writes int
}

// run is the application of one delta.
type run[E, P, F any] struct {
	*writer[E, P, F]
	ctx   context.Context
	delta *ruleset.Delta
	// change is the one of the current step.
	change ruleset.Change
	outcomes
	// stale holds the errors of removing entries that are of no Service in the delta.
	stale []error
	// wanted holds the Services of a full delta.
	wanted map[tracker.Key]*ruleset.Port
	// oldFrontends means that frontends of an earlier process are left, which may refer to
	// every pool and address of that process. oldPools means that such pools may be left, which
	// may refer to every endpoint of that process.
	oldFrontends, oldPools bool
}

func (w *writer[E, P, F]) apply(ctx context.Context, delta *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	all := delta.Full && !delta.Repeat
	if all {
		if err := w.adopt(); err != nil {
			return err
		}
	}
	if w.plane.Node != nil && (all || delta.Node != delta.OldNode) {
		if err := w.plane.Node(delta.Node); err != nil {
			return err
		}
	}
	r := &run[E, P, F]{writer: w, ctx: ctx, delta: delta, outcomes: outcomes{wrote: make([]bool, len(delta.Changes))}}
	if w.plane.Refuse != nil {
		r.step(r.judge)
	}
	if delta.Full {
		r.wanted = make(map[tracker.Key]*ruleset.Port, len(delta.Changes))
		for i := range delta.Changes {
			r.wanted[delta.Changes[i].Key] = delta.Changes[i].New
		}
	}
	r.step(r.deleteGone)
	r.step(r.fill)
	r.step(r.expose)
	r.prune(r.pruneFrontends)
	if r.oldFrontends = r.frontends.anyFound(); !r.frontends.exists() {
		r.oldFrontends = len(r.failed) != 0 && len(r.pools.early) != 0 // another backend has them
	}
	r.deleteTaken()
	r.step(r.deleteLost)
	r.step(r.trim)
	r.prune(r.prunePools)
	if r.oldPools = r.pools.anyFound(); !r.pools.exists() {
		r.oldPools = r.oldFrontends
	}
	r.step(r.release)
	r.prune(r.pruneShared)
	stale := errors.Join(r.stale...)
	pruned := stale == nil && !r.oldFrontends && !r.oldPools
	if pruned {
		w.pools.early, w.endpoints.early, w.addresses.early = nil, nil, nil
	}
	if len(r.failed) == 0 && pruned {
		return nil
	}
	return errors.Join(&ruleset.PartialError{Failed: r.failed, Pruned: pruned}, stale)
}

// adopt reads the tables.
func (w *writer[E, P, F]) adopt() error {
	for _, adopt := range []func() error{w.pools.adopt, w.frontends.adopt, w.endpoints.adopt, w.addresses.adopt} {
		if err := adopt(); err != nil {
			return err
		}
	}
	return nil
}

// step calls f for the change of each Service that has not failed and was not left as it was.
func (r *run[E, P, F]) step(f func(c *ruleset.Change) error) {
	refused := false
	for i := range r.delta.Changes {
		c := &r.change
		if *c = r.delta.Changes[i]; r.failed[c.Key] != nil || r.left[c.Key] {
			continue
		}
		if r.delta.Full {
			c.Fields = ruleset.FieldAll
		}
		err, before := r.ctx.Err(), r.writes
		if err == nil {
			err = f(c)
		}
		r.wrote[i] = r.wrote[i] || r.writes != before
		if err != nil && r.fail(c, err, r.wrote[i]) {
			refused = true
			r.unclaim(c)
		}
	}
	if refused {
		r.leave(r.delta.Changes, r.unclaim)
	}
}

// unclaim reverts the claims of a Service that stays as it was.
func (r *run[E, P, F]) unclaim(c *ruleset.Change) {
	if len(c.Attempted) != 0 {
		return // some of them may be older
	}
	old := &ruleset.Change{Key: c.Key, New: c.Old, Fields: ruleset.FieldAll}
	r.endpoints.disown(c.Key, r.endpoints.except(c.Key, r.plane.upserted(old)))
	r.addresses.disown(c.Key, r.addresses.except(c.Key, r.plane.addresses(c.Old)))
}

// prune calls f in a full delta.
func (r *run[E, P, F]) prune(f func() error) {
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

// judge asks the plane whether it can have a Service.
func (r *run[E, P, F]) judge(c *ruleset.Change) error {
	if c.New == nil {
		return nil
	}
	if err := r.plane.Refuse(c.New); err != nil {
		return fmt.Errorf("%w: %w", ruleset.ErrRefused, err)
	}
	return nil
}

// deleteGone deletes the frontends that no Service has any more, or that have no entry any more.
func (r *run[E, P, F]) deleteGone(c *ruleset.Change) error {
	for f := range c.GoneFrontends() {
		r.frontends.drop(r.plane.frontend(c.Key, &f))
	}
	if c.New != nil && r.plane.HasFrontend != nil {
		for i := range c.New.Frontends {
			if f := &c.New.Frontends[i]; !r.plane.HasFrontend(c.New, f) {
				r.frontends.drop(r.plane.frontend(c.Key, f))
			}
		}
	}
	return r.frontends.erase()
}

// fill puts what the frontends of a Service refer to. Pools that become empty may still be in
// use.
func (r *run[E, P, F]) fill(c *ruleset.Change) error {
	if c.New == nil {
		return nil
	}
	if err := r.endpoints.claim(c.Key, r.plane.upserted(c)); err != nil {
		return err
	}
	if err := r.addresses.claim(c.Key, r.plane.addresses(c.New)); err != nil {
		return err
	}
	for _, t := range targets {
		if len(c.New.Pool(t)) != 0 || r.plane.hasPool(c.New, t) && !r.pools.have[Pool{c.Key, t}].exists {
			r.setPool(c.New, t)
		}
	}
	return r.writePools(c.Key)
}

func (r *run[E, P, F]) setPool(s *ruleset.Port, t ruleset.Target) {
	if r.pools.exists() {
		r.pools.set(Pool{s.Key, t}, r.plane.Pool(s, t))
	}
}

func (r *run[E, P, F]) writePools(k tracker.Key) error {
	err := r.pools.write()
	if err == nil && r.pools.Trim == nil {
		for _, t := range targets {
			r.pools.confirm(Pool{k, t})
		}
	}
	return err
}

// expose puts the frontends.
func (r *run[E, P, F]) expose(c *ruleset.Change) error {
	if c.New == nil {
		return nil
	}
	for i := range c.New.Frontends {
		if f := &c.New.Frontends[i]; r.plane.hasFrontend(c.New, f) {
			r.frontends.set(r.plane.frontend(c.Key, f), r.plane.Frontend(c.New, f))
		}
	}
	if err := r.frontends.write(); err != nil {
		return err
	}
	for i := range c.New.Frontends {
		r.frontends.confirm(r.plane.frontend(c.Key, &c.New.Frontends[i]))
	}
	return nil
}

// pruneFrontends deletes the frontends that a full delta does not have. It keeps those of
// earlier owners that a failed Service was to take over, and those of Services that were left as
// they were.
func (r *run[E, P, F]) pruneFrontends() error {
	keep := make(map[Frontend]bool)
	add := func(k tracker.Key, s *ruleset.Port, failed bool) {
		if s == nil {
			return
		}
		for i := range s.Frontends {
			at := r.plane.frontend(k, &s.Frontends[i])
			keep[at] = true
			if at.Service = (tracker.Key{}); failed {
				keep[at] = true
			}
		}
	}
	for k, s := range r.wanted {
		add(k, s, r.failed[k] != nil)
	}
	for i := range r.delta.Changes {
		if c := &r.delta.Changes[i]; r.isLeft(c.Key) {
			add(c.Key, c.Old, false)
		}
	}
	for at := range r.frontends.have {
		of := at
		if of.Service = (tracker.Key{}); !keep[at] && !keep[of] {
			r.frontends.drop(at)
		}
	}
	return r.frontends.erase()
}

// deleteLost deletes the entries of frontends that another Service has now.
func (r *run[E, P, F]) deleteLost(c *ruleset.Change) error {
	if !r.plane.ByService || r.waits(c) {
		return nil
	}
	for f := range c.LostFrontends() {
		r.frontends.drop(r.plane.frontend(c.Key, &f))
	}
	return r.frontends.erase()
}

// deleteTaken deletes the entries of frontends that accepted Services took from Services that
// were left as they were, and their addresses.
func (r *run[E, P, F]) deleteTaken() {
	if len(r.left) == 0 && len(r.failed) == 0 {
		return
	}
	for i := range r.delta.Changes {
		c := &r.delta.Changes[i]
		if !r.isLeft(c.Key) {
			continue
		}
		stays := c.Staying(r.isLeft)
		if stays == c.Old {
			continue
		}
		sure := len(c.Attempted) == 0
		for f, to := range c.LostFrontends() {
			switch {
			case r.isLeft(to):
			case r.failed[to] != nil:
				sure = false
			case r.plane.ByService:
				r.frontends.drop(r.plane.frontend(c.Key, &f))
			}
		}
		err := r.frontends.erase()
		if err == nil && sure {
			err = r.addresses.release(c.Key, r.addresses.except(c.Key, r.plane.addresses(stays)), r.oldFrontends)
		}
		if err != nil {
			r.fail(c, err, true)
		}
	}
}

// trim empties and deletes the pools that no frontend refers to any more.
func (r *run[E, P, F]) trim(c *ruleset.Change) error {
	if !r.pools.exists() || r.waits(c) {
		return nil
	}
	emptied := false
	for _, t := range targets {
		switch at := (Pool{c.Key, t}); {
		case !r.plane.hasPool(c.New, t):
			r.dropPool(at)
		case len(c.New.Pool(t)) == 0:
			r.setPool(c.New, t)
			emptied = true
		}
	}
	if err := r.pools.erase(); err != nil {
		return err
	}
	if emptied { // the frontends may contain the size of the pool
		if err := r.writePools(c.Key); err != nil {
			return err
		}
		if err := r.expose(c); err != nil {
			return err
		}
	}
	if r.pools.Trim == nil {
		return nil
	}
	for _, t := range targets {
		at := Pool{c.Key, t}
		if !r.plane.hasPool(c.New, t) || r.inUse(at) {
			continue
		}
		if err := r.pools.Trim(at); err != nil {
			return err
		}
		r.pools.confirm(at)
	}
	return nil
}

// inUse reports whether a frontend of an earlier process may refer to a pool.
func (r *run[E, P, F]) inUse(at Pool) bool {
	_, early := r.pools.early[at]
	return early && r.oldFrontends
}

func (r *run[E, P, F]) dropPool(at Pool) {
	if !r.inUse(at) {
		r.pools.drop(at)
	}
}

// prunePools deletes the pools of the Services that a full delta does not have.
func (r *run[E, P, F]) prunePools() error {
	for at := range r.pools.have {
		if _, ok := r.wanted[at.Service]; !ok {
			r.dropPool(at)
		}
	}
	return r.pools.erase()
}

// release deletes the endpoints and addresses that no Service uses any more.
func (r *run[E, P, F]) release(c *ruleset.Change) error {
	if r.waits(c) {
		return nil
	}
	if err := r.releaseEndpoints(c); err != nil {
		return err
	}
	if c.New != nil && c.Fields&ruleset.FieldFrontends == 0 && r.plane.HasAddress == nil {
		return nil
	}
	return r.addresses.release(c.Key, r.addresses.except(c.Key, r.plane.addresses(c.New)), r.oldFrontends)
}

func (r *run[E, P, F]) releaseEndpoints(c *ruleset.Change) error {
	for _, t := range targets {
		if r.inUse(Pool{c.Key, t}) && (r.pools.Trim != nil || !r.plane.hasPool(c.New, t)) {
			return nil // the pool was not trimmed
		}
	}
	gone := removed(c)
	if c.Old == nil || c.Fields == ruleset.FieldAll {
		c.Fields = ruleset.FieldAll // Upserted then yields all endpoints
		gone = r.endpoints.except(c.Key, r.plane.upserted(c))
	}
	return r.endpoints.release(c.Key, gone, r.oldPools)
}

// pruneShared deletes the endpoints and addresses that no Service uses.
func (r *run[E, P, F]) pruneShared() error {
	for k := range r.endpoints.users.claims {
		_, ok := r.wanted[k]
		for _, t := range targets {
			_, kept := r.pools.have[Pool{k, t}]
			ok = ok || kept
		}
		if !ok {
			r.endpoints.disown(k, r.endpoints.users.Items(k))
		}
	}
	for k := range r.addresses.users.claims {
		if _, ok := r.wanted[k]; !ok {
			r.addresses.disown(k, r.addresses.users.Items(k))
		}
	}
	return errors.Join(r.endpoints.sweep(r.oldPools), r.addresses.sweep(r.oldFrontends))
}
