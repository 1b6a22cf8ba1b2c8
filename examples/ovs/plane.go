package ovs

import (
	"context"
	"errors"
	"iter"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/ids"
	"github.com/go-proxier/proxier/ruleset/ledger"
	"github.com/go-proxier/proxier/tracker"
)

// Plane is a [ruleset.Backend] that programs a [Switch].
type Plane struct {
	Switch    *Switch
	groups    *ids.Allocator[GroupName]
	endpoints *shared[Endpoint]
	vips      *shared[netip.Addr]
}

// found is the switch's state before a full delta. Its maps are empty otherwise.
type found struct {
	flows  map[FlowKey]Flow
	groups map[uint32]Group
}

var pools = map[ruleset.Target]ruleset.Field{ruleset.ToCluster: ruleset.FieldCluster, ruleset.ToLocal: ruleset.FieldLocal}

// Apply writes a delta by the numbered steps of package ruleset. A failed write fails the
// Service alone, or a full delta as a whole.
func (p *Plane) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var was found
	if d.Full { // step 1
		var err error
		if was, err = p.adopt(); err != nil {
			return err
		}
	}
	if node := p.Switch.Node.All()[struct{}{}]; node != d.Node && !reflect.DeepEqual(node, d.Node) { // step 2
		if err := p.Switch.Node.Set(struct{}{}, d.Node); err != nil {
			return err
		}
	}
	failed := map[tracker.Key]error{}
	step := func(f func(c *ruleset.Change) error) {
		for i := range d.Changes {
			c := &d.Changes[i]
			if failed[c.Key] == nil {
				if err := f(c); err != nil {
					failed[c.Key] = err
				}
			}
		}
	}
	step(func(c *ruleset.Change) error { // step 3
		for f := range c.GoneFrontends() {
			if err := p.Switch.Flows.Delete(flowKey(c.Key, &f)); err != nil {
				return err
			}
		}
		return nil
	})
	step(func(c *ruleset.Change) error { return p.fill(c, d.Full, was.groups) })  // step 4
	step(func(c *ruleset.Change) error { return p.expose(c, d.Full, was.flows) }) // step 5
	if d.Full {
		if len(failed) != 0 {
			return errors.Join(slices.Collect(maps.Values(failed))...)
		}
		if err := p.pruneFlows(d, was.flows); err != nil {
			return err
		}
	}
	step(func(c *ruleset.Change) error { // steps 6 and 7
		for _, to := range c.LostFrontends() {
			if failed[to] != nil {
				return nil
			}
		}
		for f := range c.LostFrontends() {
			if err := p.Switch.Flows.Delete(flowKey(c.Key, &f)); err != nil {
				return err
			}
		}
		return p.trim(c, d.Full)
	})
	switch {
	case d.Full:
		return errors.Join(append(slices.Collect(maps.Values(failed)), p.prune(d, was.groups))...)
	case len(failed) != 0:
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// adopt reads the switch's state and takes it over.
func (p *Plane) adopt() (was found, err error) {
	was = found{p.Switch.Flows.All(), p.Switch.Groups.All()}
	p.endpoints, p.vips = newShared(&p.Switch.Endpoints), newShared(&p.Switch.VIPs)
	if p.groups, err = ids.New[GroupName](1, 0xffffff00); err != nil { // OFPG_MAX
		return was, err
	}
	for id, g := range was.groups {
		if p.groups.Adopt(g.Name, id) != nil {
			p.groups.Reserve(id) // a second group of this name, until it is pruned
		}
	}
	return was, nil
}

// fill writes the groups and endpoints of a Service.
func (p *Plane) fill(c *ruleset.Change, full bool, was map[uint32]Group) error {
	if c.New == nil {
		return nil
	}
	upserted := c.Upserted()
	if full {
		upserted = slices.Values(c.New.Selection.Reachable)
	}
	for ep := range upserted {
		if err := p.endpoints.claim(c.Key, Endpoint{ep.Addr, c.Key.Protocol}); err != nil {
			return err
		}
	}
	for a := range clusterIPs(c.New) {
		if err := p.vips.claim(c.Key, a); err != nil {
			return err
		}
	}
	for t, bit := range pools {
		if len(c.New.Pool(t)) == 0 || c.What&bit == 0 && !full {
			continue
		}
		g := Group{Name: GroupName{c.Key, t}}
		id, err := p.groups.Get(g.Name)
		if err != nil {
			return err
		}
		for _, ep := range c.New.Pool(t) {
			g.Buckets = append(g.Buckets, Bucket{Endpoint{ep.Addr, c.Key.Protocol}, ep.Weight})
		}
		if old, ok := was[id]; ok && old.Name == g.Name && slices.Equal(old.Buckets, g.Buckets) {
			continue
		}
		if err := p.Switch.Groups.Set(id, g); err != nil {
			return err
		}
	}
	return nil
}

// expose writes the frontends of a Service. A group keeps its number as long as the Service
// exists, so flows do not depend on pools.
func (p *Plane) expose(c *ruleset.Change, full bool, was map[FlowKey]Flow) error {
	if c.New == nil || c.What&(ruleset.FieldFrontends|ruleset.FieldAffinity) == 0 && !full {
		return nil
	}
	for i := range c.New.Frontends {
		f := Flow{Frontend: c.New.Frontends[i], Affinity: c.New.Port.Affinity}
		f.Group, _ = p.groups.Lookup(GroupName{c.Key, f.Frontend.Target})
		f.Internal, _ = p.groups.Lookup(GroupName{c.Key, f.Frontend.Internal})
		k := flowKey(c.Key, &f.Frontend)
		if old, ok := was[k]; ok && reflect.DeepEqual(old, f) {
			continue
		}
		if err := p.Switch.Flows.Set(k, f); err != nil {
			return err
		}
	}
	return nil
}

// trim removes the groups and endpoints that no frontend of a Service uses any more.
func (p *Plane) trim(c *ruleset.Change, full bool) error {
	for t, bit := range pools {
		id, ok := p.groups.Lookup(GroupName{c.Key, t})
		if !ok || c.New != nil && (len(c.New.Pool(t)) != 0 || c.What&bit == 0 && !full) {
			continue
		}
		if err := p.Switch.Groups.Delete(id); err != nil {
			return err
		}
		if c.New == nil {
			p.groups.Release(GroupName{c.Key, t})
		}
	}
	for ep := range c.Removed() {
		if err := p.endpoints.release(c.Key, Endpoint{ep.Addr, c.Key.Protocol}); err != nil {
			return err
		}
	}
	for a := range p.vips.Items(c.Key) {
		if c.New != nil && slices.Contains(slices.Collect(clusterIPs(c.New)), a) {
			continue
		}
		if err := p.vips.release(c.Key, a); err != nil {
			return err
		}
	}
	return nil
}

// pruneFlows removes the flows that are not in a full delta.
func (p *Plane) pruneFlows(d *ruleset.Delta, was map[FlowKey]Flow) error {
	for _, c := range d.Changes {
		if c.New == nil {
			continue
		}
		for i := range c.New.Frontends {
			delete(was, flowKey(c.Key, &c.New.Frontends[i]))
		}
	}
	for k := range was {
		if err := p.Switch.Flows.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

// prune removes all other entries that are not in a full delta, groups first.
func (p *Plane) prune(d *ruleset.Delta, was map[uint32]Group) error {
	live := map[tracker.Key]bool{}
	for _, c := range d.Changes {
		live[c.Key] = true // those without New were trimmed
	}
	for id, g := range was {
		if has, ok := p.groups.Lookup(g.Name); live[g.Name.Service] && (!ok || has == id) {
			continue
		}
		if err := p.Switch.Groups.Delete(id); err != nil {
			return err
		}
		if has, ok := p.groups.Lookup(g.Name); ok && has == id {
			p.groups.Release(g.Name)
		}
		p.groups.Unreserve(id)
	}
	return errors.Join(p.endpoints.sweep(), p.vips.sweep())
}

// shared is a table of items that Services share.
type shared[T comparable] struct {
	ledger.Ledger[tracker.Key, T]
	table *Table[T, bool]
}

// newShared adopts the items of a table.
func newShared[T comparable](t *Table[T, bool]) *shared[T] {
	s := &shared[T]{table: t}
	for item := range t.All() {
		s.Installed(item)
	}
	return s
}

// claim installs an item unless the table has it.
func (s *shared[T]) claim(k tracker.Key, item T) error {
	if !s.Claim(k, item) {
		return nil
	}
	if err := s.table.Set(item, true); err != nil {
		return err
	}
	s.Installed(item)
	return nil
}

// release removes an item if no other Service uses it.
func (s *shared[T]) release(k tracker.Key, item T) error {
	if !s.Release(k, item) {
		return nil
	}
	if err := s.table.Delete(item); err != nil {
		s.Claim(k, item) // the retry releases it again
		return err
	}
	s.Removed(item)
	return nil
}

// sweep removes the items that no Service uses.
func (s *shared[T]) sweep() error {
	for item := range s.Unused() {
		if err := s.table.Delete(item); err != nil {
			return err
		}
		s.Removed(item)
	}
	return nil
}

func flowKey(k tracker.Key, f *ruleset.Frontend) FlowKey {
	return FlowKey{Match{f.Addr, f.Port, k.Protocol, k.Family}, k}
}

func clusterIPs(s *ruleset.Service) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for i := range s.Frontends {
			if f := &s.Frontends[i]; f.Kind == ruleset.ClusterIP && !yield(f.Addr) {
				return
			}
		}
	}
}
