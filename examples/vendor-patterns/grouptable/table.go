// Package grouptable is a backend for a switch with a group table, as OpenFlow
// has: a group is a list of buckets, each of which sends to an endpoint by a flow
// that is installed once, however many groups use it. The flow of an endpoint must
// be there before the first group that sends to it, and may go only after the last.
//
// A [Ledger] counts. What fails fails for one Service and is tried again with it;
// an endpoint that could not be installed for one Service is tried for the next
// that needs it. A full delta of which something fails is wanted again as a whole,
// because only then what is not called for can be told for certain.
package grouptable

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Endpoint is what a bucket sends to.
type Endpoint struct {
	Addr  netip.AddrPort
	Proto v1.Protocol
}

// Group names a group: one of the pools of a Service port.
type Group struct {
	Service tracker.Key
	Pool    ruleset.Target
}

// Switch is the data plane. What is installed again is replaced, and to remove
// what is not there is no error.
type Switch interface {
	InstallEndpoint(Endpoint) error
	RemoveEndpoint(Endpoint) error
	InstallGroup(Group, []Endpoint) error
	RemoveGroup(Group) error
	// Endpoints and Groups return all that are installed, also by an earlier
	// process.
	Endpoints() ([]Endpoint, error)
	Groups() ([]Group, error)
}

// Table is the backend. It deals with groups and endpoints alone: see package
// mapplane for frontends.
type Table struct {
	Switch Switch
	// EmptyGroups installs a group without buckets for a pool that exists and is
	// empty: there are endpoints, but none that this node may use, or none at all. A
	// switch whose flows always name a group needs this. Otherwise such a pool has no
	// group, as one that does not exist never has.
	EmptyGroups bool
	ledger      Ledger[tracker.Key, Endpoint]
	// missing is the endpoints that are used but could not be installed.
	missing map[Endpoint]bool
	// settled: no group is left of an earlier process. Until then endpoints stay:
	// one might send to them.
	settled bool
}

var pools = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// Apply installs what a delta has. It fails for single Services, unless the delta
// is full.
func (t *Table) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	failed := map[tracker.Key]error{}
	for i := range d.Changes {
		c := &d.Changes[i]
		if err := t.service(c, d.Full); err != nil {
			failed[c.Key] = err
		}
	}
	if d.Full {
		if len(failed) != 0 {
			return errors.Join(slices.Collect(maps.Values(failed))...)
		}
		err := t.prune(d)
		t.settled = t.settled || err == nil
		return err
	}
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// service does all there is to do for one Service: in this order, as groups are
// nobody's but its own.
func (t *Table) service(c *ruleset.Change, full bool) error {
	wanted := map[Endpoint]bool{}
	if c.New != nil {
		for _, ep := range c.New.Selection.Reachable {
			e := Endpoint{ep.Addr, c.Key.Protocol}
			wanted[e] = true
			if !t.ledger.Claim(c.Key, e) && !t.missing[e] && !full {
				continue
			}
			if err := t.Switch.InstallEndpoint(e); err != nil {
				t.miss(e)
				return err
			}
			delete(t.missing, e)
		}
	}
	for _, p := range pools {
		g := Group{c.Key, p}
		if !t.wants(c.New, p) {
			if err := t.Switch.RemoveGroup(g); err != nil {
				return err
			}
			continue
		}
		var buckets []Endpoint
		for _, ep := range c.New.Pool(p) {
			buckets = append(buckets, Endpoint{ep.Addr, c.Key.Protocol})
		}
		if err := t.Switch.InstallGroup(g, buckets); err != nil {
			return err
		}
	}
	// Its groups do not need these any more.
	for e := range t.ledger.Items(c.Key) {
		if wanted[e] || !t.ledger.Release(c.Key, e) || !t.settled {
			continue
		}
		if err := t.Switch.RemoveEndpoint(e); err != nil {
			t.ledger.Claim(c.Key, e) // to be tried again
			return err
		}
		delete(t.missing, e)
	}
	return nil
}

// wants reports whether there must be a group for a pool of s, which may be nil.
func (t *Table) wants(s *ruleset.Service, p ruleset.Target) bool {
	switch {
	case s == nil:
		return false
	case !t.EmptyGroups:
		return len(s.Pool(p)) != 0
	case p == ruleset.ToLocal:
		return s.Selection.UsesLocal
	default:
		return s.Selection.UsesCluster
	}
}

func (t *Table) miss(e Endpoint) {
	if t.missing == nil {
		t.missing = map[Endpoint]bool{}
	}
	t.missing[e] = true
}

// prune removes what a full delta does not call for, groups first.
func (t *Table) prune(d *ruleset.Delta) error {
	wanted := map[Group]bool{}
	for i := range d.Changes {
		if s := d.Changes[i].New; s != nil {
			for _, p := range pools {
				wanted[Group{s.Key, p}] = t.wants(s, p)
			}
		}
	}
	groups, err := t.Switch.Groups()
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range groups {
		if !wanted[g] {
			errs = append(errs, t.Switch.RemoveGroup(g))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err // a group that is left may need its endpoints
	}
	endpoints, err := t.Switch.Endpoints()
	if err != nil {
		return err
	}
	for _, e := range endpoints {
		if !t.ledger.Used(e) {
			errs = append(errs, t.Switch.RemoveEndpoint(e))
		}
	}
	return errors.Join(errs...)
}
