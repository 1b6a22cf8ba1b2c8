package ruleset

import (
	"context"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
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

// TestHooksSetWeightsAndHash sets weights and hashes in hooks and checks the
// resulting changes.
func TestHooksSetWeightsAndHash(t *testing.T) {
	weights, hash := map[string]uint16{}, tracker.HashNone
	trk, err := tracker.New(tracker.Config{
		OnService: func(_ *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			p.Hash = hash
			return nil
		},
		OnEndpoint: func(_ *discovery.EndpointSlice, ep *discovery.Endpoint, e *tracker.Endpoint) error {
			if w, ok := weights[ep.Addresses[0]]; ok {
				e.Weight = w
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	e := must.Get(NewEngine(Config{Source: trk, HashSeed: 77}))(t)
	var last *Delta
	c := e.Attach("test", BackendFunc(func(_ context.Context, d *Delta) error {
		copied := *d
		copied.Changes = slices.Clone(d.Changes)
		last = &copied
		return nil
	}))
	sync := func() Change {
		t.Helper()
		last = nil
		must.Do(t, c.Sync(context.Background()))
		if last == nil || len(last.Changes) != 1 {
			t.Fatalf("delta %+v", last)
		}
		return last.Changes[0]
	}
	trk.SetService(service("web", "10.96.0.1"))
	trk.SetSlice(slice("web", "10.0.0.1", "10.0.0.2"))
	trk.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	if sync(); last.Node.HashSeed != 77 {
		t.Errorf("seed %d", last.Node.HashSeed)
	}

	hash = tracker.HashSource
	trk.SetService(service("web", "10.96.0.1"))
	if ch := sync(); ch.Fields != FieldHash || ch.New.Hash() != tracker.HashSource {
		t.Errorf("what %s, hash %v", ch.Fields, ch.New.Hash())
	}
	v := e.Snapshot().Trace(Packet{From: netip.MustParseAddr("192.0.2.1"), InInterface: "eth0", Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort("10.96.0.1:80")})
	if v.Hash != tracker.HashSource || len(v.Endpoints) != 2 {
		t.Errorf("verdict %+v", v)
	}

	weights["10.0.0.1"] = 5
	trk.SetSlice(slice("web", "10.0.0.1", "10.0.0.2"))
	if ch := sync(); ch.Fields != FieldCluster|FieldEndpoints || ch.New.Selection.Cluster[0].Weight != 5 {
		t.Errorf("what %s: %v", ch.Fields, ch.New.Selection.Cluster)
	}
	// With weight 0 it leaves the pool but stays known.
	weights["10.0.0.1"] = 0
	trk.SetSlice(slice("web", "10.0.0.1", "10.0.0.2"))
	ch := sync()
	if ch.Fields != FieldCluster|FieldEndpoints || len(ch.New.Selection.Reachable) != 1 || len(ch.New.Endpoints) != 2 {
		t.Errorf("what %s: %v of %v", ch.Fields, ch.New.Selection.Reachable, ch.New.Endpoints)
	}
	weights["10.0.0.2"] = 0
	trk.SetSlice(slice("web", "10.0.0.1", "10.0.0.2"))
	if ch := sync(); ch.New.Frontends[0].Target != TargetReject || len(ch.New.Endpoints) != 2 {
		t.Errorf("target %v", ch.New.Frontends[0].Target)
	}
}
