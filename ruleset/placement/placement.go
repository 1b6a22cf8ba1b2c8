// Package placement computes the rules of many nodes in one process, from one tracker and one Engine, for a
// controller that programs a central data plane, such as the load balancers of OVN's northbound database:
//
//	p := placement.New()
//	p.SetNode(tracker.NodeInfo{Name: "node-a", Zone: "z1"})
//	cursor := engine.Attach("all nodes", ruleset.BackendFunc(
//		func(_ context.Context, d *ruleset.Delta) error {
//			for i := range d.Changes {
//				for c := range p.Changes(d, &d.Changes[i]) {
//					if c.Everywhere() {
//						... // c.New holds the rules of every node
//						continue
//					}
//					for node := range c.Nodes() {
//						... // c.New holds the rules of this node
//					}
//				}
//			}
//			return nil
//		}))
//
// Most Services are the same on every node. The others depend on the node's name (a traffic policy of Local, hints
// for nodes), its zone (hints for zones) or its addresses (source ranges). [Placements.Changes] computes a change
// once for each class of nodes that see the Service alike, and a changed endpoint only for the nodes whose rules
// differ. The tracker and the Engine must not have a node of their own: their NodeInfo is the zero value. The Budget
// of the Engine does not bound the pools of Services that depend on the node.
//
// A node that joins, or whose zone or addresses changed, needs [Placements.Service] for each Service in the Engine's
// Snapshot, and then every change. For many nodes [Placements.Classes] computes a Service once for each class.
package placement

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Placements holds the nodes of a cluster. It is not safe for concurrent use: callers usually guard it with a lock
// that Apply holds, too. [New] makes one.
type Placements struct {
	nodes map[string]tracker.NodeInfo
	zones map[string]map[string]struct{}
}

// New returns Placements without nodes.
func New() *Placements {
	return &Placements{map[string]tracker.NodeInfo{}, map[string]map[string]struct{}{}}
}

// SetNode adds or replaces a node, and reports whether anything changed. It ignores a node without a name.
func (p *Placements) SetNode(n tracker.NodeInfo) (changed bool) {
	old, ok := p.nodes[n.Name]
	if n.Name == "" || ok && old.Equal(n) {
		return false
	}
	p.DeleteNode(n.Name)
	n.Addresses = slices.Clone(n.Addresses)
	p.nodes[n.Name] = n
	if p.zones[n.Zone] == nil {
		p.zones[n.Zone] = map[string]struct{}{}
	}
	p.zones[n.Zone][n.Name] = struct{}{}
	return true
}

// DeleteNode removes a node and reports whether it existed.
func (p *Placements) DeleteNode(name string) (existed bool) {
	n, ok := p.nodes[name]
	if !ok {
		return false
	}
	delete(p.nodes, name)
	if delete(p.zones[n.Zone], name); len(p.zones[n.Zone]) == 0 {
		delete(p.zones, n.Zone)
	}
	return true
}

// Service returns a Service of the Engine as a node has it, nil for an unknown node. node is the Engine's, as in
// [ruleset.Delta].Node. The result is s itself if it does not depend on the node. Otherwise each call costs time
// proportional to the endpoints.
func (p *Placements) Service(node *ruleset.Node, s *ruleset.Port, name string) *ruleset.Port {
	info, ok := p.nodes[name]
	if !ok || s == nil {
		return nil
	}
	if !on(s).any() {
		return s
	}
	return s.On(with(node, info))
}

// Classes yields a Service of the Engine once for each class of nodes that see it alike. Change.New is the Service on
// these nodes, and s itself if it does not depend on the node. Each node is in one class. node is the Engine's, as
// for Service.
//
// The cost is that of one call of Service for each class, and a step for each node that Nodes yields. With policy
// Local, each node with an endpoint is a class, and so is each node with a hint; with hints for zones, each of these
// zones. The other nodes are one class. Source ranges divide classes in two, by whether they contain the nodes'
// addresses, and cost a step for each node.
func (p *Placements) Classes(node *ruleset.Node, s *ruleset.Port) iter.Seq[*Change] {
	return p.Changes(&ruleset.Delta{Full: true, Node: node}, &ruleset.Change{Key: s.Key, New: s})
}

// Change is the change of one Service port on the nodes that see it alike. It is valid while the Placements do not
// change, and, like them, not safe for concurrent use.
type Change struct {
	ruleset.Change
	p *Placements
	// nodes lists the nodes. If it is nil, they are all nodes of zones, or of the cluster
	// if zones is nil, except those in except.
	nodes  []string
	zones  []string
	except map[string]struct{}
	info   tracker.NodeInfo
}

// Everywhere reports whether the change is that of all nodes.
func (c *Change) Everywhere() bool { return c.nodes == nil && c.zones == nil && len(c.except) == 0 }

// Nodes yields the names of the nodes, in no particular order. The Placements must not change
// during the iteration.
func (c *Change) Nodes() iter.Seq[string] {
	return func(yield func(string) bool) {
		switch {
		case c.nodes != nil:
			slices.Values(c.nodes)(yield)
		case c.zones == nil:
			for name := range c.p.nodes {
				if _, ok := c.except[name]; !ok && !yield(name) {
					return
				}
			}
		default:
			for _, z := range c.zones {
				for name := range c.p.zones[z] {
					if _, ok := c.except[name]; !ok && !yield(name) {
						return
					}
				}
			}
		}
	}
}

// Changes yields the changes on the nodes that a Change of d makes, each node at most once. It leaves out nodes for
// which nothing but [ruleset.Port].Endpoints outside the pools differs, except in a full delta and after a failed
// attempt.
func (p *Placements) Changes(d *ruleset.Delta, c *ruleset.Change) iter.Seq[*Change] {
	return func(yield func(*Change) bool) {
		base := *c
		if d.Full {
			base.Fields = ruleset.FieldAll
		}
		if !p.depends(c) {
			yield(&Change{Change: base, p: p})
			return
		}
		on := func(info tracker.NodeInfo) ruleset.Change { return base.On(with(d.Node, info)) }
		differs := func(c *ruleset.Change) bool { return c.Fields&^ruleset.FieldEndpoints != 0 }
		if !differs(&base) {
			// A node without a name and a zone has in its pools all endpoints that hints give to others, so only
			// local pools can differ, on the nodes of the changed endpoints.
			for _, name := range changedNames(base.Old.Endpoints, base.New.Endpoints) {
				if !p.changeOn(name, on, differs, yield) {
					return
				}
			}
			return
		}
		var dep dependence
		for _, s := range []*ruleset.Port{c.Old, c.New} {
			if s != nil {
				dep.add(s)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(dep.names)) {
			if !p.changeOn(name, on, differs, yield) {
				return
			}
		}
		for _, class := range p.classes(&dep) {
			class.Change = on(class.info)
			if differs(&class.Change) && !yield(class) {
				return
			}
		}
	}
}

// depends reports whether a version of the Service depends on the node.
func (p *Placements) depends(c *ruleset.Change) bool {
	return c.Old != nil && on(c.Old).any() || c.New != nil && on(c.New).any()
}

// changeOn yields the change on one node, if the node exists and something differs there. It
// reports whether yield may be called again.
func (p *Placements) changeOn(name string, on func(tracker.NodeInfo) ruleset.Change, differs func(*ruleset.Change) bool, yield func(*Change) bool) bool {
	info, ok := p.nodes[name]
	if !ok {
		return true
	}
	c := &Change{Change: on(info), p: p, nodes: []string{name}}
	return !differs(&c.Change) || yield(c)
}

// classes returns the classes of the nodes that d does not name, without their changes.
func (p *Placements) classes(d *dependence) (out []*Change) {
	named := map[string]struct{}{}
	for name := range d.names {
		if _, ok := p.nodes[name]; ok {
			named[name] = struct{}{}
		}
	}
	if len(d.ranges) == 0 {
		var rest []string
		for _, z := range slices.Sorted(maps.Keys(p.zones)) {
			if _, ok := d.zones[z]; ok {
				out = append(out, &Change{p: p, info: tracker.NodeInfo{Zone: z}, zones: []string{z}, except: named})
			} else {
				rest = append(rest, z)
			}
		}
		switch {
		case len(d.zones) == 0:
			out = append(out, &Change{p: p, except: named})
		case len(rest) != 0:
			out = append(out, &Change{p: p, zones: rest, except: named})
		}
		return out
	}
	type key struct{ zone, own string }
	classes := map[key]*Change{}
	for name, info := range p.nodes {
		if _, ok := named[name]; ok {
			continue
		}
		k := key{own: d.own(info.Addresses)}
		if _, ok := d.zones[info.Zone]; ok {
			k.zone = info.Zone
		}
		class := classes[k]
		if class == nil {
			class = &Change{p: p, info: tracker.NodeInfo{Zone: info.Zone, Addresses: info.Addresses}}
			classes[k] = class
		}
		class.nodes = append(class.nodes, name)
	}
	byKey := func(a, b key) int { return cmp.Or(strings.Compare(a.zone, b.zone), strings.Compare(a.own, b.own)) }
	for _, k := range slices.SortedFunc(maps.Keys(classes), byKey) {
		out = append(out, classes[k])
	}
	return out
}

func with(n *ruleset.Node, info tracker.NodeInfo) *ruleset.Node {
	out := *n
	out.Info = info
	return &out
}

// dependence is what the rules of a Service depend on, in one or more versions.
type dependence struct {
	// names holds the nodes whose name matters, and zones the zones that matter. The others are alike.
	names, zones map[string]struct{}
	// ranges holds the source ranges that a node's addresses may be in.
	ranges [][]netip.Prefix
}

func set(m *map[string]struct{}, k string) {
	if *m == nil {
		*m = map[string]struct{}{}
	}
	(*m)[k] = struct{}{}
}

// reasons are the properties of a node that the rules of a Service depend on.
type reasons struct {
	// addresses: the source ranges allow a node's own addresses.
	addresses bool
	// local: endpoints on the node. byNode and byZone: hints.
	local, byNode, byZone bool
}

func (r reasons) any() bool { return r != reasons{} }

// on returns what a version of a Service depends on: see [tracker.Select].
func on(s *ruleset.Port) (r reasons) {
	r.addresses = len(s.Spec.SourceRanges) != 0 && len(s.Spec.LoadBalancerIPs) != 0
	local := s.Spec.UsesLocalEndpoints()
	hints := s.Spec.UsesClusterEndpoints()
	if !local && !hints {
		return r
	}
	ready := false
	byNode, byZone := hints, hints // every ready endpoint so far has hints
	for _, ep := range s.Endpoints {
		if ep.Weight == 0 {
			continue
		}
		r.local = r.local || local && isLocalSomewhere(ep)
		if ep.Ready {
			ready = true
			byNode, byZone = byNode && len(ep.ForNodes) != 0, byZone && len(ep.ForZones) != 0
		}
		if (r.local || !local) && !byNode && !byZone {
			break
		}
	}
	r.byNode, r.byZone = ready && byNode, ready && byZone
	return r
}

// isLocalSomewhere reports whether an endpoint with a weight may be in a node's local pool.
func isLocalSomewhere(ep *tracker.Endpoint) bool {
	return ep.Node != "" && (ep.Ready || ep.Serving && ep.Terminating)
}

// add adds what a version of a Service depends on.
func (d *dependence) add(s *ruleset.Port) {
	r := on(s)
	if r.addresses {
		d.ranges = append(d.ranges, s.Spec.SourceRanges)
	}
	if !r.local && !r.byNode && !r.byZone {
		return
	}
	for _, ep := range s.Endpoints {
		if ep.Weight == 0 {
			continue
		}
		if r.local && isLocalSomewhere(ep) {
			set(&d.names, ep.Node)
		}
		if !ep.Ready {
			continue
		}
		if r.byNode {
			for _, n := range ep.ForNodes {
				set(&d.names, n)
			}
		}
		if r.byZone {
			for _, z := range ep.ForZones {
				set(&d.zones, z)
			}
		}
	}
}

// own returns, for each of d.ranges, whether it contains one of a node's addresses.
func (d *dependence) own(addrs []netip.Addr) string {
	out := make([]byte, len(d.ranges))
	for i, ranges := range d.ranges {
		out[i] = '0'
		for _, a := range addrs {
			if slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a.Unmap()) }) {
				out[i] = '1'
				break
			}
		}
	}
	return string(out)
}

// changedNames returns, sorted, the nodes of the endpoints that only one of two lists has. Both
// are sorted by address.
func changedNames(a, b []*tracker.Endpoint) []string {
	a, b = listdiff.Trim(a, b)
	var out []string
	note := func(ep *tracker.Endpoint) { out = append(out, ep.Node) }
	for len(a) != 0 || len(b) != 0 {
		switch {
		case len(b) == 0 || len(a) != 0 && a[0].Addr.Compare(b[0].Addr) < 0:
			note(a[0])
			a = a[1:]
		case len(a) == 0 || a[0].Addr.Compare(b[0].Addr) > 0:
			note(b[0])
			b = b[1:]
		default:
			if !a[0].Equal(b[0]) {
				note(a[0])
				note(b[0])
			}
			a, b = a[1:], b[1:]
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
