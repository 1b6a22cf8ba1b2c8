package reset

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/ruleset"
)

// ranged returns a Service with the ports 8000 to 8099 that lead to target and the ports behind it,
// and a NodePort.
func ranged(name, clusterIP string, target uint16, endpoints ...string) *ruleset.Port {
	s := endpointsOf(name, clusterIP, endpoints...)
	s.Frontends[0].Port, s.Frontends[0].LastPort, s.Frontends[0].TargetPort = 8000, 8099, target
	return s
}

func aPair(frontend, endpoint string) pair {
	return pair{netip.MustParseAddrPort(frontend), netip.MustParseAddrPort(endpoint)}
}

// rangeBed is a Resetter with a table in memory, in simulated time.
type rangeBed struct {
	t *testing.T
	*memory
	r     *Resetter
	plane ruleset.Backend
	// during, if not nil, runs while a delta is applied.
	during func()
}

func inRangeBed(t *testing.T, c Config, f func(*rangeBed)) {
	synctest.Test(t, func(t *testing.T) {
		b := &rangeBed{t: t, memory: &memory{pairs: map[pair]time.Time{}}}
		r, err := newResetter(t.Context(), c, b.memory)
		if err != nil {
			t.Fatal(err)
		}
		b.r, b.plane = r, r.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error {
			if b.during != nil {
				b.during()
			}
			return nil
		}))
		f(b)
	})
}

func (b *rangeBed) apply(old, now *ruleset.Port) {
	b.t.Helper()
	c := ruleset.Change{Old: old, New: now}
	for _, s := range []*ruleset.Port{old, now} {
		if s != nil {
			c.Key = s.Key
		}
	}
	if err := b.plane.Apply(b.t.Context(), &ruleset.Delta{Changes: []ruleset.Change{c}}); err != nil {
		b.t.Fatal(err)
	}
}

// want waits for the delay and checks the written pairs.
func (b *rangeBed) want(pairs ...pair) {
	b.t.Helper()
	b.step(defaultDelay)
	b.wantNow(pairs...)
}

// step waits and writes what is due.
func (b *rangeBed) step(wait time.Duration) {
	b.t.Helper()
	time.Sleep(wait)
	if _, err := b.r.step(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

func (b *rangeBed) wantNow(pairs ...pair) {
	b.t.Helper()
	got, _ := b.list(b.t.Context())
	for w := range got {
		if !slices.Contains(pairs, w) {
			b.t.Errorf("%v is written", w)
		}
	}
	for _, w := range pairs {
		if _, ok := got[w]; !ok {
			b.t.Errorf("%v is missing", w)
		}
	}
}

// The endpoints' own port, 70, means nothing to ranges.
const podA, podB = "10.244.0.1:70", "10.244.0.2:70"

var nodePortA = aPair("0.0.0.0:30080", podA)

// TestPairsOfRangesAreThoseOfConnections loses an endpoint of a range.
func TestPairsOfRangesAreThoseOfConnections(t *testing.T) {
	for _, target := range []uint16{8000, 9000} {
		inRangeBed(t, Config{}, func(b *rangeBed) {
			port := map[uint16][3]string{8000: {"8000", "8050", "8099"}, 9000: {"9000", "9050", "9099"}}[target]
			stale := []pair{
				aPair("10.96.0.1:8000", "10.244.0.1:"+port[0]),
				aPair("10.96.0.1:8050", "10.244.0.1:"+port[1]),
				aPair("10.96.0.1:8099", "10.244.0.1:"+port[2]),
			}
			b.open = append(slices.Clone(stale),
				aPair("10.96.0.1:8050", "10.244.0.2:"+port[1]), // another endpoint
				aPair("10.96.0.1:8050", "10.244.0.1:7050"),     // a single port of another Service
				aPair("10.96.0.1:8100", "10.244.0.1:8100"),     // beside the range
				aPair("10.96.0.1:7999", "10.244.0.1:7999"),     //
				aPair("10.96.0.2:8050", "10.244.0.1:"+port[1]), // another address
			)
			all, less := ranged("rtp", "10.96.0.1", target, podA, podB), ranged("rtp", "10.96.0.1", target, podB)
			b.apply(nil, all)
			b.apply(all, less)
			if _, err := b.r.step(t.Context()); err != nil || b.asks != 0 {
				t.Errorf("before the delay: %v, asked %d times", err, b.asks)
			}
			b.wantNow()
			b.want(append(stale, nodePortA)...)
			if b.asks != 1 {
				t.Errorf("the connections were read %d times", b.asks)
			}
			// The endpoint returns, with another port of its own.
			b.apply(less, ranged("rtp", "10.96.0.1", target, "10.244.0.1:1", podB))
			b.wantNow(nodePortA)
			b.want(nodePortA)
			if n := len(b.r.plan.lost); n != 0 {
				t.Errorf("%d ranges wait", n)
			}
		})
	}
}

// TestServiceWithoutRangesReadsNoConnections also checks that nothing is kept for it.
func TestServiceWithoutRangesReadsNoConnections(t *testing.T) {
	inRangeBed(t, Config{}, func(b *rangeBed) {
		all := endpointsOf("web", "10.96.0.1", podA, podB)
		b.apply(nil, all)
		b.apply(all, endpointsOf("web", "10.96.0.1", podB))
		b.want(nodePortA, aPair("10.96.0.1:80", podA))
		if b.asks != 0 || b.r.plan.ranged != nil || b.r.plan.lost != nil {
			t.Errorf("asked %d times, %v, %v", b.asks, b.r.plan.ranged, b.r.plan.lost)
		}
	})
}

// TestConnectionsThroughRangesStay has reasons for which an endpoint of a range did not vanish.
func TestConnectionsThroughRangesStay(t *testing.T) {
	open := aPair("10.96.0.1:8050", "10.244.0.1:8050")
	all, less := ranged("rtp", "10.96.0.1", 8000, podA, podB), ranged("rtp", "10.96.0.1", 8000, podB)
	for name, c := range map[string]struct {
		exists string
		change func(*rangeBed)
		want   []pair
	}{
		"it vanished": {"", func(b *rangeBed) { b.apply(all, less) }, []pair{open, nodePortA}},
		"it returned within the delay": {"", func(b *rangeBed) {
			b.apply(all, less)
			b.apply(less, ranged("rtp", "10.96.0.1", 8000, "10.244.0.1:1", podB))
		}, []pair{nodePortA}},
		"it terminated": {"", func(b *rangeBed) {
			ending := ranged("rtp", "10.96.0.1", 8000, podA, podB)
			ending.Endpoints[0].Terminating = true
			b.apply(all, ending)
			b.apply(ending, less)
		}, nil},
		"its own port changed": {"", func(b *rangeBed) {
			b.apply(all, ranged("rtp", "10.96.0.1", 8000, "10.244.0.1:1", podB))
		}, []pair{nodePortA}},
		"a single port has it": {"10.244.0.1:8050", func(b *rangeBed) { b.apply(all, less) }, []pair{nodePortA}},
		"another range has it": {"", func(b *rangeBed) {
			b.apply(nil, ranged("other", "10.96.0.2", 8010, "10.244.0.1:1"))
			b.apply(all, less)
		}, []pair{nodePortA}},
		"another range has other ports of it": {"", func(b *rangeBed) {
			b.apply(nil, ranged("other", "10.96.0.2", 8051, "10.244.0.1:1"))
			b.apply(all, less)
		}, []pair{open, nodePortA}},
		"another range had it": {"", func(b *rangeBed) {
			other := ranged("other", "10.96.0.2", 8010, "10.244.0.1:1")
			b.apply(nil, other)
			b.apply(other, nil)
			b.apply(all, less)
		}, []pair{open, nodePortA}},
		"a single port gets it within the delay": {"", func(b *rangeBed) {
			b.apply(all, less)
			b.apply(nil, endpointsOf("web", "10.96.0.3", "10.244.0.1:8050"))
		}, []pair{nodePortA}},
		"the Service was deleted": {"", func(b *rangeBed) { b.apply(all, nil) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			exists := func(a netip.AddrPort) bool { return a.String() == c.exists }
			inRangeBed(t, Config{Exists: exists}, func(b *rangeBed) {
				b.open = []pair{open}
				b.apply(nil, all)
				c.change(b)
				b.want(c.want...)
			})
		})
	}
}

// TestFailedReadIsRepeated has a table of connection tracking that cannot be read.
func TestFailedReadIsRepeated(t *testing.T) {
	inRangeBed(t, Config{}, func(b *rangeBed) {
		open := aPair("10.96.0.1:8050", "10.244.0.1:8050")
		b.open, b.fail = []pair{open}, errors.New("no")
		all := ranged("rtp", "10.96.0.1", 8000, podA, podB)
		b.apply(nil, all)
		b.apply(all, ranged("rtp", "10.96.0.1", 8000, podB))
		b.want()
		b.fail = nil
		b.want(open, nodePortA)
		if _, err := b.r.step(t.Context()); err != nil || b.asks != 2 {
			t.Errorf("%v, asked %d times", err, b.asks)
		}
	})
}

// TestDelayPassesWhileEndpointReturns has the delay end between the time at which the data plane
// has an endpoint again and the acknowledgment.
func TestDelayPassesWhileEndpointReturns(t *testing.T) {
	all, less := ranged("rtp", "10.96.0.1", 8000, podA, podB), ranged("rtp", "10.96.0.1", 8000, podB)
	for name, change := range map[string][2]*ruleset.Port{
		"to the range":     {less, all},
		"to another range": {nil, ranged("other", "10.96.0.2", 8040, podA)},
		"to a single port": {nil, endpointsOf("web", "10.96.0.3", "10.244.0.1:8050")},
	} {
		inRangeBed(t, Config{}, func(b *rangeBed) {
			open := aPair("10.96.0.1:8050", "10.244.0.1:8050")
			b.open = []pair{open}
			b.apply(nil, all)
			b.apply(all, less)
			b.during = func() {
				time.Sleep(defaultDelay)
				if _, err := b.r.step(t.Context()); err != nil {
					t.Error(err)
				}
				pairs, _ := b.list(t.Context())
				if _, ok := pairs[open]; ok {
					t.Errorf("%s: %v is written", name, open)
				}
			}
			b.apply(change[0], change[1])
		})
	}
}

// TestEndpointReturnsWhileConnectionsAreRead applies a delta while the table of connection tracking
// is read.
func TestEndpointReturnsWhileConnectionsAreRead(t *testing.T) {
	inRangeBed(t, Config{}, func(b *rangeBed) {
		open := aPair("10.96.0.1:8050", "10.244.0.1:8050")
		b.open = []pair{open}
		all, less := ranged("rtp", "10.96.0.1", 8000, podA, podB), ranged("rtp", "10.96.0.1", 8000, podB)
		b.apply(nil, all)
		b.apply(all, less)
		b.reading = func() { b.apply(less, all); b.apply(all, nil) }
		b.want()
	})
}

// TestRangesAreWithinTheLimit has more connections and endpoints than pairs.
func TestRangesAreWithinTheLimit(t *testing.T) {
	for _, limit := range []int{1, 3} {
		inRangeBed(t, Config{Limit: limit}, func(b *rangeBed) {
			for _, e := range []string{"1", "2"} {
				for _, port := range []string{"8000", "8001", "8002", "8003"} {
					b.open = append(b.open, aPair("10.96.0.1:"+port, "10.244.0."+e+":"+port))
				}
			}
			all := ranged("rtp", "10.96.0.1", 8000, podA, podB)
			b.apply(nil, all)
			b.apply(all, ranged("rtp", "10.96.0.1", 8000))
			if n := len(b.r.plan.lost); n > limit {
				t.Errorf("%d ranges wait, more than %d", n, limit)
			}
			time.Sleep(defaultDelay)
			if _, err := b.r.step(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got, _ := b.list(t.Context()); len(got) != limit {
				t.Errorf("%d pairs, want the limit of %d", len(got), limit)
			}
		})
	}
}
