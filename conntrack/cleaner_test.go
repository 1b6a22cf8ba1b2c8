package conntrack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// bed is a Cleaner of a table in memory, behind a backend that returns result.
type bed struct {
	*Cleaner
	table   *memory
	backend ruleset.Backend
	result  error // of the next Apply
	infos   []FlushInfo
	sum     FlushInfo // of the families, since the last of infos
	flushed error
	log     bytes.Buffer
}

func newBed(t *testing.T, flows ...Flow) *bed {
	t.Helper()
	return newBedOf(t, Config{}, flows...)
}

// newBedOf is newBed with a configuration of the Cleaner.
func newBedOf(t *testing.T, cfg Config, flows ...Flow) *bed {
	t.Helper()
	b := &bed{table: &memory{flows: flows}}
	cfg.Table, cfg.Log = b.table, slog.New(slog.NewTextHandler(&b.log, nil))
	cfg.Hooks = &Hooks{
		Flushed: func(i FlushInfo) {
			b.infos = append(b.infos, i)
			if b.sum.Dumps != i.Dumps || b.sum.Seen != i.Seen || b.sum.Stale != i.Stale || b.sum.Deleted != i.Deleted {
				t.Errorf("families have %+v in all, want %+v", b.sum, i)
			}
			b.sum = FlushInfo{}
		},
		FlushedFamily: func(_ tracker.Family, i FlushInfo) {
			b.sum.add(i)
		},
	}
	c, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.Cleaner = c
	b.backend = c.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return b.result }))
	return b
}

// apply applies a delta and flushes. It stores the error of the flush.
func (b *bed) apply(t *testing.T, full bool, changes ...ruleset.Change) {
	t.Helper()
	b.applyOnly(t, full, changes...)
	b.flushed = b.Flush(t.Context())
}

func (b *bed) applyOnly(t *testing.T, full bool, changes ...ruleset.Change) {
	t.Helper()
	node := everyAddress()
	err := b.backend.Apply(t.Context(), &ruleset.Delta{Full: full, Node: node, OldNode: node, Changes: changes})
	if err != b.result {
		t.Fatalf("Apply returned %v, want the backend's own %v", err, b.result)
	}
}

func (b *bed) left(t *testing.T, want ...Flow) {
	t.Helper()
	if !slices.Equal(b.table.flows, want) {
		t.Errorf("left: %v, want %v", b.table.flows, want)
	}
}

var (
	errTest  = errors.New("test")
	toOne    = flow("10.9.0.1:1", "10.96.0.1:53", "10.0.0.1:53")
	toTwo    = flow("10.9.0.1:2", "10.96.0.1:53", "10.0.0.2:53")
	sixToOne = flow("[fd09::1]:1", "[fd96::1]:53", "[fd00::1]:53")
)

func dns(e ...string) *ruleset.Port {
	return service{name: "dns", cluster: "10.96.0.1:53", endpoints: eps(e...)}.compile(everyAddress())
}

func TestManyChangesTakeOneDumpEach(t *testing.T) {
	b := newBed(t)
	var before, after []ruleset.Change
	for i := range 100 {
		for _, cluster := range []string{"10.96.0.%d:53", "[fd96::%d]:53"} {
			s := service{name: fmt.Sprint("s", i), cluster: fmt.Sprintf(cluster, i), endpoints: eps("10.0.0.1:53")}
			was := s.compile(everyAddress())
			before = append(before, change(nil, was))
			after = append(after, change(was, nil))
		}
	}
	b.apply(t, true, before...)
	b.apply(t, false, after...)
	if b.table.dumps != 4 {
		t.Errorf("%d dumps, want 2 for each delta", b.table.dumps)
	}
	b.apply(t, false)
	if err := b.Flush(t.Context()); err != nil || b.table.dumps != 4 || len(b.infos) != 2 {
		t.Errorf("without a change: %v, %d dumps, %d traced", err, b.table.dumps, len(b.infos))
	}
}

func TestFailedApplyCleansNothing(t *testing.T) {
	b := newBed(t, toOne, toTwo)
	before, after := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
	b.apply(t, true, change(nil, before))
	b.result = errTest
	b.apply(t, false, change(before, after))
	if err := b.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	b.left(t, toOne, toTwo)
	b.result = nil
	b.apply(t, false, change(before, after))
	b.left(t, toTwo)
}

// TestFullDeltaCleansUpEverything applies a full delta in which no Service changed.
func TestFullDeltaCleansUpEverything(t *testing.T) {
	b := newBed(t)
	two := dns("10.0.0.2:53")
	b.apply(t, true, change(nil, two))
	b.table.flows = []Flow{toOne, toTwo}
	b.apply(t, false, change(two, two))
	b.left(t, toOne, toTwo)
	b.apply(t, true, change(two, two))
	b.left(t, toTwo)
}

// TestFailedFrontendIsCleanedUp has flows begin at a frontend that only a failed change has. The Service
// is in effect without it afterwards, or is gone.
func TestFailedFrontendIsCleanedUp(t *testing.T) {
	one, two := dns("10.0.0.1:53"), dns("10.0.0.2:53")
	more := service{name: "dns", cluster: "10.96.0.10:53", external: []string{"198.51.100.1"}, endpoints: eps("10.0.0.1:53")}.compile(everyAddress())
	more.Key = one.Key
	stale, foreign := flow("10.9.0.1:9", "198.51.100.1:53", "10.0.0.1:53"), flow("10.9.0.1:9", "198.51.100.1:53", "10.7.7.7:53")
	for _, before := range []*ruleset.Port{nil, two} {
		b := newBed(t)
		b.apply(t, true)
		if before != nil {
			b.apply(t, false, change(nil, before))
		}
		b.result = errTest
		b.apply(t, false, change(before, more))
		b.table.flows = []Flow{stale, foreign}
		b.left(t, stale, foreign)
		b.result = nil
		last := change(before, before)
		last.Key = one.Key
		b.apply(t, false, last)
		b.left(t, foreign)
	}
}

// TestFailedAttemptIsCleanedUp has flows begin while a change is partly in effect, and takes the
// change back.
func TestFailedAttemptIsCleanedUp(t *testing.T) {
	b := newBed(t)
	one, two := dns("10.0.0.1:53"), dns("10.0.0.2:53")
	b.apply(t, true, change(nil, two))
	b.result = errTest
	b.apply(t, false, change(two, one))
	b.table.flows = []Flow{toOne, toTwo} // the attempt was in effect for a while
	b.result = nil
	b.apply(t, false, change(two, two))
	b.left(t, toTwo)
}

func TestFailedServiceKeepsItsFlows(t *testing.T) {
	other := flow("10.9.0.1:3", "10.96.0.2:53", "10.0.0.1:53")
	b := newBed(t)
	compile := func(e ...string) *ruleset.Port {
		return service{name: "other", cluster: "10.96.0.2:53", endpoints: eps(e...)}.compile(everyAddress())
	}
	a1, a2, b1, b2 := dns("10.0.0.1:53"), dns("10.0.0.2:53"), compile("10.0.0.1:53"), compile("10.0.0.2:53")
	b.apply(t, true, change(nil, a1), change(nil, b1))
	tried := flow("10.9.0.1:4", "10.96.0.2:53", "10.0.0.2:53") // if b2 is partly in effect
	b.table.flows = []Flow{toOne, other, tried}
	b.result = fmt.Errorf("wrapped: %w", &ruleset.PartialError{Failed: map[tracker.Key]error{b1.Key: errTest}})
	b.apply(t, false, change(a1, a2), change(b1, b2))
	b.left(t, other, tried) // their Service failed
	b.apply(t, true, change(a2, a2), change(b1, b2))
	b.left(t, other, tried) // even if all flows are examined
	b.result = nil
	b.apply(t, false, change(b1, b2))
	b.left(t, tried)
}

// TestFailedTakerLeavesFlows has a Service that takes an external IP from another one, and that
// fails. The table is cleaned up after each delta. The flows of the Service that
// keeps the IP must stay.
func TestFailedTakerLeavesFlows(t *testing.T) {
	b := newBed(t)
	taken := backendtest.ServiceName(1)
	deltas := 0
	plane := b.Wrap(ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		deltas++
		if failed := map[tracker.Key]error{}; deltas == 2 {
			for _, c := range d.Changes {
				if c.Key.NamespacedName == taken {
					failed[c.Key] = errTest
				}
			}
			return &ruleset.PartialError{Failed: failed}
		}
		return nil
	}))
	p := backendtest.NewNode(t, tracker.Config{})
	cursor := p.Engine.Attach("plane", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		err := plane.Apply(ctx, d)
		if err := b.Flush(ctx); err != nil {
			t.Error(err)
		}
		return err
	}))
	set := func(i int, created int64) {
		p.Tracker.SetService(backendtest.Numbered(i, backendtest.Over(v1.ProtocolUDP), backendtest.ExternalIPs("198.51.100.1"), func(s *v1.Service) {
			s.CreationTimestamp = metav1.Unix(created, 0)
		}))
		slice := backendtest.NumberedSlice(i, tracker.IPv4, i)
		*slice.Ports[0].Protocol = v1.ProtocolUDP
		p.Tracker.SetSlice(slice)
	}
	set(0, 2)
	if err := cursor.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	kept := flow("10.9.0.1:1", "198.51.100.1:80", "10.244.0.0:8080")
	b.table.flows = []Flow{kept}
	set(1, 1)
	if err := cursor.Sync(t.Context()); !errors.Is(err, errTest) || deltas != 2 {
		t.Fatalf("%d deltas: %v", deltas, err)
	}
	b.left(t, kept)
}

// TestFailedCleanUpIsKept has the next Apply, or Flush, do a failed clean-up.
func TestFailedCleanUpIsKept(t *testing.T) {
	before, after := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
	for name, fail := range map[string]func(*memory){
		"dump":   func(m *memory) { m.fail = fmt.Errorf("%w: as ENOBUFS", ErrIncomplete) },
		"delete": func(m *memory) { m.refuse = errTest },
	} {
		for _, byApply := range []bool{true, false} {
			t.Run(fmt.Sprint(name, "/byApply=", byApply), func(t *testing.T) {
				b := newBed(t)
				b.apply(t, true, change(nil, before))
				b.table.flows = []Flow{toTwo, toOne} // half a dump lacks toOne
				fail(b.table)
				b.apply(t, false, change(before, after))
				b.left(t, toTwo, toOne)
				if !b.Pending() || b.infos[len(b.infos)-1].Err == nil || b.flushed == nil {
					t.Errorf("not reported: pending %v, %v, %v", b.Pending(), b.infos, b.flushed)
				}
				b.table.refuse = nil
				if byApply {
					b.apply(t, false)
				} else if err := b.Flush(t.Context()); err != nil {
					t.Error(err)
				}
				b.left(t, toTwo)
				if b.Pending() {
					t.Error("still pending")
				}
			})
		}
	}
}

// TestFamiliesFailAlone has the clean-up of one family fail. The other is cleaned up, and only
// once.
func TestFamiliesFailAlone(t *testing.T) {
	b := newBed(t)
	six := service{name: "dns", cluster: "[fd96::1]:53", endpoints: eps("[fd00::1]:53")}.compile(everyAddress())
	four := dns("10.0.0.1:53")
	b.apply(t, true, change(nil, four), change(nil, six))
	b.table.flows = []Flow{sixToOne, toOne}
	b.table.fail = ErrIncomplete // IPv4's
	b.apply(t, false, change(four, nil), change(six, nil))
	b.left(t, toOne)
	dumps := b.table.dumps
	if err := b.Flush(t.Context()); err != nil || b.table.dumps != dumps+1 {
		t.Errorf("%v, %d more dumps", err, b.table.dumps-dumps)
	}
	b.left(t)
}

func TestDoneContextPostponesCleanUp(t *testing.T) {
	b := newBed(t)
	b.apply(t, true, change(nil, dns("10.0.0.1:53")))
	b.table.flows = []Flow{toOne}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := b.backend.Apply(ctx, &ruleset.Delta{Node: everyAddress(), Changes: []ruleset.Change{change(dns("10.0.0.1:53"), nil)}})
	if err != nil || !b.Pending() {
		t.Errorf("%v, pending %v", err, b.Pending())
	}
	if err := b.Flush(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	b.left(t, toOne)
}

func TestClosedCleanerDoesNothing(t *testing.T) {
	b := newBed(t)
	b.apply(t, true, change(nil, dns("10.0.0.1:53")))
	if err := errors.Join(b.Close(), b.Close()); err != nil {
		t.Error(err)
	}
	b.note(&ruleset.Delta{Full: true, Changes: []ruleset.Change{change(nil, dns("10.0.0.1:53"))}}, nil)
	if b.Pending() {
		t.Error("pending")
	}
	if err := b.Flush(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

// tenant attaches a backend to an engine, and returns a function that moves the endpoints of a Service
// with some UDP ports to a subnet of 10.244.0.0/16, and syncs.
func tenant(tb testing.TB, ports, endpoints int, plane ruleset.Backend) (edit func(subnet int)) {
	tb.Helper()
	tr, err := tracker.New(tracker.Config{Kinds: []tracker.Kind{tracker.KindServices, tracker.KindSlices}})
	if err != nil {
		tb.Fatal(err)
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: tr, Budget: ruleset.Budget{Delta: 4 * endpoints}})
	if err != nil {
		tb.Fatal(err)
	}
	cursor := engine.Attach("plane", plane)
	var servicePorts []v1.ServicePort
	var slicePorts []discovery.EndpointPort
	for i := range ports {
		name, protocol, number := fmt.Sprint("p", i), v1.ProtocolUDP, int32(1000+i)
		servicePorts = append(servicePorts, v1.ServicePort{Name: name, Protocol: protocol, Port: number})
		slicePorts = append(slicePorts, discovery.EndpointPort{Name: &name, Protocol: &protocol, Port: &number})
	}
	meta := metav1.ObjectMeta{Namespace: "tenant", Name: "t"}
	tr.SetService(&v1.Service{ObjectMeta: meta, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, Ports: servicePorts}})
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices)
	return func(subnet int) {
		tb.Helper()
		s := &discovery.EndpointSlice{ObjectMeta: meta, AddressType: discovery.AddressTypeIPv4, Ports: slicePorts}
		s.Labels = map[string]string{discovery.LabelServiceName: "t"}
		for i := range endpoints {
			s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.244.%d.%d", subnet, 1+i)}})
		}
		tr.SetSlice(s)
		if err := cursor.Sync(tb.Context()); err != nil {
			tb.Fatal(err)
		}
	}
}

// TestManyDeltasTakeOneDump has a Service with so many endpoints that a Sync needs several deltas.
func TestManyDeltasTakeOneDump(t *testing.T) { synctest.Test(t, testManyDeltasTakeOneDump) }

func testManyDeltasTakeOneDump(t *testing.T) {
	b := newBed(t)
	deltas := 0
	edit := tenant(t, 20, 30, b.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error {
		deltas++
		return nil
	})))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- b.Run(ctx) }()
	edit(1)
	synctest.Wait()
	b.table.flows = []Flow{flow("10.9.0.1:1", "10.96.0.1:1000", "10.244.1.1:1000"), flow("10.9.0.1:1", "10.96.0.1:1000", "10.244.2.1:1000")}
	before := b.table.dumps
	deltas = 0
	edit(2)
	synctest.Wait()
	if deltas < 2 || b.table.dumps != before+1 {
		t.Errorf("%d deltas took %d dumps, want one dump for several deltas", deltas, b.table.dumps-before)
	}
	b.left(t, flow("10.9.0.1:1", "10.96.0.1:1000", "10.244.2.1:1000"))
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// runIn runs the Cleaner in simulated time, in which a dump takes some time.
func runIn(t *testing.T, dump time.Duration, f func(*testing.T, *bed)) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.apply(t, true, change(nil, dns("10.0.0.1:53", "10.0.0.2:53")))
		b.table.dumps = 0
		b.table.flows = []Flow{toTwo, toOne}
		b.table.during = func() { time.Sleep(dump) }
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.Run(ctx) }()
		synctest.Wait()
		f(t, b)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
}

// TestFlippingEndpointCostsAShareOfTheTime has an endpoint that goes and returns ten times a second.
// No delta waits for a dump.
func TestFlippingEndpointCostsAShareOfTheTime(t *testing.T) {
	const dump, seconds = 300 * time.Millisecond, 60
	runIn(t, dump, func(t *testing.T, b *bed) {
		both, two := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
		for range 10 * seconds {
			start := time.Now()
			b.applyOnly(t, false, change(both, two))
			b.applyOnly(t, false, change(two, both))
			if waited := time.Since(start); waited != 0 {
				t.Fatalf("two deltas waited for %v", waited)
			}
			time.Sleep(100 * time.Millisecond)
		}
		b.table.mu.Lock()
		defer b.table.mu.Unlock()
		if most := int(seconds * time.Second / (dump * (1 + pauseFactor))); b.table.dumps > most+1 || b.table.dumps < most-1 {
			t.Errorf("%d dumps in %d seconds, want %d", b.table.dumps, seconds, most)
		}
	})
}

// TestRunRetriesAndLogsFailures also checks that the first clean-up is immediate.
func TestRunRetriesAndLogsFailures(t *testing.T) {
	runIn(t, 0, func(t *testing.T, b *bed) {
		b.table.refuse = errTest
		b.applyOnly(t, false, change(dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")))
		synctest.Wait()
		b.table.mu.Lock()
		if b.table.dumps != 1 {
			t.Errorf("%d dumps right after the change", b.table.dumps)
		}
		b.table.mu.Unlock()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		b.table.mu.Lock()
		lines := bytes.Count(b.log.Bytes(), []byte("cannot delete stale UDP flows"))
		if b.table.dumps < 100 || lines < lineBurst || lines > lineBurst+60 || !b.Pending() {
			t.Errorf("%d dumps, %d lines, pending %v", b.table.dumps, lines, b.Pending())
		}
		b.table.refuse = nil
		b.table.mu.Unlock()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		b.left(t, toTwo)
	})
}

// TestCloseEndsRun closes a Cleaner whose backends go on.
func TestCloseEndsRun(t *testing.T) {
	runIn(t, 0, func(t *testing.T, b *bed) {
		both, two := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
		b.applyOnly(t, false, change(both, two))
		synctest.Wait()
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := b.Run(t.Context()); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Run of a closed Cleaner: %v", err)
		}
		b.applyOnly(t, false, change(two, both))
	})
}

// TestChangesDuringDump changes the Service of stale and new flows while the table is read.
func TestChangesDuringDump(t *testing.T) {
	both, one, two := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.1:53"), dns("10.0.0.2:53")
	again := flow("10.9.0.1:9", "10.96.0.1:53", "10.0.0.1:53")
	for _, c := range []struct {
		name          string
		during, after func(*testing.T, *bed) // after the first flush
		left          []Flow
	}{
		{"nothing", func(*testing.T, *bed) {}, nil, []Flow{toTwo}},
		{"the endpoint returns", func(t *testing.T, b *bed) { b.applyOnly(t, false, change(two, both)) }, nil, []Flow{toTwo, toOne}},
		{"the other endpoint goes", func(t *testing.T, b *bed) { b.applyOnly(t, false, change(two, one)) }, nil, []Flow{toOne}},
		{"the Service goes", func(t *testing.T, b *bed) { b.applyOnly(t, false, change(two, nil)) }, nil, nil},
		{"a change fails", func(t *testing.T, b *bed) {
			b.result = errTest
			b.applyOnly(t, false, change(two, both))
			b.result = nil
		}, nil, []Flow{toTwo, toOne}},
		{"a change fails, and the Service goes later", func(t *testing.T, b *bed) {
			b.result = errTest
			b.applyOnly(t, false, change(two, dns("10.0.0.3:53")))
			b.result = nil
		}, func(t *testing.T, b *bed) { b.applyOnly(t, false, change(two, nil)) }, nil},
		{"a flow is created again", func(t *testing.T, b *bed) {
			b.applyOnly(t, false, change(two, both))
			b.table.flows = append(b.table.flows, again)
			b.applyOnly(t, false, change(both, two))
		}, nil, []Flow{toTwo}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t)
			b.apply(t, true, change(nil, both))
			b.table.flows = []Flow{toTwo, toOne}
			once := false
			b.table.during = func() {
				if !once {
					once = true
					c.during(t, b)
				}
			}
			b.applyOnly(t, false, change(both, two))
			for _, then := range []func(*testing.T, *bed){c.after, nil} {
				if err := b.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				if then != nil {
					then(t, b)
				}
			}
			b.left(t, c.left...)
		})
	}
}
