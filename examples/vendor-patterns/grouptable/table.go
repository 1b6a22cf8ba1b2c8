// Package grouptable is a backend for a switch with a group table, as OpenFlow
// has: a group is a list of buckets, each of which sends to an endpoint by a flow
// that is installed once, however many groups use it. The flow of an endpoint must
// be there before the first group that sends to it, and may go only after the last.
//
// A [ledger.Ledger] counts who uses an endpoint, and [ids.Allocator] numbers the groups.
// What fails fails for one Service and is tried again with it; an endpoint that could
// not be installed for one Service is tried for the next that needs it. A full delta
// first takes what the switch has, so that groups and endpoints of an earlier process
// keep their IDs and stay. If something of it fails, it is wanted again as a whole,
// because only then what is not called for can be told for certain.
package grouptable

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/ids"
	"github.com/go-proxier/proxier/ruleset/ledger"
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

// Switch is the data plane. It identifies a group by an ID, and stores its name beside it.
// What is installed again is replaced, and to remove what is not there is no error.
type Switch interface {
	InstallEndpoint(Endpoint) error
	RemoveEndpoint(Endpoint) error
	InstallGroup(id uint32, name Group, buckets []Endpoint) error
	RemoveGroup(id uint32) error
	// Endpoints and Groups return all that are installed, also by an earlier
	// process.
	Endpoints() ([]Endpoint, error)
	Groups() (map[uint32]Group, error)
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

	ledger *ledger.Ledger[tracker.Key, Endpoint]
	ids    *ids.Allocator[Group]
}

var pools = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// maxGroup is the highest ID of a group (OFPG_MAX of the OpenFlow specification).
const maxGroup = 0xffffff00

// Apply installs what a delta has. It fails for single Services, unless the delta
// is full.
func (t *Table) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var found map[uint32]Group
	if d.Full {
		var err error
		if found, err = t.adopt(); err != nil {
			return err
		}
	}
	failed := map[tracker.Key]error{}
	for i := range d.Changes {
		c := &d.Changes[i]
		if err := t.service(c); err != nil {
			failed[c.Key] = err
		}
	}
	if d.Full {
		if len(failed) != 0 {
			return errors.Join(slices.Collect(maps.Values(failed))...)
		}
		return t.prune(d, found)
	}
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// adopt takes over what the switch has, and returns its groups.
func (t *Table) adopt() (map[uint32]Group, error) {
	endpoints, err := t.Switch.Endpoints()
	if err != nil {
		return nil, err
	}
	groups, err := t.Switch.Groups()
	if err != nil {
		return nil, err
	}
	t.ledger = &ledger.Ledger[tracker.Key, Endpoint]{}
	for _, e := range endpoints {
		t.ledger.Installed(e)
	}
	if t.ids, err = ids.New[Group](1, maxGroup); err != nil {
		return nil, err
	}
	for id, g := range groups {
		if t.ids.Adopt(g, id) != nil { // a second one of this name
			t.ids.Reserve(id)
		}
	}
	return groups, nil
}

// service does all there is to do for one Service: in this order, as groups are
// nobody's but its own.
func (t *Table) service(c *ruleset.Change) error {
	wanted := map[Endpoint]bool{}
	if c.New != nil {
		for _, ep := range c.New.Selection.Reachable {
			e := Endpoint{ep.Addr, c.Key.Protocol}
			wanted[e] = true
			if !t.ledger.Claim(c.Key, e) {
				continue
			}
			if err := t.Switch.InstallEndpoint(e); err != nil {
				return err
			}
			t.ledger.Installed(e)
		}
	}
	for _, p := range pools {
		g := Group{c.Key, p}
		if !t.wants(c.New, p) {
			id, ok := t.ids.Lookup(g)
			if !ok {
				continue
			}
			if err := t.Switch.RemoveGroup(id); err != nil {
				return err
			}
			t.ids.Release(g)
			continue
		}
		id, err := t.ids.Get(g)
		if err != nil {
			return fmt.Errorf("group for %s: %w", p, err)
		}
		var buckets []Endpoint
		for _, ep := range c.New.Pool(p) {
			buckets = append(buckets, Endpoint{ep.Addr, c.Key.Protocol})
		}
		if err := t.Switch.InstallGroup(id, g, buckets); err != nil {
			return err
		}
	}
	// Its groups do not need these any more.
	for e := range t.ledger.Items(c.Key) {
		if wanted[e] || !t.ledger.Release(c.Key, e) {
			continue
		}
		if err := t.Switch.RemoveEndpoint(e); err != nil {
			t.ledger.Claim(c.Key, e) // to be tried again
			return err
		}
		t.ledger.Removed(e)
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

// prune removes what a full delta does not call for of the groups that were found, and
// then the endpoints that no Service uses.
func (t *Table) prune(d *ruleset.Delta, found map[uint32]Group) error {
	wanted := map[Group]bool{}
	for i := range d.Changes {
		if s := d.Changes[i].New; s != nil {
			for _, p := range pools {
				wanted[Group{s.Key, p}] = t.wants(s, p)
			}
		}
	}
	var errs []error
	for id, name := range found {
		if g, ok := t.ids.Key(id); ok && wanted[g] {
			continue // perhaps another than was found: the ID was free again
		}
		if err := t.Switch.RemoveGroup(id); err != nil {
			errs = append(errs, err)
			continue
		}
		if has, ok := t.ids.Lookup(name); ok && has == id {
			t.ids.Release(name)
		}
		t.ids.Unreserve(id)
	}
	if err := errors.Join(errs...); err != nil {
		return err // a group that is left may need its endpoints
	}
	for e := range t.ledger.Unused() {
		if err := t.Switch.RemoveEndpoint(e); err != nil {
			errs = append(errs, err)
			continue
		}
		t.ledger.Removed(e)
	}
	return errors.Join(errs...)
}
