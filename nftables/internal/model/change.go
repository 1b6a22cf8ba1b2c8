package model

import (
	"fmt"
	"slices"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// service is a Service as programmed: its version, its pools and the dispatch keys of its frontends.
type service struct {
	version *ruleset.Port
	pools   [ruleset.TargetLocal + 1]*pool // by target
	keys    []dispatchKeys
	// ranges holds the frontends with ranges of ports.
	ranges []portRange
	// shift holds the result of [layout.ShiftedBy] if the Service has a range that is shifted.
	shift   [2]uint16
	shifted bool
	// lacksAffinity is set if the Service is programmed without client affinity that it asks
	// for.
	lacksAffinity bool
}

// sticky returns the targets whose pools are sticky.
func (s *service) sticky() (out StickyTargets) {
	for _, target := range targets {
		out[target] = s.pools[target] != nil && s.pools[target].sticky
	}
	return out
}

// number returns the number of the Service's pool for a target, or 0.
func (s *service) number(target ruleset.Target) uint32 {
	if int(target) >= len(s.pools) || s.pools[target] == nil {
		return 0
	}
	return s.pools[target].number
}

// service returns the programmed Service with the ID, or nil.
func (t *Table) service(id uint32) *service {
	if int(id) < len(t.services) {
		return t.services[id]
	}
	return nil
}

// Change replaces the Service of c and adds the difference to tx. After an error, the table and tx
// are unchanged. An error that does not wrap [ErrOverflow] is about this Service alone.
func (t *Table) Change(c *ruleset.Change, tx *Tx) error {
	p, err := t.plan(c, tx)
	if err == nil {
		t.done(p, tx)
	}
	return err
}

// planned is a change of a Service that is in a transaction and in the table's draft.
type planned struct {
	id       uint32
	fields   ruleset.Field // that may change
	after    *ruleset.Port
	old, now *service
	mark     Mark // where it begins in the transaction
	draft    int  // where it begins in the table's draft
}

// plan does the part of Change that drop takes back.
func (t *Table) plan(c *ruleset.Change, tx *Tx) (planned, error) {
	p := planned{id: c.ID(), fields: c.Fields, after: c.New, now: &service{}, mark: tx.Mark(), draft: t.draft.mark()}
	if p.old = t.service(p.id); p.old == nil {
		p.old = &service{}
	}
	if p.old.version != c.Old {
		p.fields = ruleset.FieldAll
	}
	if p.old.version == nil && c.New == nil {
		return p, nil
	}
	if c.New != nil && inet.Protocol(c.New.Key.Protocol) == 0 {
		return p, fmt.Errorf("%w: %q", ErrProtocol, c.New.Key.Protocol)
	}
	now, err := t.write(p.old, fitted(p.old.version), fitted(c.New), p.fields, tx)
	if err == nil && tx.Limit != 0 && tx.Size() > tx.Limit {
		if size := tx.sizeFrom(p.mark); size > tx.Limit {
			err = fmt.Errorf("service does not fit into one transaction: %w: %d bytes, at most %d", ErrTooLarge, size, tx.Limit)
		}
	}
	if err != nil {
		t.drop(p, tx)
		return p, err
	}
	p.now = now
	return p, nil
}

// drop takes a plan back, and those after it.
func (t *Table) drop(p planned, tx *Tx) {
	tx.Truncate(p.mark)
	t.draft.drop(p.draft)
}

// write adds the difference between two versions of a Service to tx and returns the Service as
// programmed.
func (t *Table) write(old *service, before, after *ruleset.Port, fields ruleset.Field, tx *Tx) (*service, error) {
	now := old
	onlyEndpoints := before != nil && after != nil && !old.lacksAffinity &&
		fields&(ruleset.FieldFrontends|ruleset.FieldAffinity|ruleset.FieldHash) == 0 && sameHandlers(old, before, after)
	if !onlyEndpoints {
		var err error
		if now, err = t.allocate(old, after, tx); err != nil {
			return nil, err
		}
	}
	for _, target := range targets {
		if err := t.writePool(old.pools[target], now.pools[target], before, after, target, tx); err != nil {
			return nil, err
		}
	}
	t.hairpin.write(before, after, tx)
	if !onlyEndpoints {
		t.frontends.write(old, now, before, after, t.portRanges.takeKept, tx)
	}
	return now, nil
}

// sameHandlers reports whether two versions of a Service with the same frontends have the same
// handlers.
func sameHandlers(old *service, before, after *ruleset.Port) bool {
	for _, target := range targets {
		if p := old.pools[target]; p != nil && !p.sticky && handlerBuckets(before, target) != handlerBuckets(after, target) {
			return false
		}
	}
	return true
}

// allocate returns the Service with its pools and dispatch keys. It reuses old's pools if they
// are of the right kind. It creates missing pools and handlers.
func (t *Table) allocate(old *service, s *ruleset.Port, tx *Tx) (*service, error) {
	now := &service{}
	if s == nil {
		return now, nil
	}
	for _, target := range targets {
		if !slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.Target == target || f.Internal == target }) {
			continue
		}
		p := t.pools.allocate(old.pools[target], s, target)
		if p == nil {
			return nil, ErrTooManyPools
		}
		now.pools[target] = p
		now.lacksAffinity = now.lacksAffinity || p.sticky != (s.Spec.Affinity != 0)
	}
	if err := t.portRanges.allocate(old, now, s, &t.chains, tx); err != nil {
		return nil, err
	}
	sticky := now.sticky()
	now.keys = make([]dispatchKeys, len(s.Frontends))
	for i := range s.Frontends {
		f := &s.Frontends[i]
		now.keys[i].any = layout.DispatchKey(t.chains.handler(HandlerOf(s, f, sticky), tx), now.number(f.Target))
		if HasInternalHandler(f) {
			h := PoolHandler(s, f, ruleset.TargetCluster, sticky)
			now.keys[i].internal = layout.DispatchKey(t.chains.internalHandler(h, tx), now.number(ruleset.TargetCluster))
		}
	}
	return now, nil
}

// writePool adds the elements by which a Service's pool changes. was and is are the same pool unless
// its kind changes.
func (t *Table) writePool(was, is *pool, before, after *ruleset.Port, target ruleset.Target, tx *Tx) error {
	if was != nil && was != is {
		t.pools.empty(was, before, target, tx)
		t.setStickyHandler(was, stickyRef{}, tx)
	}
	if is == nil {
		return nil
	}
	t.pools.write(is, was != is, before, after, target, tx)
	if is.sticky {
		h, ok := t.chains.stickyHandler(StickyHandlerOf(after, target), hasRange(after), tx)
		if !ok {
			return ErrOverflow
		}
		t.setStickyHandler(is, h, tx)
	}
	return nil
}

// setStickyHandler adds the new handler of a sticky pool, which may be none.
func (t *Table) setStickyHandler(p *pool, h stickyRef, tx *Tx) {
	if p.handler != h {
		t.chains.useSticky(p.handler, -1)
		t.chains.useSticky(h, +1)
		t.pools.setHandler(p, h, tx)
	}
}

// done records that the change of a Service is complete, and makes the draft final.
func (t *Table) done(p planned, tx *Tx) {
	t.draft.keep()
	t.affinity.clients(p.now, p.after, p.mark, tx)
	t.pools.free(p.old, p.now)
	t.portRanges.free(p.old, p.now)
	for int(p.id) >= len(t.services) {
		t.services = append(t.services, nil)
	}
	t.services[p.id] = p.now
	if p.after == nil {
		t.services[p.id] = nil
	}
	t.affinity.note(p.id, p.old, p.now, p.after)
	before := p.old.version
	p.now.version = p.after
	if p.fields&ruleset.FieldFrontends != 0 && (before != nil || p.after != nil) {
		t.frontends.noteLongNames(before, p.after)
	}
}

// fitted returns s with the endpoints for which there are numbers: s itself except for very many
// endpoints. It keeps the first ones, so that all nodes keep the same.
func fitted(s *ruleset.Port) *ruleset.Port {
	if s == nil || len(s.Selection.Cluster) <= maxNumberedEndpoints && len(s.Selection.Local) <= maxNumberedEndpoints {
		return s
	}
	pool := func(list []*tracker.Endpoint, target ruleset.Target) []*tracker.Endpoint {
		most := layout.MaxPool
		if s.Spec.Affinity != 0 {
			most = layout.MaxStickyEndpoints
		}
		if len(list) > maxNumberedEndpoints && distributionOf(s, target) != (distribution{}) {
			most = maxNumberedEndpoints
		}
		return list[:min(len(list), most)]
	}
	cluster, local := pool(s.Selection.Cluster, ruleset.TargetCluster), pool(s.Selection.Local, ruleset.TargetLocal)
	if len(cluster) == len(s.Selection.Cluster) && len(local) == len(s.Selection.Local) {
		return s
	}
	out := *s
	out.Selection.Cluster, out.Selection.Local = cluster, local
	return &out
}

// Limits returns the limits of one Service.
func Limits() ruleset.Limits {
	return ruleset.Limits{
		AffinityEndpoints: layout.MaxStickyEndpoints, WeightedEndpoints: maxNumberedEndpoints,
		PortRanges: ruleset.PortRangesShifted,
		RangeCost:  250, // the kernel takes 3 ms to remove one of 800 ranges
	}
}
