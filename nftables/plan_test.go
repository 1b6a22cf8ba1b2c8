package nftables

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestElementsOfFrontends computes the elements of a Service with frontends of every kind.
func TestElementsOfFrontends(t *testing.T) {
	addr := netip.MustParseAddr
	s := &ruleset.Service{
		Frontends: []ruleset.Frontend{
			{Kind: ruleset.ClusterIP, Addr: addr("10.96.0.1"), Port: 80},
			{Kind: ruleset.NodePort, Port: 30080},
			{Kind: ruleset.LoadBalancerIP, Addr: addr("203.0.113.1"), Port: 80, Sources: []netip.Prefix{netip.MustParsePrefix("172.16.9.9/12")}},
		},
	}
	s.Key.Protocol = v1.ProtocolTCP
	keys := []dispatchKeys{{any: dispatchKey(1, 7)}, {any: dispatchKey(2, 8), internal: dispatchKey(3, 7)}, {any: dispatchKey(4, 7)}}
	word := func(v uint32) octets { return octets{}.word(v) }
	at := func(raw ...byte) octets {
		o := octets{n: uint8(len(raw))}
		copy(o.buf[:], raw)
		return o
	}
	nodePort := at(6, 0, 0, 0, 30080>>8, 30080&0xff, 0, 0)
	want := []element{
		{setServiceIPs, true, at(10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0), word(keys[0].any)},
		{setClusterIPs, false, at(10, 96, 0, 1), octets{}},
		{setNodePorts, true, nodePort, word(keys[1].any)},
		{setInternalNodePorts, true, nodePort, word(keys[1].internal)},
		{setServiceIPs, true, at(203, 0, 113, 1, 6, 0, 0, 0, 0, 80, 0, 0), word(keys[2].any)},
		{allowed(12), true, at(172, 16, 0, 0, 203, 0, 113, 1, 6, 0, 0, 0, 0, 80, 0, 0), octets{}},
	}
	if got := frontendElements(nil, s, keys); !slices.Equal(got, want) {
		t.Errorf("elements\n%v, want\n%v", got, want)
	}
}

// TestElementsOfPools computes the elements of a bucket and of a numbered endpoint.
func TestElementsOfPools(t *testing.T) {
	ep := &tracker.Endpoint{Addr: netip.MustParseAddrPort("[fd00::1]:8080")}
	data := octets{}.addr(ep.Addr.Addr()).port(8080)
	var c poolChange
	plain := &pool{number: 5}
	plain.set(nil, []*tracker.Endpoint{ep}, distribution{}, nil, &c)
	if got, want := bucketElement(plain, 0, ep.Addr), (element{setEndpoints, false, octets{}.word(5).word(0), data}); got != want {
		t.Errorf("bucket %v, want %v", got, want)
	}
	sticky := &pool{number: stickyMark | 5, sticky: true}
	sticky.set(nil, []*tracker.Endpoint{ep}, distribution{}, nil, &c)
	number := sticky.number << stickyShift
	if got, want := bucketElement(sticky, 0, ep.Addr), (element{setStickyBuckets, false, octets{}.word(number).word(0), octets{}.word(number | 1)}); got != want {
		t.Errorf("sticky bucket %v, want %v", got, want)
	}
	if got, want := memberElement(sticky, 1, ep.Addr), (element{setStickyEndpoints, false, octets{}.word(number | 1), data}); got != want {
		t.Errorf("endpoint %v, want %v", got, want)
	}
}

// TestDiffTurnsOneListIntoTheOther applies differences of random lists.
func TestDiffTurnsOneListIntoTheOther(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(most int) []element {
		var list []element
		for _, i := range rng.Perm(most + 1)[:rng.IntN(most+1)] {
			list = append(list, element{set: setServiceIPs, key: octets{}.word(uint32(i)), data: octets{}.word(rng.Uint32N(3))})
		}
		return list
	}
	for i := range 2000 {
		most := []int{3, 10, 60}[i%3]
		before, after := random(most), random(most)
		if i%2 == 0 {
			after = append(slices.Clone(before), after[:len(after)/2]...)
			slices.SortFunc(after, func(a, b element) int { return slices.Compare(a.key.bytes(), b.key.bytes()) })
			after = slices.CompactFunc(after, func(a, b element) bool { return a.key == b.key })
		}
		kernel := map[octets]octets{}
		for _, e := range before {
			kernel[e.key] = e.data
		}
		steps := 0
		diff(before, after, func(e *element) {
			if data, ok := kernel[e.key]; !ok || data != e.data {
				t.Fatalf("step %d deletes %v, which is not there", i, e)
			}
			delete(kernel, e.key)
			steps++
		}, func(e *element) {
			if _, ok := kernel[e.key]; ok {
				t.Fatalf("step %d adds %v, which is there", i, e)
			}
			kernel[e.key] = e.data
			steps++
		})
		want := map[octets]octets{}
		same := 0
		for _, e := range after {
			want[e.key] = e.data
			if slices.Contains(before, e) {
				same++
			}
		}
		if fmt.Sprint(kernel) != fmt.Sprint(want) || steps != len(before)+len(after)-2*same {
			t.Fatalf("step %d: %d steps made %v of %v, want %v", i, steps, kernel, before, want)
		}
	}
}
