package ovs

import (
	"iter"
	"maps"
	"net/netip"
	"reflect"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
)

// Flow is the treatment of packets to a frontend.
type Flow struct {
	Frontend ruleset.Frontend
	// Group and Internal are the groups of the frontend's Target and Internal, or 0.
	Group, Internal uint32
	Affinity        time.Duration
}

// Group is a set of buckets, with the name of the pool that it is for.
type Group struct {
	Name    driver.Pool
	Buckets []Bucket
}

// Bucket sends packets to an endpoint through the endpoint's own flow.
type Bucket struct {
	Endpoint driver.Endpoint
	Weight   uint16
}

// Switch is the tables of a switch.
type Switch struct {
	// Node holds the node's addresses and ranges, and VIPs the cluster IPs. Their ports without a flow refuse connections.
	Node Table[struct{}, *ruleset.Node]
	VIPs Table[netip.Addr, struct{}]
	// Flows holds a flow for each frontend and Service. If several match a packet, the last
	// written one counts.
	Flows     Table[driver.Frontend, Flow]
	Groups    Table[uint32, Group]
	Endpoints Table[driver.Endpoint, struct{}]
}

// Table is one of the switch's tables.
type Table[K comparable, V any] interface {
	// Set adds or replaces an entry.
	Set(K, V) error
	// Delete removes an entry. Deleting a missing entry is not an error.
	Delete(K) error
	// All returns a copy of the table.
	All() map[K]V
}

// New returns a backend that programs a switch, which may have entries of an earlier process.
func New(sw *Switch) (*driver.Driver, error) {
	endpoints, vips, flows := table(sw.Endpoints), table(sw.VIPs), table(sw.Flows)
	flows.Place = driver.Frontend.Place
	groups := &driver.Numbered[driver.Pool, Group]{
		Table: table(sw.Groups), Low: 1, High: 0xffffff00, // OFPG_MAX
		Name: func(g Group) driver.Pool { return g.Name },
	}
	return driver.New(driver.Plane{
		Node: func(n *ruleset.Node) error {
			if reflect.DeepEqual(sw.Node.All()[struct{}{}], n) {
				return nil
			}
			return sw.Node.Set(struct{}{}, n)
		},
		Tables: []driver.Ordered{&endpoints, &vips, groups, &flows},
		Want: func(s *ruleset.Port) {
			numbers := map[ruleset.Target]uint32{}
			for name, eps := range driver.Pools(s, false) {
				g := Group{Name: name}
				for _, ep := range eps {
					endpoints.Want(driver.EndpointOf(s, ep), struct{}{})
					g.Buckets = append(g.Buckets, Bucket{driver.EndpointOf(s, ep), ep.Weight})
				}
				numbers[name.Target] = groups.Want(g)
			}
			for at, f := range driver.Frontends(s) {
				if at.Service = s.Key; f.Kind == ruleset.KindClusterIP {
					vips.Want(f.Addr, struct{}{})
				}
				flows.Want(at, Flow{*f, numbers[f.Target], numbers[f.Internal], s.Spec.Affinity})
			}
		},
	})
}

// table returns a driver's table of a table of the switch.
func table[K comparable, V any](t Table[K, V]) driver.Table[K, V] {
	return driver.Table[K, V]{
		Installed: func(*ruleset.Delta) (iter.Seq2[K, V], error) { return maps.All(t.All()), nil },
		Put:       t.Set,
		Delete:    t.Delete,
	}
}
