package conntrack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// bed is a Cleaner of a table in memory, behind a backend that returns result.
type bed struct {
	*Cleaner
	table   *memory
	backend ruleset.Backend
	result  error // of the next Apply
	infos   []Info
	sum     Info // of the families, since the last of infos
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
	cfg.Trace = &Trace{
		Flushed: func(i Info) {
			b.infos = append(b.infos, i)
			if b.sum.Dumps != i.Dumps || b.sum.Seen != i.Seen || b.sum.Stale != i.Stale || b.sum.Deleted != i.Deleted {
				t.Errorf("families have %+v in all, want %+v", b.sum, i)
			}
			b.sum = Info{}
		},
		FlushedFamily: func(_ tracker.Family, i Info) {
			b.sum.add(i)
		},
	}
	c, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.Cleaner = c
	b.backend = After(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return b.result }), c)
	return b
}

func (b *bed) apply(t *testing.T, full bool, changes ...ruleset.Change) {
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

func dns(e ...string) *ruleset.Service {
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
	b.apply(t, false, change(before, after, after))
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
	b.apply(t, false, change(two, two, one))
	b.left(t, toTwo)
}

func TestFailedServiceKeepsItsFlows(t *testing.T) {
	other := flow("10.9.0.1:3", "10.96.0.2:53", "10.0.0.1:53")
	b := newBed(t)
	compile := func(e ...string) *ruleset.Service {
		return service{name: "other", cluster: "10.96.0.2:53", endpoints: eps(e...)}.compile(everyAddress())
	}
	a1, a2, b1, b2 := dns("10.0.0.1:53"), dns("10.0.0.2:53"), compile("10.0.0.1:53"), compile("10.0.0.2:53")
	b.apply(t, true, change(nil, a1), change(nil, b1))
	tried := flow("10.9.0.1:4", "10.96.0.2:53", "10.0.0.2:53") // if b2 is partly in effect
	b.table.flows = []Flow{toOne, other, tried}
	b.result = fmt.Errorf("wrapped: %w", &ruleset.PartialError{Failed: map[tracker.Key]error{b1.Key: errTest}})
	b.apply(t, false, change(a1, a2), change(b1, b2))
	b.left(t, other, tried) // their Service failed
	b.apply(t, true, change(a2, a2), change(b1, b2, b2))
	b.left(t, other, tried) // even if all flows are examined
	b.result = nil
	b.apply(t, false, change(b1, b2, b2))
	b.left(t, tried)
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
				if !b.Pending() || b.infos[len(b.infos)-1].Err == nil || !strings.Contains(b.log.String(), "cannot delete stale UDP flows") {
					t.Errorf("not reported: pending %v, %v, log %q", b.Pending(), b.infos, &b.log)
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
	b.Record(&ruleset.Delta{Full: true, Changes: []ruleset.Change{change(nil, dns("10.0.0.1:53"))}}, nil)
	if b.Pending() {
		t.Error("pending")
	}
	if err := b.Flush(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}
