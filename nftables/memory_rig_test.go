package nftables

import (
	"context"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Names that the tests of all backends share.
var (
	svc      = backendtest.Numbered
	epSlice  = backendtest.NumberedSlice
	upTo     = backendtest.UpTo
	sticky   = backendtest.Affinity
	nodePort = backendtest.NodePort
	overUDP  = backendtest.Over(v1.ProtocolUDP)
)

// withoutGrace lets endpoints go without a grace period, so that the tables follow from the ruleset.
var withoutGrace = func() model.Config {
	c := model.DefaultConfig
	c.GracePeriod = 0
	return c
}()

// memoryRig is a pipeline to a kernel in memory that a test drives.
type memoryRig struct {
	testing.TB
	memory  *memoryNode
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
	config  Config
	// layout configures the tables from the next start on.
	layout model.Config
	// full counts the full deltas. applied, if not nil, is called with the error of each Apply.
	full    int
	applied func(error)
}

func newMemoryRig(tb testing.TB) *memoryRig {
	tb.Helper()
	p := backendtest.NewNode(tb, tracker.Config{OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint})
	r := &memoryRig{TB: tb, memory: newMemory(), tracker: p.Tracker, engine: p.Engine, layout: withoutGrace}
	r.start()
	return r
}

// start attaches a new backend, as a new process would.
func (r *memoryRig) start() {
	r.Helper()
	if r.cursor != nil {
		r.cursor.Detach()
		r.backend.Close()
	}
	r.backend = r.memory.backend(r, r.config, r.layout)
	r.cursor = r.engine.Attach("memory", applier{r.backend, r.apply})
}

func (r *memoryRig) apply(ctx context.Context, d *ruleset.Delta) error {
	if d.Full {
		r.full++
	}
	err := r.backend.Apply(ctx, d)
	if r.applied != nil {
		r.applied(err)
	}
	return err
}

// backend returns a new backend.
func (m *memoryNode) backend(tb testing.TB, c Config, l model.Config) *Backend {
	tb.Helper()
	c = must.Get(c.withDefaults())(tb)
	limit := m.limit
	m.limit = 0 // what New tries is larger than many a test's limit
	b, err := newBackend(c, l, m.connect())
	m.limit = limit
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { b.Close() })
	return b
}

// applier is a Backend with another Apply.
type applier struct {
	*Backend
	apply func(context.Context, *ruleset.Delta) error
}

// Apply implements [ruleset.Backend].
func (a applier) Apply(ctx context.Context, d *ruleset.Delta) error { return a.apply(ctx, d) }

func (r *memoryRig) sync() {
	r.Helper()
	must.Do(r, r.cursor.Sync(r.Context()))
}

// verify compares the tables with the ruleset.
func (r *memoryRig) verify() {
	r.Helper()
	verify(r, r.backend, r.engine.Snapshot())
}

// verify compares a backend's tables with a ruleset.
func verify(tb testing.TB, b *Backend, s *ruleset.Snapshot) {
	tb.Helper()
	for _, f := range b.config.Families {
		if d := diffViews(kernelView(tb, b, f), rulesetView(s.Ports, s.Node, f)); d != "" {
			tb.Fatalf("%s table differs from the ruleset:\n%s", f, d)
		}
	}
	must.Do(tb, b.Check(context.Background()))
}
