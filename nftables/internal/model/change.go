package model

import (
	"fmt"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// service is a Service as programmed: its version and the numbers that departments gave it.
type service struct {
	version *ruleset.Port
	pools   [ruleset.TargetLocal + 1]*pool // by target
	// protocol is the number of its protocol.
	protocol uint8
	// lacksAffinity is set if the Service is programmed without client affinity that it asks
	// for.
	lacksAffinity bool
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
	after    *ruleset.Port
	old, now *service
	mark     Mark // where it begins in the transaction
	draft    int  // where it begins in the table's draft
}

// plan does the part of Change that drop takes back.
func (t *Table) plan(c *ruleset.Change, tx *Tx) (planned, error) {
	p := planned{id: c.ID(), after: c.New, mark: tx.Mark(), draft: t.draft.mark()}
	protocol := inet.Protocol(c.Key.Protocol)
	if p.old = t.service(p.id); p.old == nil {
		p.old = &service{}
	}
	p.now = p.old
	if p.old.version == nil && c.New == nil {
		return p, nil
	}
	before := t.before.become(p.old.version)
	after := t.after.become(c.New)
	if c.New == nil || p.old.version != c.Old || p.old.lacksAffinity || !after.keepsFrontends(before, c.Fields) {
		p.now = &service{protocol: protocol}
		before.addFrontends(p.old.protocol)
		after.addFrontends(protocol)
	}
	err := t.write(p.old, p.now, before, after, tx)
	t.before.become(nil)
	t.after.become(nil)
	if err == nil && tx.Limit != 0 && tx.Size() > tx.Limit {
		if size := tx.sizeFrom(p.mark); size > tx.Limit {
			err = fmt.Errorf("service does not fit into one transaction: %w: %d bytes, at most %d", ErrTooLarge, size, tx.Limit)
		}
	}
	if err != nil {
		t.drop(p, tx)
	}
	return p, err
}

// drop takes a plan back, and those after it.
func (t *Table) drop(p planned, tx *Tx) {
	tx.Truncate(p.mark)
	t.draft.drop(p.draft)
}

// write adds the difference between two versions of a Service to tx. now is old, or is to get the pools and
// numbers that after wants.
func (t *Table) write(old, now *service, before, after *wanted, tx *Tx) error {
	if now != old {
		if err := t.pools.allocate(old, now, after); err != nil {
			return err
		}
		t.chains.dispatch(before, old, tx)
		t.chains.dispatch(after, now, tx)
	}
	for _, target := range targets {
		was, is := old.pools[target], now.pools[target]
		t.pools.plan(was, is, before, after, target, tx)
		if err := t.chains.planSticky(was, is, after.pools[target].sticky, tx); err != nil {
			return err
		}
	}
	t.hairpin.plan(before.reachable, after.reachable, tx)
	t.frontends.plan(before, after, tx)
	return nil
}

// done records that the change of a Service is complete, and makes the draft final.
func (t *Table) done(p planned, tx *Tx) {
	t.draft.keep()
	t.affinity.clients(p.now, p.after, p.mark, tx)
	t.pools.free(p.old, p.now)
	for int(p.id) >= len(t.services) {
		t.services = append(t.services, nil)
	}
	t.services[p.id] = p.now
	if p.after == nil {
		t.services[p.id] = nil
	}
	t.affinity.note(p.id, p.old, p.now, p.after)
	p.now.version = p.after
}

// Limits returns the limits of one Service.
func Limits() ruleset.Limits {
	return ruleset.Limits{AffinityEndpoints: layout.MaxStickyEndpoints, WeightedEndpoints: maxNumberedEndpoints}
}
