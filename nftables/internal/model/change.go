package model

import (
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// service is a Service as programmed: its version and the numbers that departments gave it.
type service struct {
	version  *ruleset.Port
	pools    [ruleset.TargetLocal + 1]*pool // by target
	protocol uint8
	// lacksPool is set if there is no number for one of its pools.
	lacksPool bool
	// lacksAffinity is set if the Service is programmed without client affinity that it asks
	// for.
	lacksAffinity bool
}

func (t *Table) service(id uint32) *service {
	if int(id) < len(t.services) {
		return t.services[id]
	}
	return nil
}

// Change replaces the Service of c and adds the difference to tx. It returns [ErrTooManyPools] if connections to
// some of the Service's frontends are rejected, because there is no number for a pool. After any other error the
// table must be discarded.
func (t *Table) Change(c *ruleset.Change, tx *Tx) error {
	id, mark := c.ID(), tx.Mark()
	old := t.service(id)
	if old == nil {
		old = &service{}
	}
	if old.version == nil && c.New == nil {
		return nil
	}
	now := old
	before, after := t.before.setVersion(old.version), t.after.setVersion(c.New)
	if c.New == nil || old.version != c.Old || old.lacksPool || old.lacksAffinity || !after.keepsFrontends(before, c.Fields) {
		now = &service{protocol: inet.Protocol(c.Key.Protocol)}
		before.addFrontends(old.protocol)
		after.addFrontends(now.protocol)
	}
	err := t.write(old, now, before, after, tx)
	t.before.setVersion(nil)
	t.after.setVersion(nil)
	if err != nil {
		return err
	}
	t.Affinity.recallClients(now, c.New, mark, tx)
	t.Affinity.recordLacking(id, old, now, c.New)
	t.Pools.releasePools(old, now)
	for int(id) >= len(t.services) {
		t.services = append(t.services, nil)
	}
	now.version = c.New
	if t.services[id] = now; c.New == nil {
		t.services[id] = nil
	}
	if now.lacksPool {
		return ErrTooManyPools
	}
	return nil
}

// write adds the difference between two versions of a Service to tx. now is old, or is to get the pools and
// numbers that after wants.
func (t *Table) write(old, now *service, before, after *wanted, tx *Tx) error {
	if now != old {
		t.Pools.allocatePools(old, now, after)
		t.Chains.dispatch(before, old, tx)
		t.Chains.dispatch(after, now, tx)
	}
	for _, target := range targets {
		was, is := old.pools[target], now.pools[target]
		t.Pools.planPool(was, is, before, after, target, tx)
		if err := t.Chains.planSticky(was, is, after.pools[target].sticky, tx); err != nil {
			return err
		}
	}
	t.Hairpin.planHairpin(before.reachable, after.reachable, tx)
	t.Frontends.planElements(before, after, tx)
	return nil
}

// Limits returns the limits of one Service.
func Limits() ruleset.Limits {
	return ruleset.Limits{Endpoints: layout.MaxPool, AffinityEndpoints: layout.MaxStickyEndpoints, WeightedEndpoints: maxNumberedEndpoints}
}
