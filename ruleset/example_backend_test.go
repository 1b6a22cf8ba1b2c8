package ruleset_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// mapPlane is a backend for a data plane with two maps, as a BPF program might use. A
// frontend refers to a pool by the ID of the Service. A pool is one value and is
// replaced as a whole.
type mapPlane struct {
	frontends map[frontendKey]frontendValue
	pools     map[poolKey][]netip.AddrPort
}

type frontendKey struct {
	addr  netip.Addr // invalid for a NodePort
	port  uint16
	proto v1.Protocol
	tracker.Family
}

type frontendValue struct {
	service          uint32
	target, internal ruleset.Target
	masquerade       ruleset.Masquerade
	sources          []netip.Prefix
	affinity         int // seconds
}

type poolKey struct {
	service uint32
	target  ruleset.Target
}

func keyOf(k tracker.Key, f ruleset.Frontend) frontendKey {
	return frontendKey{f.Addr, f.Port, k.Protocol, k.Family}
}

func (m *mapPlane) Apply(_ context.Context, d *ruleset.Delta) error {
	frontends, pools := map[frontendKey]bool{}, map[poolKey]bool{} // the wanted entries, if d.Full
	for _, c := range d.Changes {
		for f := range c.GoneFrontends() {
			delete(m.frontends, keyOf(c.Key, f))
		}
	}
	for _, c := range d.Changes {
		m.setPool(c, d.Full, ruleset.TargetCluster, ruleset.FieldCluster, pools)
		m.setPool(c, d.Full, ruleset.TargetLocal, ruleset.FieldLocal, pools)
	}
	for _, c := range d.Changes {
		if c.New == nil || !d.Full && c.Fields&(ruleset.FieldFrontends|ruleset.FieldAffinity) == 0 {
			continue
		}
		for _, f := range c.New.Frontends {
			frontends[keyOf(c.Key, f)] = true
			m.frontends[keyOf(c.Key, f)] = frontendValue{
				c.New.ID, f.Target, f.Internal, f.Masquerade, f.Sources, int(c.New.Spec.Affinity.Seconds()),
			}
		}
	}
	for _, c := range d.Changes {
		for _, t := range []ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal} {
			if c.New == nil || len(c.New.Pool(t)) == 0 {
				delete(m.pools, poolKey{c.ID(), t})
			}
		}
	}
	if d.Full {
		maps.DeleteFunc(m.frontends, func(k frontendKey, _ frontendValue) bool { return !frontends[k] })
		maps.DeleteFunc(m.pools, func(k poolKey, _ []netip.AddrPort) bool { return !pools[k] })
	}
	return nil
}

func (m *mapPlane) setPool(c ruleset.Change, full bool, t ruleset.Target, f ruleset.Field, all map[poolKey]bool) {
	if c.New == nil || !full && c.Fields&f == 0 || len(c.New.Pool(t)) == 0 {
		return
	}
	k := poolKey{c.New.ID, t}
	all[k] = true
	var pool []netip.AddrPort
	for _, ep := range c.New.Pool(t) {
		pool = append(pool, ep.Addr)
	}
	m.pools[k] = pool
}

// A complete backend for a data plane that consists of maps.
func Example_mapBackend() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		fmt.Println(err)
		return
	}
	plane := &mapPlane{map[frontendKey]frontendValue{}, map[poolKey][]netip.AddrPort{}}
	plane.pools[poolKey{99, ruleset.TargetLocal}] = nil // left by an earlier process
	cursor := engine.Attach("maps", plane)

	t.SetService(web)
	t.SetSlice(webSlice())
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	if err := cursor.Sync(context.Background()); err != nil {
		fmt.Println(err)
	}
	f := plane.frontends[frontendKey{port: 30080, proto: v1.ProtocolTCP, Family: tracker.IPv4}]
	fmt.Println("from outside:", plane.pools[poolKey{f.service, f.target}])
	fmt.Println("from a pod:", plane.pools[poolKey{f.service, f.internal}])

	t.DeleteService(types.NamespacedName{Namespace: web.Namespace, Name: web.Name})
	if err := cursor.Sync(context.Background()); err != nil {
		fmt.Println(err)
	}
	fmt.Println("left:", len(plane.frontends), len(plane.pools))
	// Output:
	// from outside: [10.1.0.1:8080]
	// from a pod: [10.1.0.1:8080 10.2.0.1:8080]
	// left: 0 0
}
