package reset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// memory is a table in memory. If fail is not nil, add writes the pairs and returns it, and remove returns it.
type memory struct {
	mu    sync.Mutex
	pairs map[pair]time.Time
	fail  error
	// asked is the number of calls of destroy, and cannot makes them fail.
	asked  int
	cannot bool
}

func (m *memory) add(_ context.Context, pairs []pair) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range pairs {
		m.pairs[w] = time.Now().Add(lifetime)
	}
	return m.fail
}

func (m *memory) remove(_ context.Context, pairs []pair) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil && len(pairs) != 0 {
		return m.fail
	}
	for _, w := range pairs {
		delete(m.pairs, w)
	}
	return nil
}

func (m *memory) list(context.Context) (map[pair]time.Duration, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[pair]time.Duration{}
	for w, at := range m.pairs {
		if left := time.Until(at); left > 0 {
			out[w] = left
		}
	}
	return out, nil
}

func (m *memory) close() error { return nil }

// destroy counts the pairs that are wanted as one socket each, unless the kernel cannot.
func (m *memory) destroy(_ context.Context, to func(netip.AddrPort) bool, wanted func(pair) bool) (n int, err error) {
	m.mu.Lock()
	m.asked++
	pairs := slices.Collect(maps.Keys(m.pairs))
	m.mu.Unlock()
	if m.cannot {
		return 0, syscall.EOPNOTSUPP
	}
	for _, w := range pairs {
		if to(w.frontend) && wanted(w) {
			n++
		}
	}
	return n, nil
}

// endpointsOf returns a Service with a cluster IP and endpoints.
func endpointsOf(name, clusterIP string, endpoints ...string) *ruleset.Port {
	k := tracker.Key{Family: tracker.IPv4}
	k.Namespace, k.Name, k.Protocol = "shop", name, v1.ProtocolTCP
	s := &ruleset.Port{Key: k, Frontends: []ruleset.Frontend{
		{Kind: ruleset.KindClusterIP, Addr: netip.MustParseAddr(clusterIP), Port: 80},
		{Kind: ruleset.KindNodePort, Port: 30080},
	}}
	for _, a := range endpoints {
		s.Endpoints = append(s.Endpoints, &tracker.Endpoint{Addr: netip.MustParseAddrPort(a), Ready: true, Serving: true})
	}
	return s
}

func changed(old, now *ruleset.Port) *ruleset.Delta {
	c := ruleset.Change{Old: old, New: now}
	if c.Key = old.Key; now != nil {
		c.Key = now.Key
	}
	return &ruleset.Delta{Changes: []ruleset.Change{c}}
}

// bed is a Resetter with a table in memory, in simulated time.
type bed struct {
	t *testing.T
	*memory
	r       *Resetter
	plane   ruleset.Backend
	refused error // what the wrapped Backend returns
}

func inBed(t *testing.T, c Config, f func(*bed)) {
	synctest.Test(t, func(t *testing.T) {
		b := &bed{t: t, memory: &memory{pairs: map[pair]time.Time{}}}
		b.r = must.Get(newResetter(t.Context(), c, b.memory))(t)
		b.plane = b.r.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return b.refused }))
		f(b)
	})
}

func (b *bed) apply(old, now *ruleset.Port) {
	b.t.Helper()
	if err := b.plane.Apply(b.t.Context(), changed(old, now)); !errors.Is(err, b.refused) {
		b.t.Fatal(err)
	}
}

// run runs the Resetter until the test calls stop.
func (b *bed) run() (stop func()) {
	ctx, cancel := context.WithCancel(b.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.r.Run(ctx) }()
	return func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			b.t.Error(err)
		}
	}
}

// TestPairsFollowEndpoints runs a Resetter in simulated time.
func TestPairsFollowEndpoints(t *testing.T) {
	inBed(t, Config{Limit: 4}, func(m *bed) {
		t, r, apply := m.t, m.r, m.apply
		stop := m.run()
		want := func(after time.Duration, endpoints ...string) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			got := map[string]int{}
			left, _ := m.list(t.Context())
			for w := range left {
				got[w.endpoint.String()]++
			}
			if keys := slices.Sorted(maps.Keys(got)); !slices.Equal(keys, endpoints) {
				t.Errorf("pairs of %v, want %v", keys, endpoints)
			}
		}
		const a, b, c = "10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.3:8080"
		all := endpointsOf("web", "10.96.0.1", a, b, c)
		less := endpointsOf("web", "10.96.0.1", b, c)

		// A change that the backend refuses says nothing.
		m.refused = errors.New("refused")
		apply(all, less)
		want(2 * defaultDelay)
		m.refused = &ruleset.PartialError{Failed: map[tracker.Key]error{all.Key: errors.New("refused")}}
		apply(all, less)
		want(2 * defaultDelay)
		m.refused = nil

		apply(all, less)
		want(defaultDelay - time.Millisecond)
		want(2*time.Millisecond, a)
		// A return within the delay, and one behind it.
		apply(less, endpointsOf("web", "10.96.0.1", a))
		apply(endpointsOf("web", "10.96.0.1", a), all)
		want(2 * defaultDelay)
		// A deleted Service keeps its connections.
		apply(all, nil)
		want(2 * defaultDelay)
		// The limit: two endpoints with two addresses each. The oldest gives way.
		apply(all, endpointsOf("web", "10.96.0.1"))
		want(2*defaultDelay, b, c)
		if left, _ := m.list(t.Context()); len(left) != 4 {
			t.Errorf("%d pairs, want the limit of 4", len(left))
		}
		// A table that cannot be changed keeps the endpoint from getting connections.
		m.fail = errors.New("no")
		if err := m.plane.Apply(t.Context(), changed(endpointsOf("web", "10.96.0.1"), all)); !errors.Is(err, m.fail) {
			t.Errorf("%v, want the table's error", err)
		}
		m.fail = nil
		apply(endpointsOf("web", "10.96.0.1"), all)
		want(0)
		// A node fails: its endpoint is not ready, then terminating, and then gone.
		notReady, terminating := endpointsOf("web", "10.96.0.1", a, b, c), endpointsOf("web", "10.96.0.1", a, b, c)
		notReady.Endpoints[0] = &tracker.Endpoint{Addr: netip.MustParseAddrPort(a)}
		terminating.Endpoints[0] = &tracker.Endpoint{Addr: netip.MustParseAddrPort(a), Terminating: true}
		apply(all, notReady)
		want(2 * defaultDelay)
		apply(notReady, terminating)
		want(2 * defaultDelay)
		apply(terminating, less)
		want(2*defaultDelay, a)
		apply(less, all)
		want(0)
		// Pairs end by themselves.
		apply(all, less)
		want(2*defaultDelay, a)
		want(lifetime)
		if len(r.plan.endpoints) != 0 || r.plan.held.Len() != 0 {
			t.Errorf("left %v, %d pairs", r.plan.endpoints, r.plan.held.Len())
		}
		stop()
	})
}

// TestTraceCountsEndpointsAndSockets also checks that a kernel that cannot destroy sockets is asked
// once.
func TestTraceCountsEndpointsAndSockets(t *testing.T) {
	for _, cannot := range []bool{false, true} {
		var got [][2]int
		inBed(t, Config{DestroySockets: true, Hooks: &Hooks{Ended: func(endpoints, sockets int) { got = append(got, [2]int{endpoints, sockets}) }}}, func(m *bed) {
			m.cannot = cannot
			one := endpointsOf("web", "10.96.0.1", "10.244.0.3:8080")
			for _, c := range [][2]*ruleset.Port{{endpointsOf("web", "10.96.0.1", "10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.3:8080"), one}, {one, endpointsOf("web", "10.96.0.1")}} {
				m.apply(c[0], c[1])
				m.step(defaultDelay)
			}
			// Each endpoint had a cluster IP and a NodePort.
			want, asked := [][2]int{{2, 4}, {1, 2}}, 2
			if cannot {
				want, asked = [][2]int{{2, 0}, {1, 0}}, 1
			}
			if !slices.Equal(got, want) || m.asked != asked {
				t.Errorf("the kernel cannot: %v: %v, asked %d times, want %v and %d", cannot, got, m.asked, want, asked)
			}
		})
	}
}

func TestInvalidConfigIsRejected(t *testing.T) {
	for _, c := range []Config{{Delay: -1}, {Limit: -1}} {
		if _, err := New(t.Context(), c); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// manyFrontends returns a Service of a namespace with n ports at its cluster IP, and endpoints.
func manyFrontends(namespace, clusterIP string, n int, endpoints ...string) *ruleset.Port {
	s := endpointsOf("many", clusterIP, endpoints...)
	s.Key.Namespace, s.Frontends = namespace, nil
	for i := range n {
		s.Frontends = append(s.Frontends, ruleset.Frontend{Kind: ruleset.KindClusterIP, Addr: netip.MustParseAddr(clusterIP), Port: uint16(1000 + i)})
	}
	return s
}

func aPair(frontend, endpoint string) pair {
	return pair{netip.MustParseAddrPort(frontend), netip.MustParseAddrPort(endpoint)}
}

// want waits for the delay and checks the written pairs.
func (b *bed) want(pairs ...pair) {
	b.t.Helper()
	b.step(defaultDelay)
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

// step waits and writes what is due.
func (b *bed) step(wait time.Duration) {
	b.t.Helper()
	time.Sleep(wait)
	b.r.step(b.t.Context())
}

// TestNamespacesShareTheLimit has one namespace lose more pairs than the limit, before and after
// another one, and before the pairs are written and after.
func TestNamespacesShareTheLimit(t *testing.T) {
	const limit = 100
	for _, written := range []bool{false, true} {
		var logged bytes.Buffer
		gave := 0
		c := Config{Limit: limit, Log: slog.New(slog.NewTextHandler(&logged, nil)), Hooks: &Hooks{Limited: func(n int) { gave += n }}}
		inBed(t, c, func(b *bed) {
			lose := func(namespace, clusterIP string, n int, endpoint string) {
				b.apply(manyFrontends(namespace, clusterIP, n, endpoint), manyFrontends(namespace, clusterIP, n))
				if written {
					b.step(defaultDelay)
				}
			}
			has := func(endpoint string) (n int) {
				for w := range b.pairs {
					if w.endpoint.String() == endpoint {
						n++
					}
				}
				return n
			}
			lose("victim", "10.97.0.1", 10, "10.244.9.1:80")
			for i := range 4 {
				lose("attacker", fmt.Sprintf("10.96.0.%d", i), limit/2, fmt.Sprintf("10.244.0.%d:80", i))
			}
			lose("victim", "10.97.0.2", 10, "10.244.9.2:80")
			lose("another", "10.97.0.3", 20, "10.244.9.3:80")
			b.step(2 * defaultDelay)
			got := []int{has("10.244.9.1:80"), has("10.244.9.2:80"), has("10.244.9.3:80"), has("10.244.0.3:80"), has("10.244.0.0:80")}
			if want := []int{10, 10, 20, 50, 0}; !slices.Equal(got, want) || len(b.pairs) != limit || b.r.plan.held.Len() != limit {
				t.Errorf("written %t: pairs of the endpoints %v, want %v; %d in all, %d held", written, got, want, len(b.pairs), b.r.plan.held.Len())
			}
			if want := 10 + 4*limit/2 + 10 + 20 - limit; gave != want || !strings.Contains(logged.String(), "namespace=attacker") {
				t.Errorf("written %t: %d pairs gave way, want %d; log: %s", written, gave, want, &logged)
			}
			// An endpoint whose pairs gave way gets connections again.
			b.apply(manyFrontends("attacker", "10.96.0.3", limit/2), manyFrontends("attacker", "10.96.0.3", limit/2, "10.244.0.3:80"))
			if n := has("10.244.0.3:80"); n != 0 {
				t.Errorf("%d pairs of an endpoint that returned", n)
			}
		})
	}
}

// TestPairsOfNothingAreNotHeld loses an endpoint whose address is that of a frontend.
func TestPairsOfNothingAreNotHeld(t *testing.T) {
	inBed(t, Config{}, func(b *bed) {
		b.apply(endpointsOf("web", "10.244.0.1", "10.244.0.1:80"), endpointsOf("web", "10.244.0.1"))
		b.want(aPair("0.0.0.0:30080", "10.244.0.1:80"))
	})
}

// TestPairsOfAFailedWriteAreRemoved has a write that fails after it changed the table. The endpoint returns, or
// stays away and the write is repeated.
func TestPairsOfAFailedWriteAreRemoved(t *testing.T) {
	inBed(t, Config{}, func(b *bed) {
		with, without := endpointsOf("web", "10.96.0.1", "10.244.0.1:80"), endpointsOf("web", "10.96.0.1")
		b.apply(with, without)
		b.fail = errors.New("no")
		b.step(defaultDelay)
		b.fail = nil
		b.apply(without, with)
		b.want()
		b.apply(with, without)
		b.fail = errors.New("no")
		b.step(defaultDelay)
		b.fail = nil
		clear(b.pairs)
		b.want(aPair("10.96.0.1:80", "10.244.0.1:80"), aPair("0.0.0.0:30080", "10.244.0.1:80"))
	})
}

// TestOnlyTranslatedConnectionsHavePairs is about the connections of one endpoint.
func TestOnlyTranslatedConnectionsHavePairs(t *testing.T) {
	at := netip.MustParseAddrPort
	endpoint := at("10.244.0.1:30080")
	for _, c := range []struct {
		connection
		want []pair
	}{
		{connection{at("192.0.2.1:30080"), endpoint, true}, []pair{{at("192.0.2.1:30080"), endpoint}, {at("0.0.0.0:30080"), endpoint}}},
		{connection{at("192.0.2.1:30080"), endpoint, false}, nil},
		{connection{endpoint, endpoint, false}, nil},
		{connection{endpoint, endpoint, true}, nil},
	} {
		if got := c.pairs(); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.connection, got, c.want)
		}
	}
}

// TestEndpointsVanishInGroups has an endpoint vanish each second. Sockets are looked for once in each
// delay.
func TestEndpointsVanishInGroups(t *testing.T) {
	inBed(t, Config{DestroySockets: true}, func(m *bed) {
		stop := m.run()
		const seconds = 100
		for i := range seconds {
			m.apply(endpointsOf("web", "10.96.0.1", fmt.Sprintf("10.244.0.%d:80", i)), endpointsOf("web", "10.96.0.1"))
			time.Sleep(time.Second)
		}
		time.Sleep(2 * defaultDelay)
		synctest.Wait()
		if most := seconds/int(defaultDelay/time.Second) + 2; m.asked > most || len(m.pairs) != 2*seconds {
			t.Errorf("sockets were looked for %d times, want at most %d; %d pairs", m.asked, most, len(m.pairs))
		}
		stop()
	})
}

// TestLinesAreBounded has an endpoint that comes and goes for 1,000 seconds.
func TestLinesAreBounded(t *testing.T) {
	var logged bytes.Buffer
	inBed(t, Config{Delay: time.Second, Log: slog.New(slog.NewTextHandler(&logged, nil))}, func(b *bed) {
		groups := 0
		for i := range 1000 {
			b.apply(endpointsOf("web", "10.96.0.1", fmt.Sprintf("10.244.%d.%d:80", i/250, i%250)), endpointsOf("web", "10.96.0.1"))
			time.Sleep(time.Second)
			before := len(b.pairs)
			b.r.step(t.Context())
			if len(b.pairs) > before {
				groups++
			}
		}
		if groups != 1000 {
			t.Errorf("%d groups of pairs", groups)
		}
	})
	n := strings.Count(logged.String(), "\n")
	if n < lineBurst || n > lineBurst+1000/int(lineEvery/time.Second) || !strings.Contains(logged.String(), "suppressed=9") {
		t.Errorf("%d lines:\n%.2000s", n, &logged)
	}
}
