// Package grouptable is a backend for a switch with a group table, as in OpenFlow. A group
// is a list of buckets, and each bucket sends packets to an endpoint through the endpoint's
// flow. It shows endpoints that several Services share, and groups that exist although they
// are empty. Package ruleset/driver installs an endpoint once, before the first group that
// uses it, and removes it after the last one.
//
// [driver.Numbered] numbers the groups. A new process adopts the switch's state, so groups
// and endpoints of an earlier process stay, with their IDs.
package grouptable

import (
	"iter"
	"maps"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
)

// Switch is the data plane. It identifies a group by an ID, and stores the group's name.
// Installing replaces an existing endpoint or group. Removing a missing one is not an error.
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

// maxGroup is the highest ID of a group (OFPG_MAX of the OpenFlow specification).
const maxGroup = 0xffffff00

// groupEntry is a group's name and its buckets.
type groupEntry struct {
	name    driver.Pool
	buckets []driver.Endpoint
}

// New returns a [ruleset.Backend] for groups and endpoints. See package mapplane for frontends.
// emptyGroups installs a group without buckets for an existing empty pool: the Service has no
// endpoints that this node may use. A switch whose flows always name a group needs this. A pool
// that does not exist never has a group.
func New(sw Switch, emptyGroups bool) (*driver.Driver, error) {
	endpoints := &driver.Table[driver.Endpoint, struct{}]{
		Installed: func(*ruleset.Delta) (iter.Seq2[driver.Endpoint, struct{}], error) {
			all, err := sw.Endpoints()
			found := make(map[driver.Endpoint]struct{}, len(all))
			for _, ep := range all {
				found[ep] = struct{}{}
			}
			return maps.All(found), err
		},
		Put:    func(e driver.Endpoint, _ struct{}) error { return sw.InstallEndpoint(e) },
		Delete: sw.RemoveEndpoint,
	}
	groups := &driver.Numbered[driver.Pool, groupEntry]{Low: 1, High: maxGroup, Name: func(g groupEntry) driver.Pool { return g.name }}
	groups.Table = driver.Table[uint32, groupEntry]{
		Installed: func(*ruleset.Delta) (iter.Seq2[uint32, groupEntry], error) {
			names, err := sw.Groups()
			found := make(map[uint32]groupEntry, len(names))
			for id, name := range names {
				// The switch does not return the buckets. Groups with endpoints are installed again.
				found[id] = groupEntry{name, []driver.Endpoint{{}}}
			}
			return maps.All(found), err
		},
		Put:    func(id uint32, g groupEntry) error { return sw.InstallGroup(id, g.name, g.buckets) },
		Delete: sw.RemoveGroup,
	}
	return driver.New(driver.Plane{
		Tables: []driver.Ordered{endpoints, groups},
		Want: func(s *ruleset.Port) {
			for name, eps := range driver.Pools(s, emptyGroups) {
				g := groupEntry{name: name}
				for _, ep := range eps {
					endpoints.Want(driver.EndpointOf(s, ep), struct{}{})
					g.buckets = append(g.buckets, driver.EndpointOf(s, ep))
				}
				groups.Want(g)
			}
		},
	})
}
