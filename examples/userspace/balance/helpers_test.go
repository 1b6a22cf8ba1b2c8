package balance

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

var client = netip.MustParseAddrPort("192.0.2.1:40000")

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
func equal(n int) []uint16 {
	out := make([]uint16, n)
	for i := range out {
		out[i] = 1
	}
	return out
}

func name(ep *tracker.Endpoint) string {
	if ep == nil {
		return "-"
	}
	return string(rune('a' + ep.Addr.Addr().As4()[3]))
}

// picks calls b.Pick n times and returns the names of the endpoints.
func picks(b Balancer, pool []*tracker.Endpoint, n int) (s string) {
	for range n {
		s += name(b.Pick(pool, client))
	}
	return s
}

// clientNumber returns one of many addresses, of either family.
func clientNumber(i int) netip.AddrPort {
	if i%2 == 0 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}), uint16(i))
	}
	return netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", i)), uint16(i))
}

// idle is the load of endpoints without connections.
func idle(netip.AddrPort) int { return 0 }

func TestNoBalancerPicksWeightZero(t *testing.T) {
	for _, n := range Names() {
		a, err := Parse(n)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range []Balancer{a.New(idle), NewAffinity(1<<40, 0).Wrap(a.New(idle)), &Maglev{}} {
			for _, none := range [][]*tracker.Endpoint{nil, {}, pool(0), pool(0, 0, 0, 0, 0, 0)} {
				if ep := b.Pick(none, client); ep != nil {
					t.Errorf("%s: picked %s of %v", n, ep, none)
				}
			}
			seen := map[string]bool{}
			some := pool(0, 2, 0, 0, 0, 0, 0, 0, 0, 2)
			for i := range 2000 {
				ep := b.Pick(some, clientNumber(i))
				if ep == nil || ep.Weight == 0 {
					t.Fatalf("%s: picked %v", n, ep)
				}
				seen[name(ep)] = true
			}
			if len(seen) != 2 {
				t.Errorf("%s: of two endpoints only %v were picked", n, seen)
			}
		}
	}
}
