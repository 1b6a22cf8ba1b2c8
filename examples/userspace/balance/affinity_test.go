package balance

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// clock is a clock that a test sets.
type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func newAffinity(timeout time.Duration, max int) (*Affinity, *clock) {
	a, c := NewAffinity(timeout, max), &clock{time.Unix(1e9, 0)}
	a.now = c.now
	return a, c
}

func TestAffinityKeepsAClientsEndpoint(t *testing.T) {
	a, clock := newAffinity(10*time.Second, 0)
	b := a.Wrap(&RoundRobin{})
	p := pool(1, 1, 1)
	other := netip.MustParseAddrPort("[2001:db8::1]:40000")
	expect := func(what string, pool []*tracker.Endpoint, c netip.AddrPort, want string) {
		t.Helper()
		if got := name(b.Pick(pool, c)); got != want {
			t.Errorf("%s: %s was sent to %s, want %s", what, c, got, want)
		}
	}
	expect("first", p, client, "a")
	expect("first", p, other, "b")
	for i := range 5 { // for longer than the timeout
		clock.t = clock.t.Add(9 * time.Second)
		expect("kept coming", p, netip.AddrPortFrom(client.Addr(), uint16(i)), "a")
	}
	expect("as an IPv6 socket sees it", p, netip.AddrPortFrom(netip.AddrFrom16(client.Addr().As16()), 40000), "a")
	expect("silent for long", p, other, "c")
	expect("out of the pool", p[1:], client, "b")
	expect("back in the pool", p, client, "b")
	p[1].Weight = 0
	expect("its endpoint takes no more", p, client, "c")
	p[1].Weight = 1
	clock.t = clock.t.Add(10 * time.Second)
	expect("silent for the timeout", p, client, "a")
	a.SetTimeout(time.Hour)
	clock.t = clock.t.Add(59 * time.Minute)
	expect("with a longer timeout", p, client, "a")
	expect("with nothing to choose from", nil, client, "-")
	expect("after that", p, client, "a")
}

func TestPoolsOfAServiceShareAffinity(t *testing.T) {
	a, _ := newAffinity(time.Minute, 0)
	cluster, local := a.Wrap(&RoundRobin{}), a.Wrap(&RoundRobin{})
	p := pool(1, 1, 1)
	if got := name(local.Pick(p[2:], client)) + name(cluster.Pick(p, client)) + name(cluster.Pick(p[:2], client)) + name(local.Pick(p[1:], client)); got != "ccab" {
		t.Errorf("chose %s", got)
	}
}

func TestAffinityDropsOldClients(t *testing.T) {
	a, clock := newAffinity(time.Minute, 100)
	b := a.Wrap(&RoundRobin{})
	p := pool(equal(7)...)
	for i := range 1000 {
		b.Pick(p, clientNumber(i))
		b.Pick(p, client) // always one of the most recent
	}
	if a.Len() != 100 {
		t.Errorf("%d clients are stored, want 100", a.Len())
	}
	if got := name(b.Pick(p, client)); got != "b" {
		t.Errorf("the busiest client was sent to %s", got)
	}
	clock.t = clock.t.Add(time.Minute)
	b.Pick(p, client)
	if a.Len() != 1 {
		t.Errorf("%d clients are stored after the timeout of all but one", a.Len())
	}
	off, _ := newAffinity(0, 0)
	if got := picks(off.Wrap(&RoundRobin{}), p, 3); got != "abc" || off.Len() != 0 {
		t.Errorf("without a timeout: %s, and %d clients are stored", got, off.Len())
	}
}

func TestParseAcceptsEveryName(t *testing.T) {
	want := map[string]string{
		"weighted-round-robin": "*balance.WeightedRoundRobin",
		"round-robin":          "*balance.RoundRobin",
		"least-connections":    "*balance.LeastConnections",
		"two-choices":          "*balance.TwoChoices",
		"source-hash":          "*balance.SourceHash",
	}
	if len(Names()) != len(want) {
		t.Errorf("names %v", Names())
	}
	for n, kind := range want {
		a, err := Parse(n)
		if err != nil || a.String() != n || fmt.Sprintf("%T", a.New(idle)) != kind {
			t.Errorf("%s: %s, %T, %v", n, a, a.New(idle), err)
		}
	}
	if _, err := Parse("Round-Robin"); !errors.Is(err, ErrUnknown) {
		t.Errorf("error %v", err)
	}
	if a := Algorithm(99); a.String() != "unknown" || a.New(nil).Pick(pool(1), client) == nil {
		t.Error("an unknown algorithm does not count as 0")
	}
}
