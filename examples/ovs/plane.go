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
	ids, err := driver.NewIDs[driver.Pool](1, 0xffffff00) // OFPG_MAX
	if err != nil {
		return nil, err
	}
	endpoints, vips, flows := table(&sw.Endpoints), table(&sw.VIPs), table(&sw.Flows)
	flows.Place = driver.Frontend.Place
	groups := driver.Numbered(ids, table(&sw.Groups), func(g Group) driver.Pool { return g.Name })
	return driver.New(driver.Plane{
		Node: func(n *ruleset.Node) error {
			if reflect.DeepEqual(sw.Node.All()[struct{}{}], n) {
				return nil
			}
			return sw.Node.Set(struct{}{}, n)
		},
		Tables: []driver.Ordered{endpoints, vips, groups, flows},
		Want: func(s *ruleset.Port) error {
			numbers := map[ruleset.Target]uint32{}
			for name, eps := range driver.Pools(s) {
				if len(eps) == 0 {
					continue
				}
				g := Group{Name: name}
				for _, ep := range eps {
					endpoints.Want(driver.EndpointOf(s, ep), struct{}{})
					g.Buckets = append(g.Buckets, Bucket{driver.EndpointOf(s, ep), ep.Weight})
				}
				id, err := ids.Get(name)
				if err != nil {
					return err
				}
				numbers[name.Target] = id
				groups.Want(id, g)
			}
			for i := range s.Frontends {
				f := &s.Frontends[i]
				if f.Kind == ruleset.KindClusterIP {
					vips.Want(f.Addr, struct{}{})
				}
				at := driver.FrontendOf(s, f)
				at.Service = s.Key
				flows.Want(at, Flow{*f, numbers[f.Target], numbers[f.Internal], s.Spec.Affinity})
			}
			return nil
		},
	})
}

// table returns a driver's table of a table of the switch.
func table[K comparable, V any](t *Table[K, V]) *driver.Table[K, V] {
	return &driver.Table[K, V]{
		Installed: func(*ruleset.Delta) (iter.Seq2[K, V], error) { return maps.All(t.All()), nil },
		Put:       t.Set,
		Delete:    t.Delete,
	}
}
