package balance

import (
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestMaglevAgreesWithTheKernelsTable compares the choice with that of a Service's table and
// hash, which kernels use, for changing pools.
func TestMaglevAgreesWithTheKernelsTable(t *testing.T) {
	const seed = 1234567890123
	pools := [][]*tracker.Endpoint{
		pool(1), pool(1, 2, 0, 3), pool(equal(5)...), pool(equal(30)...), pool(3, 2, 0, 1), pool(equal(31)...), pool(7, 7),
	}
	for hash, port := range map[tracker.Hash]bool{tracker.HashSource: false, tracker.HashSourcePort: true} {
		for _, slots := range []uint16{0, 1000} {
			b := &Maglev{Seed: seed, Slots: int(slots), Port: port}
			for round := range 30 {
				p := pools[(round*round)%len(pools)]
				s := &ruleset.Port{
					Spec:      &tracker.ServicePort{Hash: hash, HashBuckets: slots},
					Selection: tracker.Selection{Cluster: p},
				}
				tab := s.Maglev(ruleset.TargetCluster, seed)
				for i := range 50 {
					c := clientNumber(i)
					want := s.Pool(ruleset.TargetCluster)[tab.Find(s.HashOf(c, seed))]
					if got := b.Pick(slices.Clone(p), c); got != want {
						t.Fatalf("%v, %d slots: %s is sent to %s, not to %s", hash, slots, c, got, want)
					}
				}
				if len(b.tables) > keptTables {
					t.Fatalf("%d tables are kept", len(b.tables))
				}
			}
		}
	}
}

// TestMaglevMovesFewOtherClients leaves out an endpoint that cannot be reached.
func TestMaglevMovesFewOtherClients(t *testing.T) {
	p := pool(equal(10)...)
	b := &Maglev{Port: true, Slots: 1021}
	without := slices.Concat(p[:3], p[4:])
	moved, went := 0, map[*tracker.Endpoint]int{}
	const clients = 5000
	for i := range clients {
		c := netip.AddrPortFrom(client.Addr(), uint16(i))
		switch was, is := b.Pick(p, c), b.Pick(without, c); {
		case was == p[3]:
			went[is]++
		case was != is:
			moved++
		}
	}
	if moved > clients/20 {
		t.Errorf("%d of %d clients moved between the other endpoints", moved, clients)
	}
	if len(went) != 9 {
		t.Errorf("its clients went to %d of 9 endpoints", len(went))
	}
}

// TestSourceHashDistributesByWeight checks the choices of many clients. It uses no random
// numbers.
func TestSourceHashDistributesByWeight(t *testing.T) {
	const clients = 20000
	weights := []uint16{1, 1, 2, 4, 8, 0}
	p := pool(weights...)
	b := &SourceHash{}
	seen := make([]int, len(p))
	differ := 0
	for i := range clients {
		c := clientNumber(i)
		ep := b.Pick(p, c)
		if again := (&SourceHash{}).Pick(slices.Clone(p), netip.AddrPortFrom(c.Addr(), 7)); again != ep {
			t.Fatalf("%s: %s, then %s", c, ep, again)
		}
		if (&SourceHash{Seed: 1}).Pick(p, c) != ep {
			differ++
		}
		seen[slices.Index(p, ep)]++
	}
	for i, w := range weights {
		want := clients * float64(w) / 16
		if math.Abs(float64(seen[i])-want) > 5*math.Sqrt(want) {
			t.Errorf("of weights %v clients chose %v", weights, seen)
			break
		}
	}
	if differ < clients/2 {
		t.Errorf("another seed moves %d of %d clients", differ, clients)
	}
}

// TestSourceHashMovesFewClients adds and removes endpoints.
func TestSourceHashMovesFewClients(t *testing.T) {
	b := &SourceHash{}
	for _, n := range []int{2, 3, 10, 100} {
		p := pool(equal(n)...)
		gone := p[n/2]
		rest := slices.Concat(p[:n/2], p[n/2+1:])
		moved := 0
		const clients = 5000
		for i := range clients {
			c := clientNumber(i)
			with, without := b.Pick(p, c), b.Pick(rest, c)
			switch {
			case with == gone:
				moved++
			case with != without:
				t.Fatalf("%d endpoints: %s was moved from %s to %s when %s went", n, c, with, without, gone)
			}
		}
		want := float64(clients) / float64(n)
		if math.Abs(float64(moved)-want) > 5*math.Sqrt(want) {
			t.Errorf("%d endpoints: %d of %d clients moved", n, moved, clients)
		}
	}
}
