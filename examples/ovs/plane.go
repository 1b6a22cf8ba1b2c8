package ovs

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"reflect"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
)

// Plane is a [ruleset.Backend] that programs a [Switch]. [New] makes one.
type Plane struct {
	sw     *Switch
	driver *driver.Driver[[]Bucket, Flow]
	groups *driver.IDs[driver.Pool]
	// spare holds the second groups of a name, found by the last full delta.
	spare []uint32
}

// New returns a Plane for a switch, which may have entries of an earlier process.
func New(sw *Switch) (*Plane, error) {
	p := &Plane{sw: sw}
	var err error
	p.driver, err = driver.New(driver.Plane[[]Bucket, Flow]{
		Node:      p.setNode,
		Endpoints: set(&sw.Endpoints),
		Addresses: set(&sw.VIPs),
		Pools:     driver.Table[driver.Pool, []Bucket]{Installed: p.adoptGroups, Put: p.putGroup, Delete: p.deleteGroup},
		Frontends: driver.Table[driver.Frontend, Flow]{
			Installed: func() (iter.Seq2[driver.Frontend, Flow], error) { return maps.All(sw.Flows.All()), nil },
			Put:       sw.Flows.Set,
			Delete:    sw.Flows.Delete,
		},
		Pool:       buckets,
		Frontend:   p.flow,
		HasAddress: func(f *ruleset.Frontend) bool { return f.Kind == ruleset.KindClusterIP },
		ByService:  true,
	})
	return p, err
}

// Apply applies a delta. A failed write fails the Service alone.
func (p *Plane) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := p.driver.Apply(ctx, d); err != nil {
		return err
	}
	for _, id := range p.spare {
		if err := p.sw.Groups.Delete(id); err != nil {
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err) // the driver takes the delta for acknowledged
		}
		p.groups.Unreserve(id)
	}
	p.spare = nil
	return nil
}

// set returns the functions of a table without values.
func set[K comparable](t *Table[K, struct{}]) driver.Table[K, struct{}] {
	return driver.Table[K, struct{}]{
		Installed: func() (iter.Seq2[K, struct{}], error) { return maps.All(t.All()), nil },
		Put:       t.Set,
		Delete:    t.Delete,
	}
}

func (p *Plane) setNode(n *ruleset.Node) error {
	if reflect.DeepEqual(p.sw.Node.All()[struct{}{}], n) {
		return nil
	}
	return p.sw.Node.Set(struct{}{}, n)
}

// adoptGroups takes over the numbers of the switch's groups.
func (p *Plane) adoptGroups() (_ iter.Seq2[driver.Pool, []Bucket], err error) {
	if p.groups, err = driver.NewIDs[driver.Pool](1, 0xffffff00); err != nil { // OFPG_MAX
		return nil, err
	}
	p.spare = nil
	found := map[driver.Pool][]Bucket{}
	for id, g := range p.sw.Groups.All() {
		if p.groups.Adopt(g.Name, id) != nil {
			p.groups.Reserve(id)
			p.spare = append(p.spare, id)
			continue
		}
		found[g.Name] = g.Buckets
	}
	return maps.All(found), nil
}

func (p *Plane) putGroup(name driver.Pool, b []Bucket) error {
	id, err := p.groups.Get(name)
	if err != nil {
		return err
	}
	return p.sw.Groups.Set(id, Group{name, b})
}

func (p *Plane) deleteGroup(name driver.Pool) error {
	id, ok := p.groups.Lookup(name)
	if !ok {
		return nil
	}
	if err := p.sw.Groups.Delete(id); err != nil {
		return err
	}
	p.groups.Release(name)
	return nil
}

func buckets(s *ruleset.Service, t ruleset.Target) (out []Bucket) {
	for _, ep := range s.Pool(t) {
		out = append(out, Bucket{driver.EndpointOf(s, ep), ep.Weight})
	}
	return out
}

func (p *Plane) flow(s *ruleset.Service, f *ruleset.Frontend) Flow {
	flow := Flow{Frontend: *f, Affinity: s.Port.Affinity}
	flow.Group, _ = p.groups.Lookup(driver.Pool{Service: s.Key, Target: f.Target})
	flow.Internal, _ = p.groups.Lookup(driver.Pool{Service: s.Key, Target: f.Internal})
	return flow
}

// match returns what a flow matches, its key without the owner.
func match(addr netip.Addr, f driver.Frontend) driver.Frontend {
	return driver.Frontend{Addr: addr, Port: f.Port, Protocol: f.Protocol, Family: f.Family}
}
