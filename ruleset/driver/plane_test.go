package driver_test

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// plane is a data plane in memory. Endpoints and pools have numbers.
type plane struct {
	t         testing.TB
	env       conformance.SimEnv
	variant   variant
	node      *ruleset.Node
	endpoints map[uint32]driver.Endpoint
	addresses map[netip.Addr]struct{}
	pools     map[uint32]group
	slots     map[driver.Slot[uint32]]bucket
	frontends map[driver.Frontend]entry
	// writes are the writes since it was last cleared, and calls counts them in batches.
	writes []string
	calls  int
	// refused holds keys that cannot be written.
	refused map[any]bool
	// deleting means that the current write deletes an entry.
	deleting bool
}

// variant is a set of properties of a plane.
type variant struct {
	// slots: the endpoints of a pool are in slots.
	slots bool
	// byService: the keys of frontends contain the Service.
	byService bool
	// batches: tables have PutAll and DeleteAll only. replace: tables have Replace.
	batches, replace bool
	// unreadable: tables have no Installed.
	unreadable bool
}

// group is a pool with its name, and its endpoints unless they are in slots.
type group struct {
	name    driver.Pool
	buckets []bucket
}

// bucket is the number of an endpoint.
type bucket struct {
	endpoint uint32
	weight   uint16
}

// entry is the value of a frontend.
type entry struct {
	frontend ruleset.Frontend
	affinity time.Duration
	// pools and sizes are for external and for internal traffic.
	pools [2]uint32
	sizes [2]int
}

func newPlane(t testing.TB, env conformance.SimEnv, v variant) *plane {
	return &plane{
		t: t, env: env, variant: v, endpoints: map[uint32]driver.Endpoint{}, addresses: map[netip.Addr]struct{}{},
		pools: map[uint32]group{}, slots: map[driver.Slot[uint32]]bucket{}, frontends: map[driver.Frontend]entry{}, refused: map[any]bool{},
	}
}

// table returns a table that is a map.
func table[K comparable, V any](p *plane, name string, m map[K]V) *driver.Table[K, V] {
	unsure := map[K]bool{} // keys of which a write failed
	write := func(text string, k K, f func()) (err error) {
		defer func() { unsure[k] = err != nil }()
		p.deleting = strings.HasPrefix(text, "delete ")
		if p.refused[k] {
			return errRefused
		}
		if err = p.env.Fail(); err != nil {
			return err
		}
		f()
		p.calls++
		p.writes = append(p.writes, text+" "+name)
		p.check()
		p.env.Look()
		return nil
	}
	put := func(k K, v V) error {
		if is, ok := m[k]; ok && !p.variant.unreadable && !unsure[k] && reflect.DeepEqual(is, v) {
			p.t.Errorf("%s %v is there already", name, k)
		}
		return write("put", k, func() { m[k] = v })
	}
	remove := func(k K) error { return write("delete", k, func() { delete(m, k) }) }
	out := &driver.Table[K, V]{Put: put, Delete: remove}
	if !p.variant.unreadable {
		out.Installed = func(*ruleset.Delta) (iter.Seq2[K, V], error) { return maps.All(maps.Clone(m)), nil }
	}
	if p.variant.replace {
		out.Replace = func(k K, old, now V) error {
			if is, ok := m[k]; !ok || !reflect.DeepEqual(is, old) {
				p.t.Errorf("%s %v is %v, and not %v", name, k, is, old)
			}
			return write("replace", k, func() { m[k] = now })
		}
	}
	if p.variant.batches {
		out.Put, out.Delete = nil, nil
		each := func(keys []K, f func(i int) error) error {
			for i := range keys {
				if err := f(i); err != nil {
					for _, k := range keys {
						unsure[k] = true
					}
					return err
				}
			}
			p.calls -= len(keys) - 1
			return nil
		}
		out.PutAll = func(keys []K, values []V) error {
			return each(keys, func(i int) error { return put(keys[i], values[i]) })
		}
		out.DeleteAll = func(keys []K) error { return each(keys, func(i int) error { return remove(keys[i]) }) }
	}
	return out
}

// check fails the test if something refers to a missing entry.
func (p *plane) check() {
	has := func(of any, b bucket) {
		if _, ok := p.endpoints[b.endpoint]; !ok {
			p.t.Errorf("%v refers to the missing endpoint %d", of, b.endpoint)
		}
	}
	for _, g := range p.pools {
		for _, b := range g.buckets {
			has(g.name, b)
		}
	}
	for at, b := range p.slots {
		has(at, b)
	}
	for at, e := range p.frontends {
		for i, id := range e.pools {
			if _, ok := p.pools[id]; !ok && id != 0 {
				p.t.Errorf("frontend %v refers to the missing pool %d", at, id)
			}
			for n := range e.sizes[i] {
				if _, ok := p.slots[driver.Slot[uint32]{Pool: id, N: n}]; !ok {
					p.t.Errorf("frontend %v has %d slots of pool %d, and slot %d is empty", at, e.sizes[i], id, n)
				}
			}
		}
		if _, ok := p.addresses[at.Addr]; !ok && at.Addr.IsValid() {
			p.t.Errorf("frontend %v has no address", at)
		}
	}
}

// driver starts a process.
func (p *plane) driver() ruleset.Backend {
	endpoints := &driver.Numbered[driver.Endpoint, driver.Endpoint]{
		Table: *table(p, "endpoint", p.endpoints), Low: 1, High: 1 << 16, Name: func(e driver.Endpoint) driver.Endpoint { return e },
	}
	pools := &driver.Numbered[driver.Pool, group]{Table: *table(p, "pool", p.pools), Low: 1, High: 1 << 16, Name: func(g group) driver.Pool { return g.name }}
	addresses, frontends := table(p, "address", p.addresses), table(p, "frontend", p.frontends)
	frontends.Place = driver.Frontend.Place
	slots := &driver.Slots[uint32, bucket]{Table: *table(p, "slot", p.slots)}
	d, err := driver.New(driver.Plane{
		Node:   func(n *ruleset.Node) error { p.node = n; return nil },
		Tables: []driver.Ordered{endpoints, addresses, pools, slots, frontends},
		Want: func(s *ruleset.Port) {
			ids, sizes := map[ruleset.Target]uint32{}, map[ruleset.Target]int{}
			for name, eps := range driver.Pools(s, false) {
				g := group{name: name}
				for _, ep := range eps {
					g.buckets = append(g.buckets, bucket{endpoints.Want(driver.EndpointOf(s, ep)), ep.Weight})
				}
				if !p.variant.slots {
					ids[name.Target] = pools.Want(g)
					continue
				}
				ids[name.Target] = pools.Want(group{name: name})
				sizes[name.Target] = slots.WantPool(ids[name.Target], g.buckets)
			}
			for k, f := range driver.Frontends(s) {
				if p.variant.byService {
					k.Service = s.Key
				}
				if f.Addr.IsValid() {
					addresses.Want(f.Addr, struct{}{})
				}
				frontends.Want(k, entry{*f, s.Spec.Affinity, [2]uint32{ids[f.Target], ids[f.Internal]}, [2]int{sizes[f.Target], sizes[f.Internal]}})
			}
		},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return d
}

func (p *plane) handle(pk ruleset.Packet) conformance.Outcome {
	if p.node == nil {
		return conformance.Outcome{}
	}
	at := driver.Frontend{Addr: pk.To.Addr(), Port: pk.To.Port(), Protocol: pk.Protocol, Family: tracker.FamilyOf(pk.To.Addr())}
	found := p.find(at)
	if len(found) == 0 && slices.Contains(pk.NodeAddresses, at.Addr) && p.node.NodePorts(at.Family).Allows(at.Addr) {
		at.Addr = netip.Addr{}
		found = p.find(at)
	}
	if len(found) == 0 {
		return conformance.Outcome{}
	}
	e, i := found[0], 0
	fromPod, fromNode := p.node.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	if fromPod || fromNode {
		i = 1
	}
	switch target := e.frontend.TargetFor(i == 1); {
	case !e.frontend.Admits(pk.From), target == ruleset.TargetDrop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	case target == ruleset.TargetReject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	}
	buckets := slices.Clone(p.pools[e.pools[i]].buckets)
	for n := range e.sizes[i] {
		buckets = append(buckets, p.slots[driver.Slot[uint32]{Pool: e.pools[i], N: n}])
	}
	out := conformance.Outcome{Action: ruleset.ActionForward, Affinity: e.affinity}
	for _, b := range buckets {
		addr := p.endpoints[b.endpoint].Addr
		out.Endpoints = append(out.Endpoints, conformance.Choice{
			Addr: addr, Weight: int(b.weight), Masquerade: e.frontend.Masquerade.Applies(fromPod, fromNode) || addr.Addr() == pk.From,
		})
	}
	return out
}

// find returns the entries for a destination, whatever their Service.
func (p *plane) find(at driver.Frontend) (found []entry) {
	for k, e := range p.frontends {
		if k.Service = (tracker.Key{}); k == at {
			found = append(found, e)
		}
	}
	return found
}

// dump returns the tables without numbers, which depend on earlier changes.
func (p *plane) dump() string {
	lines := []string{fmt.Sprintln("addresses", p.addresses)}
	add := func(text ...any) { lines = append(lines, fmt.Sprintln(text...)) }
	for _, e := range p.endpoints {
		add("endpoint", e)
	}
	for id, g := range p.pools {
		var in []string
		for _, b := range g.buckets {
			in = append(in, fmt.Sprint(p.endpoints[b.endpoint], b.weight))
		}
		for at, b := range p.slots {
			if at.Pool == id {
				in = append(in, fmt.Sprint(p.endpoints[b.endpoint], b.weight))
			}
		}
		add("pool", g.name, slices.Sorted(slices.Values(in)))
	}
	for at, e := range p.frontends {
		add(at, e.frontend, e.affinity, p.pools[e.pools[0]].name, p.pools[e.pools[1]].name, e.sizes)
	}
	add(len(p.slots), "slots")
	return strings.Join(slices.Sorted(slices.Values(lines)), "")
}
