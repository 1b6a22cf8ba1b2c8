package model

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestElementsOfFrontends computes the elements of a Service with frontends of every kind.
func TestElementsOfFrontends(t *testing.T) {
	addr := netip.MustParseAddr
	const cluster, local = ruleset.TargetCluster, ruleset.TargetLocal
	eps := []*tracker.Endpoint{{Addr: netip.MustParseAddrPort("10.0.0.1:80")}}
	s := &ruleset.Port{
		Spec:      &tracker.ServicePort{},
		Selection: tracker.Selection{Cluster: eps, Local: eps},
		Frontends: []ruleset.Frontend{
			{Kind: ruleset.KindClusterIP, Addr: addr("10.96.0.1"), Port: 80, Target: cluster, Internal: cluster, Masquerade: ruleset.MasqueradeNotPods},
			{Kind: ruleset.KindNodePort, Port: 30080, Target: local, Internal: cluster, Masquerade: ruleset.MasqueradeNode},
			{Kind: ruleset.KindLoadBalancerIP, Addr: addr("203.0.113.1"), Port: 80, Sources: []netip.Prefix{netip.MustParsePrefix("172.16.9.9/12")}, Target: cluster, Internal: cluster},
		},
	}
	s.Key.Protocol = v1.ProtocolTCP
	word := func(v uint32) layout.Octets { return layout.Octets{}.Word(v) }
	at := func(raw ...byte) layout.Octets { return layout.OctetsOf(raw) }
	nodePort := at(6, 0, 0, 0, 30080>>8, 30080&0xff, 0, 0)
	want := []layout.Element{
		{Set: layout.ServiceIPs, Named: true, Key: at(10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0), Data: word(layout.DispatchKey(1, 7))},
		{Set: layout.ClusterIPs, Named: false, Key: at(10, 96, 0, 1), Data: layout.Octets{}},
		{Set: layout.NodePorts, Named: true, Key: nodePort, Data: word(layout.DispatchKey(2, 8))},
		{Set: layout.InternalNodePorts, Named: true, Key: nodePort, Data: word(layout.DispatchKey(3, 7))},
		{Set: layout.ServiceIPs, Named: true, Key: at(203, 0, 113, 1, 6, 0, 0, 0, 0, 80, 0, 0), Data: word(layout.DispatchKey(4, 7))},
		{Set: layout.Allowed(12), Named: true, Key: at(172, 16, 0, 0, 203, 0, 113, 1, 6, 0, 0, 0, 0, 80, 0, 0), Data: layout.Octets{}},
	}
	var w wanted
	w.setVersion(s).addFrontends(inet.TCP)
	tab := NewTable(tracker.IPv4, &ruleset.Node{}, DefaultConfig, nil, 0)
	tab.Chains.dispatch(&w, &service{pools: [...]*pool{cluster: {number: 7}, local: {number: 8}}}, &Tx{})
	if !slices.Equal(w.elements, want) {
		t.Errorf("elements\n%v, want\n%v", w.elements, want)
	}
}

// TestElementsOfPools computes the elements of a bucket and of a numbered endpoint.
func TestElementsOfPools(t *testing.T) {
	ep := &tracker.Endpoint{Addr: netip.MustParseAddrPort("[fd00::1]:8080")}
	data := layout.Octets{}.Addr(ep.Addr.Addr()).Port(8080)
	var c poolChange
	plain := &pool{number: 5}
	plain.set(nil, []*tracker.Endpoint{ep}, distribution{}, nil, &c)
	if got, want := bucketElement(plain, 0, ep.Addr), (layout.Element{Set: layout.Endpoints, Key: layout.Octets{}.Word(5).Word(0), Data: data}); got != want {
		t.Errorf("bucket %v, want %v", got, want)
	}
	sticky := &pool{number: layout.StickyMark | 5, sticky: true}
	sticky.set(nil, []*tracker.Endpoint{ep}, distribution{}, nil, &c)
	number := sticky.number << layout.StickyShift
	if got, want := bucketElement(sticky, 0, ep.Addr), (layout.Element{Set: layout.StickyBuckets, Key: layout.Octets{}.Word(number).Word(0), Data: layout.Octets{}.Word(number | 1)}); got != want {
		t.Errorf("sticky bucket %v, want %v", got, want)
	}
	if got, want := memberElement(sticky, 1, ep.Addr), (layout.Element{Set: layout.StickyEndpoints, Key: layout.Octets{}.Word(number | 1), Data: data}); got != want {
		t.Errorf("endpoint %v, want %v", got, want)
	}
}

// TestDiffTurnsOneListIntoTheOther applies differences of random lists.
func TestDiffTurnsOneListIntoTheOther(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(most int) []layout.Element {
		var list []layout.Element
		for _, i := range rng.Perm(most + 1)[:rng.IntN(most+1)] {
			list = append(list, layout.Element{Set: layout.ServiceIPs, Key: layout.Octets{}.Word(uint32(i)), Data: layout.Octets{}.Word(rng.Uint32N(3))})
		}
		return list
	}
	for i := range 2000 {
		most := []int{3, 10, 60}[i%3]
		before, after := random(most), random(most)
		if i%2 == 0 {
			after = append(slices.Clone(before), after[:len(after)/2]...)
			slices.SortFunc(after, func(a, b layout.Element) int { return slices.Compare(a.Key.Bytes(), b.Key.Bytes()) })
			after = slices.CompactFunc(after, func(a, b layout.Element) bool { return a.Key == b.Key })
		}
		kernel := map[layout.Octets]layout.Octets{}
		for _, e := range before {
			kernel[e.Key] = e.Data
		}
		steps := 0
		gone, come := different(before, after)
		for _, e := range gone {
			if data, ok := kernel[e.Key]; !ok || data != e.Data {
				t.Fatalf("step %d deletes %v, which is not there", i, e)
			}
			delete(kernel, e.Key)
			steps++
		}
		for _, e := range come {
			if _, ok := kernel[e.Key]; ok {
				t.Fatalf("step %d adds %v, which is there", i, e)
			}
			kernel[e.Key] = e.Data
			steps++
		}
		want := map[layout.Octets]layout.Octets{}
		same := 0
		for _, e := range after {
			want[e.Key] = e.Data
			if slices.Contains(before, e) {
				same++
			}
		}
		if fmt.Sprint(kernel) != fmt.Sprint(want) || steps != len(before)+len(after)-2*same {
			t.Fatalf("step %d: %d steps made %v of %v, want %v", i, steps, kernel, before, want)
		}
	}
}

// TestLostDestinationHasItsProtocol lets a Service take the address, the port and the ID of one with another
// protocol. The counters of the old destination must go.
func TestLostDestinationHasItsProtocol(t *testing.T) {
	tab := NewTable(tracker.IPv4, &ruleset.Node{}, DefaultConfig, nil, 0)
	addr := netip.MustParseAddr("10.96.0.1")
	port := func(p v1.Protocol) *ruleset.Port {
		s := &ruleset.Port{ID: 1, Spec: &tracker.ServicePort{}, Frontends: []ruleset.Frontend{{Kind: ruleset.KindClusterIP, Addr: addr, Port: 53, Target: ruleset.TargetReject}}}
		s.Key.Protocol, s.Key.Family = p, tracker.IPv4
		return s
	}
	var lost []Destination
	for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
		s, tx := port(p), &Tx{}
		must.Do(t, tab.Change(&ruleset.Change{Key: s.Key, New: s, Fields: ruleset.FieldAll}, tx))
		lost = append(lost, tx.Lost...)
	}
	if want := (Destination{tracker.IPv4, layout.Octets{}.Addr(addr).Proto(inet.TCP).Port(53)}); !slices.Equal(lost, []Destination{want}) {
		t.Errorf("lost %v, want %v", lost, want)
	}
}
