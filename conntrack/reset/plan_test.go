package reset

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// memory is a table in memory. If fail is not nil, add and remove return it.
type memory struct {
	mu    sync.Mutex
	pairs map[pair]time.Time
	fail  error
	// asked is the number of calls of destroy, and cannot makes them fail.
	asked  int
	cannot bool
	// open holds the connections, and asks the number of calls of connections.
	open []pair
	asks int
	// reading, if not nil, runs while the connections are read.
	reading func()
}

func (m *memory) add(_ context.Context, pairs []pair) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	for _, w := range pairs {
		m.pairs[w] = time.Now().Add(lifetime)
	}
	return nil
}

func (m *memory) remove(_ context.Context, pairs []pair) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
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

func (m *memory) connections(_ context.Context, wanted func(pair) bool) (out []pair, err error) {
	if m.reading != nil {
		m.reading()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asks++
	for _, w := range m.open {
		if wanted(w) {
			out = append(out, w)
		}
	}
	return out, m.fail
}

// destroy counts the pairs that are wanted as one socket each, unless the kernel cannot.
func (m *memory) destroy(_ context.Context, wanted func(pair) bool) (n int, err error) {
	m.mu.Lock()
	m.asked++
	pairs := slices.Collect(maps.Keys(m.pairs))
	m.mu.Unlock()
	if m.cannot {
		return 0, syscall.EOPNOTSUPP
	}
	for _, w := range pairs {
		if wanted(w) {
			n++
		}
	}
	return n, nil
}

// endpointsOf returns a Service with a cluster IP and endpoints.
func endpointsOf(name, clusterIP string, endpoints ...string) *ruleset.Service {
	k := tracker.Key{Family: tracker.IPv4}
	k.Namespace, k.Name, k.Protocol = "shop", name, v1.ProtocolTCP
	s := &ruleset.Service{Key: k, Frontends: []ruleset.Frontend{
		{Kind: ruleset.KindClusterIP, Addr: netip.MustParseAddr(clusterIP), Port: 80},
		{Kind: ruleset.KindNodePort, Port: 30080},
	}}
	for _, a := range endpoints {
		s.Endpoints = append(s.Endpoints, &tracker.Endpoint{Addr: netip.MustParseAddrPort(a), Ready: true, Serving: true})
	}
	return s
}

func changed(old, now *ruleset.Service) *ruleset.Delta {
	c := ruleset.Change{Old: old, New: now}
	if c.Key = old.Key; now != nil {
		c.Key = now.Key
	}
	return &ruleset.Delta{Changes: []ruleset.Change{c}}
}

// TestPairsFollowEndpoints runs a Resetter in simulated time.
func TestPairsFollowEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{pairs: map[pair]time.Time{}}
		r, err := newResetter(t.Context(), Config{Limit: 4}, m)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		var refused error
		plane := r.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return refused }))
		apply := func(old, now *ruleset.Service) {
			t.Helper()
			if err := plane.Apply(ctx, changed(old, now)); !errors.Is(err, refused) {
				t.Fatal(err)
			}
		}
		want := func(after time.Duration, endpoints ...string) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			got := map[string]int{}
			left, _ := m.list(ctx)
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
		refused = errors.New("refused")
		apply(all, less)
		want(2 * defaultDelay)
		refused = &ruleset.PartialError{Failed: map[tracker.Key]error{all.Key: errors.New("refused")}}
		apply(all, less)
		want(2 * defaultDelay)
		refused = nil

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
		// The limit: two endpoints with two addresses each.
		apply(all, endpointsOf("web", "10.96.0.1"))
		want(2*defaultDelay, a, b)
		if left, _ := m.list(ctx); len(left) != 4 {
			t.Errorf("%d pairs, want the limit of 4", len(left))
		}
		// A table that cannot be changed keeps the endpoint from getting connections.
		m.fail = errors.New("no")
		if err := plane.Apply(ctx, changed(endpointsOf("web", "10.96.0.1"), all)); !errors.Is(err, m.fail) {
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
		if len(r.plan.endpoints) != 0 || r.plan.pairs != 0 {
			t.Errorf("left %v, %d pairs", r.plan.endpoints, r.plan.pairs)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestTraceCountsEndpointsAndSockets also checks that a kernel that cannot destroy sockets is asked
// once.
func TestTraceCountsEndpointsAndSockets(t *testing.T) {
	for _, cannot := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var got []Info
			m := &memory{pairs: map[pair]time.Time{}, cannot: cannot}
			r, err := newResetter(t.Context(), Config{DestroySockets: true, Trace: &Trace{Ended: func(i Info) { got = append(got, i) }}}, m)
			if err != nil {
				t.Fatal(err)
			}
			plane := r.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
			const a, b, c = "10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.3:8080"
			all := endpointsOf("web", "10.96.0.1", a, b, c)
			one := endpointsOf("web", "10.96.0.1", c)
			for _, d := range []*ruleset.Delta{changed(all, one), changed(one, endpointsOf("web", "10.96.0.1"))} {
				if err := plane.Apply(t.Context(), d); err != nil {
					t.Fatal(err)
				}
				time.Sleep(defaultDelay)
				if _, err := r.step(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			// Each endpoint had a cluster IP and a NodePort.
			want, asked := []Info{{2, 4, 4}, {1, 2, 2}}, 2
			if cannot {
				want, asked = []Info{{2, 4, 0}, {1, 2, 0}}, 1
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
