package ovs

import (
	"iter"
	"maps"
	"reflect"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
)

// New returns a backend that programs a switch, which may have entries of an earlier process.
func New(sw *Switch) (*driver.Driver, error) {
	endpoints, vips, flows := table(&sw.Endpoints), table(&sw.VIPs), table(&sw.Flows)
	flows.Place = driver.Frontend.Place
	groups := &driver.Numbered[driver.Pool, Group]{
		Table: table(&sw.Groups), Low: 1, High: 0xffffff00, // OFPG_MAX
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
func table[K comparable, V any](t *Table[K, V]) driver.Table[K, V] {
	return driver.Table[K, V]{
		Installed: func(*ruleset.Delta) (iter.Seq2[K, V], error) { return maps.All(t.All()), nil },
		Put:       t.Set,
		Delete:    t.Delete,
	}
}
