// Package grouptable is a backend for a switch with a group table, as in OpenFlow. A group
// is a list of buckets, and each bucket sends packets to an endpoint through the endpoint's
// flow. The flow is installed once, whatever the number of groups that use it: before the
// first of these groups, and it is removed after the last one.
//
// A [ledger.Ledger] counts the users of an endpoint, and an [ids.Allocator] numbers the
// groups. A failure affects one Service, which is retried. An endpoint that could not be
// installed for one Service is tried again for the next Service that needs it. A full delta
// first adopts the switch's state, so groups and endpoints of an earlier process stay, with
// their IDs. If a part of a full delta fails, the backend requests a full delta again,
// because only a complete one shows which groups and endpoints are no longer needed.
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

// Endpoint is the destination of a bucket.
type Endpoint struct {
	Addr  netip.AddrPort
	Proto v1.Protocol
}

// Group identifies a group, which stands for a pool of a Service port.
type Group struct {
	Service tracker.Key
	Pool    ruleset.Target
}

// Switch is the data plane. It identifies a group by an ID, and stores the group's name.
// Installing replaces an existing endpoint or group. Removing a missing one is no error.
type Switch interface {
	InstallEndpoint(Endpoint) error
	RemoveEndpoint(Endpoint) error
	InstallGroup(id uint32, name Group, buckets []Endpoint) error
	RemoveGroup(id uint32) error
	// Endpoints and Groups return everything that is installed, including what an earlier
	// process installed.
	Endpoints() ([]Endpoint, error)
	Groups() (map[uint32]Group, error)
}

// Table is a [ruleset.Backend] for groups and endpoints. See package mapplane for
// frontends.
type Table struct {
	Switch Switch
	// EmptyGroups installs a group without buckets for an existing empty pool: the Service
	// has no endpoints that this node may use. A switch whose flows always name a group
	// needs this. If EmptyGroups is false, an empty pool has no group. A pool that does not
	// exist never has one.
	EmptyGroups bool

	ledger *ledger.Ledger[tracker.Key, Endpoint]
	ids    *ids.Allocator[Group]
}

var pools = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// maxGroup is the highest ID of a group (OFPG_MAX of the OpenFlow specification).
const maxGroup = 0xffffff00

// Apply applies a delta. A failure affects one Service, or a full delta as a whole.
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

// adopt takes over the switch's state and returns its groups.
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
		if t.ids.Adopt(g, id) != nil { // a second group of this name
			t.ids.Reserve(id)
		}
	}
	return groups, nil
}

// service applies the change of one Service. Services do not share groups, so each can be
// finished before the next.
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
			return fmt.Errorf("cannot allocate a group for %s: %w", p, err)
		}
		var buckets []Endpoint
		for _, ep := range c.New.Pool(p) {
			buckets = append(buckets, Endpoint{ep.Addr, c.Key.Protocol})
		}
		if err := t.Switch.InstallGroup(id, g, buckets); err != nil {
			return err
		}
	}
	// Remove the endpoints that its groups no longer use.
	for e := range t.ledger.Items(c.Key) {
		if wanted[e] || !t.ledger.Release(c.Key, e) {
			continue
		}
		if err := t.Switch.RemoveEndpoint(e); err != nil {
			t.ledger.Claim(c.Key, e) // the retry removes it
			return err
		}
		t.ledger.Removed(e)
	}
	return nil
}

// wants reports whether a pool of s must have a group. s may be nil.
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

// prune removes the found groups that are not in a full delta, and then the endpoints that
// no Service uses.
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
			continue // a group in use, possibly a new one with a freed ID
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
		return err // a remaining group may need its endpoints
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
