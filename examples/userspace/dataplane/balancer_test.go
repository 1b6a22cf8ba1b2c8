package dataplane

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

var someone = netip.MustParseAddrPort("192.0.2.1:40000")

// pool returns endpoints with these weights, named a, b, c and so on by the last
// byte of their addresses.
func pool(weights ...uint16) []*tracker.Endpoint {
	var out []*tracker.Endpoint
	for i, w := range weights {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80)
		out = append(out, &tracker.Endpoint{Addr: addr, Ready: true, Serving: true, Weight: w})
	}
	return out
}

// equal returns n weights of 1.
func equal(n int) []uint16 { return slices.Repeat([]uint16{1}, n) }

func letter(ep *tracker.Endpoint) string {
	if ep == nil {
		return "-"
	}
	return string(rune('a' + ep.Addr.Addr().As4()[3]))
}

// balancing returns a balancer for endpoints with a load, or without connections if that is nil.
func balancing(m method, load loads) *balancer {
	b := newBalancer(load.load)
	b.set(m)
	return b
}

// loads holds numbers of connections by the last byte of the address.
type loads []int

func (l loads) load(a netip.AddrPort) int {
	if l == nil {
		return 0
	}
	return l[a.Addr().As4()[3]]
}

// picks picks n endpoints and returns their letters.
func picks(b *balancer, pool []*tracker.Endpoint, n int) (s string) {
	for range n {
		s += letter(b.pick(ruleset.TargetCluster, pool, someone))
	}
	return s
}

// clientNumber returns one of many addresses, of either family.
func clientNumber(i int) netip.AddrPort {
	if i%2 == 0 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, byte(i >> 16), byte(i >> 8), byte(i)}), uint16(i))
	}
	return netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf("2001:db8::%x:%x", i>>16, i&0xffff)), uint16(i))
}

func TestNoMethodPicksWeightZero(t *testing.T) {
	t.Parallel()
	for _, m := range []method{
		{}, {algorithm: WeightedRoundRobin}, {algorithm: RoundRobin}, {algorithm: LeastConnections},
		{affinity: time.Hour}, {hash: tracker.HashSource}, {hash: tracker.HashSourcePort},
	} {
		b := balancing(m, nil)
		for _, none := range [][]*tracker.Endpoint{nil, {}, pool(0), pool(0, 0, 0, 0, 0, 0)} {
			if ep := b.pick(ruleset.TargetCluster, none, someone); ep != nil {
				t.Errorf("%+v: picked %s of %v", m, ep, none)
			}
		}
		seen := map[string]bool{}
		some := pool(0, 2, 0, 0, 0, 0, 0, 0, 0, 2)
		for i := range 2000 {
			ep := b.pick(ruleset.TargetCluster, some, clientNumber(i))
			if ep == nil || ep.Weight == 0 {
				t.Fatalf("%+v: picked %v", m, ep)
			}
			seen[letter(ep)] = true
		}
		if len(seen) != 2 {
			t.Errorf("%+v: of two endpoints only %v were picked", m, seen)
		}
	}
}

// clock is a clock that a test sets.
type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func withAffinity(timeout time.Duration) (*balancer, *clock) {
	b, c := balancing(method{affinity: timeout}, nil), &clock{time.Unix(1e9, 0)}
	b.now = c.now
	return b, c
}

func TestAffinityKeepsAClientsEndpoint(t *testing.T) {
	t.Parallel()
	b, clock := withAffinity(10 * time.Second)
	p := pool(1, 1, 1)
	other := netip.MustParseAddrPort("[2001:db8::1]:40000")
	expect := func(what string, pool []*tracker.Endpoint, c netip.AddrPort, want string) {
		t.Helper()
		if got := letter(b.pick(ruleset.TargetCluster, pool, c)); got != want {
			t.Errorf("%s: %s was sent to %s, want %s", what, c, got, want)
		}
	}
	expect("first", p, someone, "a")
	expect("first", p, other, "b")
	for i := range 5 { // for longer than the timeout
		clock.t = clock.t.Add(9 * time.Second)
		expect("kept coming", p, netip.AddrPortFrom(someone.Addr(), uint16(i)), "a")
	}
	expect("as an IPv6 socket sees it", p, netip.AddrPortFrom(netip.AddrFrom16(someone.Addr().As16()), 40000), "a")
	expect("silent for long", p, other, "c")
	expect("out of the pool", p[1:], someone, "b")
	expect("back in the pool", p, someone, "b")
	p[1].Weight = 0
	expect("its endpoint takes no more", p, someone, "c")
	p[1].Weight = 1
	clock.t = clock.t.Add(10 * time.Second)
	expect("silent for the timeout", p, someone, "a")
	b.set(method{affinity: time.Hour})
	clock.t = clock.t.Add(59 * time.Minute)
	expect("with a longer timeout", p, someone, "a")
	expect("with nothing to choose from", nil, someone, "-")
	expect("after that", p, someone, "a")
}

func TestPoolsOfAServiceShareAffinity(t *testing.T) {
	t.Parallel()
	b, _ := withAffinity(time.Minute)
	p := pool(1, 1, 1)
	got := ""
	for _, c := range []struct {
		target ruleset.Target
		pool   []*tracker.Endpoint
	}{{ruleset.TargetLocal, p[2:]}, {ruleset.TargetCluster, p}, {ruleset.TargetCluster, p[:2]}, {ruleset.TargetLocal, p[1:]}} {
		got += letter(b.pick(c.target, c.pool, someone))
	}
	if got != "ccab" {
		t.Errorf("chose %s", got)
	}
}

func TestAffinityDropsOldClients(t *testing.T) {
	t.Parallel()
	b, clock := withAffinity(time.Minute)
	p := pool(equal(7)...)
	first := letter(b.pick(ruleset.TargetCluster, p, someone))
	for i := range maxClients + 1000 {
		b.pick(ruleset.TargetCluster, p, clientNumber(i))
		b.pick(ruleset.TargetCluster, p, someone) // always one of the most recent
	}
	if n := len(b.clients); n < maxClients || n > maxClients+1 || b.recent.Len() != n {
		t.Errorf("%d clients are stored, want %d", n, maxClients)
	}
	if got := letter(b.pick(ruleset.TargetCluster, p, someone)); got != first {
		t.Errorf("the busiest client was sent to %s and %s", first, got)
	}
	clock.t = clock.t.Add(time.Minute)
	b.pick(ruleset.TargetCluster, p, someone)
	if len(b.clients) != 1 {
		t.Errorf("%d clients are stored after the timeout of all but one", len(b.clients))
	}
	b.set(method{})
	if got := picks(b, p, 3); got != "abc" || len(b.clients) != 0 {
		t.Errorf("without a timeout: %s, and %d clients are stored", got, len(b.clients))
	}
}

// TestHashAgreesWithTheKernelsTable compares the choice with that of a Service's table and
// hash, which kernels use, for changing pools.
func TestHashAgreesWithTheKernelsTable(t *testing.T) {
	t.Parallel()
	const seed = 1234567890123
	pools := [][]*tracker.Endpoint{
		pool(1), pool(1, 2, 0, 3), pool(equal(5)...), pool(equal(30)...), pool(3, 2, 0, 1), pool(equal(31)...), pool(7, 7),
	}
	for _, hash := range []tracker.Hash{tracker.HashSource, tracker.HashSourcePort} {
		for _, slots := range []uint16{0, 1000} {
			b := newBalancer(nil)
			for round := range 30 {
				p := pools[(round*round)%len(pools)]
				s := &ruleset.Port{
					Spec:      &tracker.ServicePort{Hash: hash, HashBuckets: slots},
					Selection: tracker.Selection{Cluster: p},
				}
				b.set(methodOf(s, RoundRobin, &ruleset.Node{HashSeed: seed}))
				tab := s.Maglev(ruleset.TargetCluster, seed)
				for i := range 50 {
					c := clientNumber(i)
					want := s.Pool(ruleset.TargetCluster)[tab.Find(s.HashOf(c, seed))]
					if got := b.pick(ruleset.TargetCluster, slices.Clone(p), c); got != want {
						t.Fatalf("%v, %d slots: %s is sent to %s, not to %s", hash, slots, c, got, want)
					}
				}
				if len(b.tables) > maxTables {
					t.Fatalf("%d tables are kept", len(b.tables))
				}
			}
		}
	}
}

// TestHashMovesFewOtherClients leaves out an endpoint that cannot be reached.
func TestHashMovesFewOtherClients(t *testing.T) {
	t.Parallel()
	p := pool(equal(10)...)
	b := balancing(method{hash: tracker.HashSourcePort, clusterSlots: 1021}, nil)
	without := slices.Concat(p[:3], p[4:])
	moved, went := 0, map[*tracker.Endpoint]int{}
	const clients = 5000
	for i := range clients {
		c := netip.AddrPortFrom(someone.Addr(), uint16(i))
		switch was, is := b.pick(ruleset.TargetCluster, p, c), b.pick(ruleset.TargetCluster, without, c); {
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

func TestLeastConnectionsPicksTheLightest(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	m := method{algorithm: LeastConnections}
	for range 2000 {
		n := 1 + r.IntN(9)
		l, weights := make(loads, n), make([]uint16, n)
		for i := range n {
			l[i], weights[i] = r.IntN(6), uint16(1+r.IntN(4))
		}
		p := pool(weights...)
		ep := balancing(m, l).pick(ruleset.TargetCluster, p, someone)
		cost := func(i int) float64 { return float64(l[i]+1) / float64(weights[i]) }
		for i := range p {
			if cost(i) < cost(int(ep.Addr.Addr().As4()[3])) {
				t.Fatalf("connections %v, weights %v: picked %s", l, weights, letter(ep))
			}
		}
	}
	// Equal endpoints are chosen equally often.
	seen := map[string]int{}
	for range 4000 {
		seen[picks(balancing(m, loads{1, 0, 0, 0, 0}), pool(equal(5)...), 1)]++
	}
	for _, who := range []string{"b", "c", "d", "e"} {
		if n := seen[who]; n < 800 || n > 1200 { // seven standard deviations
			t.Errorf("of four equals %s was picked %d times of 4000", who, n)
		}
	}
	if seen["a"] != 0 {
		t.Error("the endpoint with the most connections was picked")
	}
}

func TestRoundRobinFollowsAChangedPool(t *testing.T) {
	t.Parallel()
	p := pool(9, 1, 1, 1, 1)
	b := balancing(method{algorithm: RoundRobin}, nil)
	for _, some := range [][]int{{0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3}, {0, 2, 3, 4}, {4}, {0, 1}} {
		var now []*tracker.Endpoint
		for _, i := range some {
			now = append(now, p[i])
		}
		got := picks(b, now, 10*len(some))
		for _, ep := range now {
			if n := strings.Count(got, letter(ep)); n < 9 || n > 11 {
				t.Errorf("among %v: %s", some, got)
			}
		}
	}
	if got := picks(balancing(method{algorithm: RoundRobin}, nil), pool(7, 0, 1), 4); got != "acac" {
		t.Errorf("weights 7, 0 and 1: %s", got)
	}
}

func TestWeightedRoundRobinIsSmooth(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		weights []uint16
		want    string
	}{
		{[]uint16{1, 1, 1}, "abcabc"},
		{[]uint16{5, 1, 1}, "aabacaaaabacaa"},
		{[]uint16{1, 2}, "babbab"},
		{[]uint16{0, 2, 1}, "bcbbcb"},
	} {
		if got := picks(balancing(method{}, nil), pool(c.weights...), len(c.want)); got != c.want {
			t.Errorf("weights %v: %s, want %s", c.weights, got, c.want)
		}
	}
}

// TestWeightedRoundRobinPicksByWeight checks that in a round each endpoint is picked exactly
// as often as its weight, and that at no time it is a full pick away from its share.
func TestWeightedRoundRobinPicksByWeight(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		weights := make([]uint16, 1+r.IntN(8))
		total := 0
		for i := range weights {
			weights[i] = uint16(r.IntN(20))
			total += int(weights[i])
		}
		p, b := pool(weights...), balancing(method{algorithm: WeightedRoundRobin}, nil)
		got := make([]int, len(p))
		for n := 1; n <= total; n++ {
			got[slices.Index(p, b.pick(ruleset.TargetCluster, p, someone))]++
			for i := range p {
				if share := float64(n) * float64(weights[i]) / float64(total); math.Abs(float64(got[i])-share) >= float64(len(p)) {
					t.Fatalf("weights %v: after %d picks %v", weights, n, got)
				}
			}
		}
		for i, w := range weights {
			if got[i] != int(w) {
				t.Fatalf("weights %v: %v", weights, got)
			}
		}
	}
}

// TestWeightedRoundRobinLimitsDebt checks that the debt of an endpoint from a time of large
// weights does not delay its picks when weights are small.
func TestWeightedRoundRobinLimitsDebt(t *testing.T) {
	t.Parallel()
	b := balancing(method{algorithm: WeightedRoundRobin}, nil)
	b.pick(ruleset.TargetCluster, pool(65535, 65534, 65533), someone)
	got := picks(b, pool(1, 1, 1), 30)
	for _, who := range "abc" {
		if n := strings.Count(got, string(who)); n < 8 {
			t.Errorf("%c was picked %d times of 30: %s", who, n, got)
		}
	}
}

func TestWeightedRoundRobinDropsOldEndpoints(t *testing.T) {
	t.Parallel()
	b := balancing(method{algorithm: WeightedRoundRobin}, nil)
	many := pool(equal(5000)...)
	for i := 0; i+10 <= len(many); i += 10 {
		b.pick(ruleset.TargetCluster, many[i:i+10], someone)
	}
	if n := len(b.credit[ruleset.TargetCluster]); n > 50 {
		t.Errorf("%d endpoints are stored for a pool of 10", n)
	}
}

// BenchmarkPick measures one choice, the cost for one connection.
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{3, 100, 1000} {
		p := pool(equal(n)...)
		for name, m := range map[string]method{
			"hash": {hash: tracker.HashSourcePort}, "affinity": {affinity: time.Hour},
			string(WeightedRoundRobin): {algorithm: WeightedRoundRobin}, string(LeastConnections): {algorithm: LeastConnections},
		} {
			b.Run(fmt.Sprintf("%s/endpoints=%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				bal := balancing(m, nil)
				for b.Loop() {
					if bal.pick(ruleset.TargetCluster, p, someone) == nil {
						b.Fatal("nothing picked")
					}
				}
			})
		}
	}
}
