package model

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// follower is a backend that writes to a fake kernel.
type follower struct {
	kernel   *fakeKernel
	families []tracker.Family
	config   Config
	sink     fakeSink
	tables   *Tables
	// inGrace holds, by family, the endpoints that earlier tables kept only for their grace period.
	inGrace map[tracker.Family]map[netip.Addr]time.Time
	// full counts the full deltas.
	full int
}

func newFollower(families ...tracker.Family) *follower {
	c := DefaultConfig
	c.GracePeriod = 0
	return &follower{kernel: newFakeKernel(), families: families, config: c}
}

// Limits implements [ruleset.Limiter].
func (b *follower) Limits(tracker.Family) ruleset.Limits { return Limits() }

// Apply implements [ruleset.Backend].
func (b *follower) Apply(ctx context.Context, d *ruleset.Delta) error {
	for _, c := range d.Changes {
		for i := 0; c.New != nil && i < len(c.New.Endpoints); i++ {
			if ep := c.New.Endpoints[i]; ep.Node != "" && ep.Node != d.Node.Info.Name {
				b.kernel.elsewhere[ep.Addr.Addr()] = true
			}
		}
	}
	var failed map[tracker.Key]error
	var err error
	began := time.Now()
	switch {
	case d.Full:
		b.full++
		failed, err = b.replace(ctx, d)
	case b.tables == nil || b.tables.List[0].NeedsRewrite(d.Node):
		return ruleset.ErrNeedFull
	default:
		b.sink.kernel = b.kernel
		failed, err = b.tables.Update(ctx, d, &b.sink)
	}
	if err == nil {
		for _, t := range b.tables.List {
			tx := &Tx{}
			for name := range t.Garbage() {
				tx.Object(Object{Kind: DeleteChain, Family: t.Family, Name: name})
			}
			if err = b.kernel.commit(tx); err != nil {
				break
			}
			t.DropGarbage(true)
		}
	}
	switch {
	case err != nil:
		b.discard(began)
		return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	case len(failed) != 0:
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// discard discards the model, as after a failure. What was written from the given time on may be
// missing.
func (b *follower) discard(from time.Time) {
	if b.tables != nil {
		b.inGrace = map[tracker.Family]map[netip.Addr]time.Time{}
		for _, t := range b.tables.List {
			b.inGrace[t.Family] = t.InGrace(from)
		}
	}
	b.tables = nil
}

// replace writes new tables: in place if there are none, or else beside the old ones, which it
// replaces in one step.
func (b *follower) replace(ctx context.Context, d *ruleset.Delta) (map[tracker.Key]error, error) {
	b.discard(time.Now())
	old, into := b.kernel, b.kernel
	if len(old.tables) != 0 {
		into = newFakeKernel()
	}
	into.local = d.Node.LocalTraffic
	create := &Tx{}
	var list []*Table
	grace := map[tracker.Family][]GraceEntry{}
	for _, f := range b.families {
		var hairpin []netip.Addr
		if had := old.tables[f]; had != nil {
			for key := range had.sets[layout.Hairpin].elements {
				a, _ := netip.AddrFromSlice(key.Bytes()[:f.Bits()/8])
				hairpin = append(hairpin, a)
			}
		}
		grace[f] = b.config.GraceEntries(hairpin, b.inGrace[f])
		t := NewTable(f, d.Node, b.config, d.Changes, len(hairpin))
		if had := old.tables[f]; had != nil {
			adopted := NewAdopted()
			for key, e := range had.sets[layout.StickyEndpoints].elements {
				adopted.Add(key.Bytes(), e.data.Bytes(), e.text)
			}
			t.Adopt(adopted)
			t.KeepRoom(func(s layout.Set) int {
				if set := had.sets[s]; set != nil {
					return set.size
				}
				return 0
			})
		}
		create.Object(Object{Kind: CreateTable, Family: f})
		t.Create(nil, false, create)
		t.Hook(create)
		list = append(list, t)
	}
	tables := NewTables(list...)
	sink := b.sink
	sink.kernel = into
	if into != old {
		sink.after = nil // no packet enters the new tables yet
	}
	installed := func() (map[tracker.Key]bool, error) { return map[tracker.Key]bool{}, nil }
	failed, err := tables.Fill(ctx, d, &sink, create, grace, installed)
	b.sink.written, b.sink.sent = sink.written, sink.sent
	if err != nil {
		if into == old {
			// As a process does after a cold start that failed.
			old.tables = map[tracker.Family]*fakeTable{}
		}
		return nil, err
	}
	for _, t := range list {
		t.ReleaseAdopted()
	}
	old.tables, old.local, b.tables = into.tables, into.local, tables
	if b.sink.after != nil {
		err = b.sink.after()
	}
	return failed, err
}

// TestSimulatedConformance runs every world of the conformance suite on a kernel in memory. Writes
// fail before or after they take effect.
func TestSimulatedConformance(t *testing.T) {
	for _, limit := range []int{0, 96 << 10} {
		t.Run(fmt.Sprintf("limit=%d", limit), func(t *testing.T) {
			conformance.Simulate(t, conformance.Simulation{
				Worlds: 12,
				Skip:   map[conformance.Feature]string{conformance.LoopbackNodePorts: "a packet from a loopback address cannot leave the node"},
				New: func(_ testing.TB, env conformance.SimEnv) conformance.Plane {
					kernel := newFakeKernel()
					return conformance.Plane{
						Backend: func() ruleset.Backend {
							b := newFollower(env.Families...)
							b.kernel, b.sink.limit = kernel, limit
							b.sink.before = env.Fail
							n := 0
							b.sink.after = func() error {
								env.Look()
								if n++; n%2 == 0 {
									return env.Fail() // the answer is lost
								}
								return nil
							}
							return b
						},
						Handle: kernel.handle,
						Dump:   kernel.dump,
					}
				},
			})
		})
	}
}

// TestForeignChangesRequireFullDelta alters the kernel in ways that a transaction meets.
func TestForeignChangesRequireFullDelta(t *testing.T) {
	for name, alter := range map[string]func(*fakeTable){
		"an element is missing": func(t *fakeTable) { clear(t.sets[layout.Endpoints].elements) },
		"an element is there": func(t *fakeTable) {
			t.sets[layout.Endpoints].elements[word(1).Word(1)] = fakeElement{}
		},
		"a set is missing": func(t *fakeTable) { delete(t.sets, layout.Endpoints) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.tracker.SetService(svc(0))
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
			r.sync()
			alter(r.backend.kernel.tables[tracker.IPv4])
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, 2, 3))
			before := r.backend.kernel.dump()
			refusals := 0
			apply := func(ctx context.Context, d *ruleset.Delta) error {
				err := r.backend.Apply(ctx, d)
				if err != nil {
					refusals++
					if after := r.backend.kernel.dump(); after != before {
						t.Errorf("a refused transaction had an effect:\n%s", after)
					}
				}
				return err
			}
			r.wrap = apply
			r.sync()
			if refusals != 1 || r.backend.full != 2 {
				t.Errorf("%d refusals and %d full deltas, want 1 and 2", refusals, r.backend.full)
			}
			r.verify()
		})
	}
}
