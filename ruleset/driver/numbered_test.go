package driver_test

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// numbered is a data plane whose frontends contain what writing the pools has stored: the
// number of a pool and the number of its slots.
type numbered struct {
	t         testing.TB
	env       conformance.SimEnv
	node      *ruleset.Node
	flows     map[driver.Frontend]flow
	slots     map[slotKey]uint32 // the number of an endpoint
	endpoints map[uint32]driver.Endpoint
	pools     map[uint32]driver.Pool
}

type slotKey struct {
	pool uint32
	slot int
}

// flow is a frontend, for external and for internal traffic.
type flow struct {
	targets    [2]ruleset.Target
	pools      [2]uint32
	counts     [2]int
	masquerade ruleset.Masquerade
}

// writeTo writes an entry of a map, or deletes it if v is nil, and checks the references.
func writeTo[K comparable, V any](p *numbered, m map[K]V, k K, v *V) error {
	if err := p.env.Fail(); err != nil {
		return err
	}
	if v == nil {
		delete(m, k)
	} else {
		m[k] = *v
	}
	for at, f := range p.flows {
		for i, id := range f.pools {
			_, ok := p.pools[id]
			if isPool := f.targets[i] == ruleset.TargetCluster || f.targets[i] == ruleset.TargetLocal; !ok && (isPool || id != 0) {
				p.t.Errorf("frontend %v refers to pool %d, which does not exist", at, id)
			}
			for slot := range f.counts[i] {
				if n, ok := p.slots[slotKey{id, slot}]; !ok {
					p.t.Errorf("frontend %v has %d slots, and slot %d is empty", at, f.counts[i], slot)
				} else if _, ok := p.endpoints[n]; !ok {
					p.t.Errorf("slot %d refers to endpoint %d, which does not exist", slot, n)
				}
			}
		}
	}
	p.env.Look()
	return nil
}

// numbers is what a process knows of a numbered plane.
type numbers struct {
	*numbered
	endpointIDs *driver.IDs[driver.Endpoint]
	poolIDs     *driver.IDs[driver.Pool]
	tables      map[driver.Pool]*driver.Slots[driver.Endpoint, uint32]
}

// backend starts a process. With empty, every frontend refers to a pool, which may be empty.
// Without read, the process cannot read the tables.
func (p *numbered) backend(empty, read bool) ruleset.Backend {
	n := &numbers{numbered: p, tables: map[driver.Pool]*driver.Slots[driver.Endpoint, uint32]{}}
	n.endpointIDs, _ = driver.NewIDs[driver.Endpoint](1, 1<<16)
	n.poolIDs, _ = driver.NewIDs[driver.Pool](1, 1<<16)
	for id, ep := range p.endpoints {
		if n.endpointIDs.Adopt(ep, id) != nil {
			n.endpointIDs.Reserve(id)
		}
	}
	for id, name := range p.pools {
		if n.poolIDs.Adopt(name, id) != nil {
			n.poolIDs.Reserve(id)
			continue
		}
		n.tables[name] = &driver.Slots[driver.Endpoint, uint32]{}
	}
	for k, ep := range p.slots {
		if name, ok := n.poolIDs.Key(k.pool); ok {
			n.tables[name].Adopt(k.slot, p.endpoints[ep], ep)
		}
	}
	plane := driver.Plane[[]driver.Endpoint, flow]{
		Node:      func(node *ruleset.Node) error { p.node = node; return nil },
		Endpoints: driver.Table[driver.Endpoint, struct{}]{Put: n.putEndpoint, Delete: n.deleteEndpoint},
		Pools:     driver.Table[driver.Pool, []driver.Endpoint]{Put: n.putPool, Delete: n.deletePool},
		Frontends: driver.Table[driver.Frontend, flow]{
			Put:    func(k driver.Frontend, v flow) error { return writeTo(p, p.flows, k, &v) },
			Delete: func(k driver.Frontend) error { return writeTo(p, p.flows, k, nil) },
		},
		Pool: func(s *ruleset.Service, t ruleset.Target) (out []driver.Endpoint) {
			for _, ep := range s.Pool(t) {
				out = append(out, driver.EndpointOf(s, ep))
			}
			return out
		},
		Frontend:   func(s *ruleset.Service, f *ruleset.Frontend) flow { return n.flow(s, f, empty) },
		EmptyPools: empty,
		Trim:       n.trim,
	}
	if read {
		plane.Endpoints.Installed = func() (iter.Seq2[driver.Endpoint, struct{}], error) {
			return func(yield func(driver.Endpoint, struct{}) bool) {
				for _, ep := range p.endpoints {
					if !yield(ep, struct{}{}) {
						return
					}
				}
			}, nil
		}
		plane.Pools.Installed = n.installedPools
		plane.Frontends.Installed = func() (iter.Seq2[driver.Frontend, flow], error) { return maps.All(p.flows), nil }
	}
	d, err := driver.New(plane)
	if err != nil {
		p.t.Fatal(err)
	}
	return d
}

func (n *numbers) putEndpoint(ep driver.Endpoint, _ struct{}) error {
	id, err := n.endpointIDs.Get(ep)
	if err != nil {
		return err
	}
	return writeTo(n.numbered, n.endpoints, id, &ep)
}

func (n *numbers) deleteEndpoint(ep driver.Endpoint) error {
	id, ok := n.endpointIDs.Lookup(ep)
	if !ok {
		return nil
	}
	if err := writeTo(n.numbered, n.endpoints, id, nil); err != nil {
		return err
	}
	n.endpointIDs.Release(ep)
	return nil
}

// installedPools returns the endpoints of each pool in any order. It reads the map: the tables
// have what is wanted, even if a write has failed.
func (n *numbers) installedPools() (iter.Seq2[driver.Pool, []driver.Endpoint], error) {
	found := map[driver.Pool][]driver.Endpoint{}
	for name := range n.tables {
		found[name] = nil
	}
	for k, ep := range n.slots {
		if name, ok := n.poolIDs.Key(k.pool); ok {
			found[name] = append(found[name], n.endpoints[ep])
		}
	}
	return maps.All(found), nil
}

func (n *numbers) putPool(name driver.Pool, want []driver.Endpoint) error {
	id, err := n.poolIDs.Get(name)
	if err != nil {
		return err
	}
	if _, ok := n.pools[id]; !ok {
		if err := writeTo(n.numbered, n.pools, id, &name); err != nil {
			return err
		}
	}
	table := n.tables[name]
	if table == nil {
		table = &driver.Slots[driver.Endpoint, uint32]{}
		n.tables[name] = table
	}
	table.Replace(func(yield func(driver.Endpoint, uint32) bool) {
		for _, ep := range want {
			if at, _ := n.endpointIDs.Lookup(ep); !yield(ep, at) {
				return
			}
		}
	})
	return table.Write(func(slot int, _ driver.Endpoint, at uint32) error {
		return writeTo(n.numbered, n.numbered.slots, slotKey{id, slot}, &at)
	})
}

func (n *numbers) trim(name driver.Pool) error {
	id, _ := n.poolIDs.Lookup(name)
	return n.tables[name].Trim(func(slot int) error { return writeTo(n.numbered, n.numbered.slots, slotKey{id, slot}, nil) })
}

func (n *numbers) deletePool(name driver.Pool) error {
	id, ok := n.poolIDs.Lookup(name)
	if !ok {
		return nil
	}
	if err := n.putPool(name, nil); err != nil {
		return err
	}
	if err := n.trim(name); err != nil {
		return err
	}
	if err := writeTo(n.numbered, n.pools, id, nil); err != nil {
		return err
	}
	delete(n.tables, name)
	n.poolIDs.Release(name)
	return nil
}

// flow reads what putPool stored.
func (n *numbers) flow(s *ruleset.Service, f *ruleset.Frontend, empty bool) flow {
	v := flow{targets: [2]ruleset.Target{f.Target, f.Internal}, masquerade: f.Masquerade}
	for i, t := range v.targets {
		if t != ruleset.TargetCluster && t != ruleset.TargetLocal {
			if !empty || t == ruleset.TargetPass {
				continue
			}
			if t = ruleset.TargetCluster; !s.HasPool(t) {
				t = ruleset.TargetLocal
			}
		}
		name := driver.Pool{Service: s.Key, Target: t}
		id, ok := n.poolIDs.Lookup(name)
		if !ok {
			n.t.Errorf("pool %v was not put before its frontend", name)
			continue
		}
		v.pools[i], v.counts[i] = id, n.tables[name].Len()
	}
	return v
}

func (p *numbered) handle(pk ruleset.Packet) conformance.Outcome {
	if p.node == nil {
		return conformance.Outcome{}
	}
	at := driver.Frontend{Addr: pk.To.Addr(), Port: pk.To.Port(), Protocol: pk.Protocol, Family: tracker.FamilyOf(pk.To.Addr())}
	f, ok := p.flows[at]
	if !ok && slices.Contains(pk.NodeAddresses, at.Addr) && p.node.NodePorts(at.Family).Allows(at.Addr) {
		at.Addr = ruleset.Frontend{}.Addr
		f, ok = p.flows[at]
	}
	if !ok {
		return conformance.Outcome{}
	}
	fromPod, fromNode := p.node.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	i := 0
	if fromPod || fromNode {
		i = 1
	}
	switch f.targets[i] {
	case ruleset.TargetReject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	case ruleset.TargetDrop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	case ruleset.TargetPass:
		return conformance.Outcome{}
	}
	out := conformance.Outcome{Action: ruleset.ActionForward}
	for slot := range f.counts[i] {
		ep := p.endpoints[p.slots[slotKey{f.pools[i], slot}]]
		out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: ep.Addr, Weight: 1, Masquerade: f.masquerade.Applies(fromPod, fromNode) || ep.Addr.Addr() == pk.From})
	}
	return out
}

// TestFrontendMayContainWhatPoolsStored drives a plane whose frontends contain numbers and sizes
// of pools. After each write, every number must exist and every slot must be in use.
func TestFrontendMayContainWhatPoolsStored(t *testing.T) {
	for _, empty := range []bool{false, true} {
		for _, read := range []bool{true, false} {
			t.Run(fmt.Sprintf("empty=%t/read=%t", empty, read), func(t *testing.T) {
				skip := map[conformance.Feature]string{
					conformance.Affinity:          "the plane has addresses, slots and numbers only",
					conformance.WeightedEndpoints: "as affinity",
					conformance.ConsistentHash:    "as affinity",
					conformance.SourceRanges:      "as affinity",
					conformance.ClosedPorts:       "as affinity",
					conformance.ServiceCIDRs:      "as affinity",
					conformance.LoopbackNodePorts: "no packet from a loopback address leaves the node",
				}
				if !read {
					skip[conformance.Restart] = "a new process cannot read the tables"
				}
				conformance.Simulate(t, conformance.Simulation{
					New: func(tb testing.TB, env conformance.SimEnv) conformance.Plane {
						p := &numbered{
							t: tb, env: env, flows: map[driver.Frontend]flow{}, slots: map[slotKey]uint32{},
							endpoints: map[uint32]driver.Endpoint{}, pools: map[uint32]driver.Pool{},
						}
						return conformance.Plane{
							Backend: func() ruleset.Backend { return p.backend(empty, read) },
							Handle:  p.handle,
						}
					},
					Skip: skip, Worlds: 6,
				})
			})
		}
	}
}
