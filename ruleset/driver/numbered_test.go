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
	Pool uint32
	N    int
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
	slots       driver.Slots[uint32, uint32]
}

// backend starts a process. With empty, every frontend refers to a pool, which may be empty.
// Without read, the process cannot read the tables.
func (p *numbered) backend(empty, read bool) ruleset.Backend {
	n := &numbers{numbered: p}
	n.endpointIDs, _ = driver.NewIDs[driver.Endpoint](1, 1<<16)
	n.poolIDs, _ = driver.NewIDs[driver.Pool](1, 1<<16)
	n.slots.Value = func(pool uint32, ep *tracker.Endpoint) uint32 {
		name, _ := n.poolIDs.Key(pool)
		id, _ := n.endpointIDs.Lookup(driver.Endpoint{Addr: ep.Addr, Protocol: name.Service.Protocol})
		return id
	}
	n.slots.Entries = driver.Table[driver.Slot[uint32], uint32]{
		Put:    func(at driver.Slot[uint32], ep uint32) error { return writeTo(p, p.slots, slotKey(at), &ep) },
		Delete: func(at driver.Slot[uint32]) error { return writeTo(p, p.slots, slotKey(at), nil) },
	}
	plane := driver.Tables[struct{}, []*tracker.Endpoint, flow]{
		Node:      func(node *ruleset.Node) error { p.node = node; return nil },
		Endpoints: driver.Numbered(n.endpointIDs, n.endpointTable(read)),
		Frontends: driver.Table[driver.Frontend, flow]{
			Put:    func(k driver.Frontend, v flow) error { return writeTo(p, p.flows, k, &v) },
			Delete: func(k driver.Frontend) error { return writeTo(p, p.flows, k, nil) },
		},
		Pool:       (*ruleset.Port).Pool,
		Frontend:   func(s *ruleset.Port, f *ruleset.Frontend) flow { return n.flow(s, f, empty) },
		EmptyPools: empty,
	}
	if read {
		n.slots.Entries.Installed = func() (iter.Seq2[driver.Slot[uint32], uint32], error) {
			return func(yield func(driver.Slot[uint32], uint32) bool) {
				for k, ep := range p.slots {
					if !yield(driver.Slot[uint32](k), ep) {
						return
					}
				}
			}, nil
		}
		plane.Frontends.Installed = func() (iter.Seq2[driver.Frontend, flow], error) { return maps.All(p.flows), nil }
	}
	plane.Pools = driver.Numbered(n.poolIDs, n.poolTable(read))
	d, err := driver.New(plane)
	if err != nil {
		p.t.Fatal(err)
	}
	return d
}

type namedEndpoint = driver.Named[driver.Endpoint, struct{}]

func (n *numbers) endpointTable(read bool) driver.Table[uint32, namedEndpoint] {
	t := driver.Table[uint32, namedEndpoint]{
		Put:    func(id uint32, e namedEndpoint) error { return writeTo(n.numbered, n.endpoints, id, &e.Name) },
		Delete: func(id uint32) error { return writeTo(n.numbered, n.endpoints, id, nil) },
	}
	if read {
		t.Installed = func() (iter.Seq2[uint32, namedEndpoint], error) {
			found := map[uint32]namedEndpoint{}
			for id, ep := range n.endpoints {
				found[id] = namedEndpoint{Name: ep}
			}
			return maps.All(found), nil
		}
	}
	return t
}

type namedPool = driver.Named[driver.Pool, []*tracker.Endpoint]

// poolTable returns a table of pools, each of which has a name and slots.
func (n *numbers) poolTable(read bool) driver.Table[uint32, namedPool] {
	slots := n.slots.Pools()
	t := driver.Table[uint32, namedPool]{
		Put: func(id uint32, p namedPool) error {
			if n.pools[id] != p.Name {
				if err := writeTo(n.numbered, n.pools, id, &p.Name); err != nil {
					return err
				}
			}
			return slots.Put(id, p.Value)
		},
		Delete: func(id uint32) error {
			if err := slots.Delete(id); err != nil {
				return err
			}
			return writeTo(n.numbered, n.pools, id, nil)
		},
		Trim: slots.Trim,
	}
	if read {
		t.Installed = func() (iter.Seq2[uint32, namedPool], error) {
			_, err := slots.Installed()
			found := map[uint32]namedPool{}
			for id, name := range n.pools {
				found[id] = namedPool{name, []*tracker.Endpoint{{}}} // unknown
			}
			return maps.All(found), err
		}
	}
	return t
}

// flow reads what putPool stored.
func (n *numbers) flow(s *ruleset.Port, f *ruleset.Frontend, empty bool) flow {
	v := flow{targets: [2]ruleset.Target{f.Target, f.Internal}, masquerade: f.Masquerade}
	for i, t := range v.targets {
		if t != ruleset.TargetCluster && t != ruleset.TargetLocal {
			if !empty {
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
		v.pools[i], v.counts[i] = id, n.slots.Len(id)
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
					New: func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
						p := &numbered{
							t: tb, env: env, flows: map[driver.Frontend]flow{}, slots: map[slotKey]uint32{},
							endpoints: map[uint32]driver.Endpoint{}, pools: map[uint32]driver.Pool{},
						}
						return conformance.Fake{
							Backend: func() ruleset.Backend { return p.backend(empty, read) },
							Handle:  p.handle,
						}
					},
					Skip: skip, Worlds: 4,
				})
			})
		}
	}
}
