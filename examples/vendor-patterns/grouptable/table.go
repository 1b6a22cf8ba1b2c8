// Package grouptable is a backend for a switch with a group table, as in OpenFlow. A group
// is a list of buckets, and each bucket sends packets to an endpoint through the endpoint's
// flow. It shows endpoints that several Services share, and groups that exist although they
// are empty. Package ruleset/driver installs an endpoint once, before the first group that
// uses it, and removes it after the last one.
//
// An [driver.IDs] numbers the groups. A new process adopts the switch's state, so groups
// and endpoints of an earlier process stay, with their IDs.
package grouptable

import (
	"context"
	"fmt"
	"iter"
	"maps"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
)

// Switch is the data plane. It identifies a group by an ID, and stores the group's name.
// Installing replaces an existing endpoint or group. Removing a missing one is no error.
type Switch interface {
	InstallEndpoint(driver.Endpoint) error
	RemoveEndpoint(driver.Endpoint) error
	InstallGroup(id uint32, name driver.Pool, buckets []driver.Endpoint) error
	RemoveGroup(id uint32) error
	// Endpoints and Groups return everything that is installed, including what an earlier
	// process installed.
	Endpoints() ([]driver.Endpoint, error)
	Groups() (map[uint32]driver.Pool, error)
}

// Table is a [ruleset.Backend] for groups and endpoints. See package mapplane for
// frontends. [New] makes one.
type Table struct {
	sw     Switch
	driver *driver.Driver[[]driver.Endpoint, struct{}]
	ids    *driver.IDs[driver.Pool]
	// spare holds the second groups of a name, found by the last full delta.
	spare []uint32
}

// maxGroup is the highest ID of a group (OFPG_MAX of the OpenFlow specification).
const maxGroup = 0xffffff00

// New returns a Table. emptyGroups installs a group without buckets for an existing empty
// pool: the Service has no endpoints that this node may use. A switch whose flows always name
// a group needs this. A pool that does not exist never has a group.
func New(sw Switch, emptyGroups bool) (*Table, error) {
	t := &Table{sw: sw}
	var err error
	t.driver, err = driver.New(driver.Plane[[]driver.Endpoint, struct{}]{
		Endpoints: driver.Table[driver.Endpoint, struct{}]{
			Installed: t.endpoints,
			Put:       func(e driver.Endpoint, _ struct{}) error { return sw.InstallEndpoint(e) },
			Delete:    sw.RemoveEndpoint,
		},
		Pools:      driver.Table[driver.Pool, []driver.Endpoint]{Installed: t.adopt, Put: t.put, Delete: t.delete},
		Pool:       buckets,
		EmptyPools: emptyGroups,
	})
	return t, err
}

// Apply applies a delta. A failure affects one Service.
func (t *Table) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := t.driver.Apply(ctx, d); err != nil {
		return err
	}
	for _, id := range t.spare {
		if err := t.sw.RemoveGroup(id); err != nil {
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err) // the driver takes the delta for acknowledged
		}
		t.ids.Unreserve(id)
	}
	t.spare = nil
	return nil
}

func (t *Table) endpoints() (iter.Seq2[driver.Endpoint, struct{}], error) {
	all, err := t.sw.Endpoints()
	return func(yield func(driver.Endpoint, struct{}) bool) {
		for _, e := range all {
			if !yield(e, struct{}{}) {
				return
			}
		}
	}, err
}

// adopt takes over the IDs of the switch's groups. The switch does not return the buckets, so
// groups with endpoints are installed again.
func (t *Table) adopt() (iter.Seq2[driver.Pool, []driver.Endpoint], error) {
	groups, err := t.sw.Groups()
	if err != nil {
		return nil, err
	}
	if t.ids, err = driver.NewIDs[driver.Pool](1, maxGroup); err != nil {
		return nil, err
	}
	t.spare = nil
	found := map[driver.Pool][]driver.Endpoint{}
	for id, g := range groups {
		if t.ids.Adopt(g, id) != nil { // a second group of this name
			t.ids.Reserve(id)
			t.spare = append(t.spare, id)
			continue
		}
		found[g] = []driver.Endpoint{{}} // unknown
	}
	return maps.All(found), nil
}

func (t *Table) put(g driver.Pool, b []driver.Endpoint) error {
	id, err := t.ids.Get(g)
	if err != nil {
		return fmt.Errorf("cannot allocate a group for %s: %w", g.Target, err)
	}
	return t.sw.InstallGroup(id, g, b)
}

func (t *Table) delete(g driver.Pool) error {
	id, ok := t.ids.Lookup(g)
	if !ok {
		return nil
	}
	if err := t.sw.RemoveGroup(id); err != nil {
		return err
	}
	t.ids.Release(g)
	return nil
}

func buckets(s *ruleset.Service, t ruleset.Target) (out []driver.Endpoint) {
	for _, ep := range s.Pool(t) {
		out = append(out, driver.EndpointOf(s, ep))
	}
	return out
}
