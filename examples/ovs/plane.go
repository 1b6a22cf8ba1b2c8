package ovs

import (
	"iter"
	"maps"
	"net/netip"
	"reflect"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
)

// New returns a backend that programs a switch, which may have entries of an earlier process.
func New(sw *Switch) (*driver.Driver, error) {
	groups, err := driver.NewIDs[driver.Pool](1, 0xffffff00) // OFPG_MAX
	if err != nil {
		return nil, err
	}
	return driver.New(driver.Tables[struct{}, []Bucket, Flow]{
		Node: func(n *ruleset.Node) error {
			if reflect.DeepEqual(sw.Node.All()[struct{}{}], n) {
				return nil
			}
			return sw.Node.Set(struct{}{}, n)
		},
		Endpoints: table(&sw.Endpoints),
		Addresses: table(&sw.VIPs),
		Pools:     driver.Numbered(groups, table(&sw.Groups)),
		Frontends: table(&sw.Flows),
		Pool:      buckets,
		Frontend: func(s *ruleset.Port, f *ruleset.Frontend) Flow {
			flow := Flow{Frontend: *f, Affinity: s.Spec.Affinity}
			flow.Group, _ = groups.Lookup(driver.Pool{Service: s.Key, Target: f.Target})
			flow.Internal, _ = groups.Lookup(driver.Pool{Service: s.Key, Target: f.Internal})
			return flow
		},
		HasAddress: func(_ *ruleset.Port, f *ruleset.Frontend) bool { return f.Kind == ruleset.KindClusterIP },
		ByService:  true,
	})
}

// table returns the functions of a table of the switch.
func table[K comparable, V any](t *Table[K, V]) driver.Table[K, V] {
	return driver.Table[K, V]{
		Installed: func() (iter.Seq2[K, V], error) { return maps.All(t.All()), nil },
		Put:       t.Set,
		Delete:    t.Delete,
	}
}

func buckets(s *ruleset.Port, t ruleset.Target) (out []Bucket) {
	for _, ep := range s.Pool(t) {
		out = append(out, Bucket{driver.EndpointOf(s, ep), ep.Weight})
	}
	return out
}

// match returns what a flow matches, its key without the owner.
func match(addr netip.Addr, f driver.Frontend) driver.Frontend {
	return driver.Frontend{Addr: addr, Port: f.Port, Protocol: f.Protocol, Family: f.Family}
}
