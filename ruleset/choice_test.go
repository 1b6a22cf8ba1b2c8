package ruleset

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// weighing returns endpoints with the given weights.
func weighing(weights ...uint16) []*tracker.Endpoint {
	var out []*tracker.Endpoint
	for i, w := range weights {
		a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
		out = append(out, &tracker.Endpoint{Addr: netip.AddrPortFrom(a, 80), Weight: w})
	}
	return out
}

// TestSharesFollowWeights compares shares with weights, within the documented error.
func TestSharesFollowWeights(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		n := 1 + rng.IntN([]int{3, 30, 500}[rng.IntN(3)])
		most := []int{1, 3, 100, 65535}[rng.IntN(4)]
		weights := make([]uint16, n)
		sum := 0
		for i := range weights {
			weights[i] = uint16(1 + rng.IntN(most))
			if rng.IntN(10) == 0 {
				weights[i] = 1
			}
			sum += int(weights[i])
		}
		eps := weighing(weights...)
		got := Shares(eps)
		total, raised := 0, 0
		for i, s := range got {
			total += s
			if s == 1 {
				raised++
			}
			if s < 1 {
				t.Fatalf("weight %d of %d: no share", weights[i], sum)
			}
		}
		if total != TotalShares(eps) || total > mostShares(n) {
			t.Fatalf("%d shares for %v, TotalShares %d, at most %d", total, weights, TotalShares(eps), mostShares(n))
		}
		for i, s := range got {
			// One share more or less, and those taken by endpoints raised to one.
			want := float64(weights[i]) / float64(sum) * float64(total)
			if off := float64(s) - want; off > 1 || off < -1-want*float64(raised)/float64(total) {
				t.Fatalf("weight %d of %d: %d of %d shares", weights[i], sum, s, total)
			}
			if total < mostShares(n) && math.Abs(float64(s)-want) > 1e-6 {
				t.Fatalf("weight %d of %d: %d of %d shares, though the exact number was possible", weights[i], sum, s, total)
			}
		}
		// The order of endpoints does not matter.
		order := rng.Perm(n)
		other := make([]*tracker.Endpoint, n)
		for i, j := range order {
			other[i] = eps[j]
		}
		for i, s := range Shares(other) {
			if s != got[order[i]] {
				t.Fatalf("in another order weight %d has %d shares, had %d", other[i].Weight, s, got[order[i]])
			}
		}
	}
}

// hashed compiles a Service with endpoints on n1 and n2.
func hashed(h tracker.Hash, slots uint16, weights ...uint16) *Port {
	p := &tracker.ServicePort{Key: key("web", tracker.IPv4), ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80, NodePort: 30080, ExternalLocal: true, Hash: h, HashBuckets: slots}
	var eps []*tracker.Endpoint
	for i, w := range weights {
		ep := endpoint(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80).String(), []string{"n1", "n2"}[i%2])
		ep.Weight = w
		eps = append(eps, ep)
	}
	return Compile(tracker.PortState{Port: p, Endpoints: eps}, &Node{Info: tracker.NodeInfo{Name: "n1"}})
}

func TestServiceMaglevCoversPool(t *testing.T) {
	for _, c := range []struct {
		s              *Port
		cluster, local int
	}{
		{hashed(tracker.HashNone, 500, 1, 1), 0, 0},
		{hashed(99, 0, 1, 1), 0, 0},
		{hashed(tracker.HashSource, 0), 0, 0},
		{hashed(tracker.HashSource, 0, 0, 1), maglev.SizeFor(1), 0},
		{hashed(tracker.HashSource, 0, make([]uint16, 4)...), 0, 0},
		{hashed(tracker.HashSourcePort, 0, 1, 1, 1, 1, 1, 1), maglev.SizeFor(6), maglev.SizeFor(3)},
		{hashed(tracker.HashSourcePort, 1000, 1, 2, 0, 4), 1021, 1021},
		{hashed(tracker.HashSource, 65535, 1, 2), MaxBuckets, MaxBuckets},
	} {
		for target, want := range map[Target]int{TargetCluster: c.cluster, TargetLocal: c.local, TargetReject: 0, TargetDrop: 0} {
			tab := c.s.Maglev(target, 1)
			if tab.Len() != want || c.s.HashBuckets(target) != want {
				t.Errorf("%v, %v: %d buckets, HashBuckets %d, want %d", c.s.Hash(), target, tab.Len(), c.s.HashBuckets(target), want)
			}
			for i := range tab.Len() {
				if m := tab.At(i); m >= len(c.s.Pool(target)) {
					t.Fatalf("bucket %d has endpoint %d of %d", i, m, len(c.s.Pool(target)))
				}
			}
		}
	}
}

// TestHashOf checks which parts of a source affect the hash.
func TestHashOf(t *testing.T) {
	from := netip.MustParseAddrPort
	for h, want := range map[tracker.Hash][2]bool{tracker.HashSource: {true, false}, tracker.HashSourcePort: {true, true}, tracker.HashNone: {}, 99: {}} {
		s := hashed(h, 0, 1, 1)
		one := s.HashOf(from("192.0.2.1:1000"), 7)
		if got := one != s.HashOf(from("192.0.2.2:1000"), 7); got != want[0] {
			t.Errorf("%v: the address affects the hash: %t", h, got)
		}
		if got := one != s.HashOf(from("192.0.2.1:1001"), 7); got != want[1] {
			t.Errorf("%v: the port affects the hash: %t", h, got)
		}
		if got := one != s.HashOf(from("192.0.2.1:1000"), 8); got != want[0] {
			t.Errorf("%v: the seed affects the hash: %t", h, got)
		}
	}
}
