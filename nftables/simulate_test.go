package nftables

import (
	"context"
	"errors"
	"fmt"
	"github.com/go-proxier/proxier/internal/testing/must"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestSimulation runs the worlds of the conformance suite with a kernel in memory. Commits fail before or after
// they take effect. The second data plane has a smaller limit, so that staging tables replace tables, and
// the third one is a vendor's.
func TestSimulation(t *testing.T) {
	t.Parallel()
	limited := func(limit int) func(testing.TB, conformance.SimEnv) conformance.Fake {
		return func(tb testing.TB, env conformance.SimEnv) conformance.Fake { return newPlane(tb, env, limit) }
	}
	skip := map[conformance.Feature]string{conformance.LoopbackNodePorts: "a packet from a loopback address cannot leave the node"}
	backendtest.Simulate(t, skip, limited(0), limited(96<<10), newVendorPlane)
}

func TestReleasesDeltas(t *testing.T) {
	t.Parallel()
	backendtest.ReleasesDeltas(t, func(tb testing.TB, env conformance.SimEnv) conformance.Fake { return newPlane(tb, env, 0) })
}

func TestRefusesNothing(t *testing.T) {
	backendtest.RefusesNothing(t, func(tb testing.TB, env conformance.SimEnv) conformance.Fake { return newPlane(tb, env, 0) }, newVendorPlane)
}

// newPlane returns a data plane in memory whose transactions have at most limit bytes.
func newPlane(tb testing.TB, env conformance.SimEnv, limit int) conformance.Fake {
	m := newMemory()
	m.limit = limit
	elsewhere := map[netip.Addr]bool{}
	var b *Backend
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			b = m.backend(tb, Config{Families: env.Families}, withoutGrace)
			b := b
			return applier{b, func(ctx context.Context, d *ruleset.Delta) error {
				noteElsewhere(d, elsewhere)
				m.fail, m.look = env.Fail, env.Look
				defer func() { m.fail, m.look = nil, nil }()
				return b.Apply(ctx, d)
			}}
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { return handle(m.Handle, p, elsewhere) },
		Dump: func() (out string) {
			for _, f := range env.Families {
				v := kernelView(tb, b, f)
				for _, place := range slices.Sorted(maps.Keys(v)) {
					out += fmt.Sprintf("%s %s: %s\n", f, place, v[place])
				}
			}
			return out
		},
	}
}

// handle returns what happens to a packet. elsewhere holds the addresses of other nodes' endpoints.
func handle(in func(ruleset.Packet) conformance.Outcome, p ruleset.Packet, elsewhere map[netip.Addr]bool) conformance.Outcome {
	out := in(p)
	for i := range out.Endpoints {
		// Connections of other nodes' endpoints to themselves do not start here.
		c := &out.Endpoints[i]
		c.Masquerade = c.Masquerade || c.Addr.Addr() == p.From && elsewhere[p.From]
	}
	return out
}

// noteElsewhere adds the addresses of other nodes' endpoints.
func noteElsewhere(d *ruleset.Delta, to map[netip.Addr]bool) {
	for _, c := range d.Changes {
		for i := 0; c.New != nil && i < len(c.New.Endpoints); i++ {
			if ep := c.New.Endpoints[i]; ep.Node != "" && ep.Node != d.Node.Info.Name {
				to[ep.Addr.Addr()] = true
			}
		}
	}
}

// newVendorPlane returns the data plane of a vendor's backend: a Renderer for each family, and a committer of
// its text that fails. The rules are interpreted as they are written.
func newVendorPlane(tb testing.TB, env conformance.SimEnv) conformance.Fake {
	tables := fake.New()
	elsewhere := map[netip.Addr]bool{}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			b := rendererBackend{env: env, tables: tables, elsewhere: elsewhere}
			for _, f := range env.Families {
				r := must.Get(NewRenderer(Config{Stages: Stages{DestinationNAT: -7, Filter: 3, SourceNAT: 9}}, f))(tb)
				b.renderers = append(b.renderers, r)
			}
			return b
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { return handle(tables.Handle, p, elsewhere) },
	}
}

// rendererBackend is a vendor's backend.
type rendererBackend struct {
	env       conformance.SimEnv
	tables    *fake.Tables
	renderers []*Renderer
	elsewhere map[netip.Addr]bool
}

func (rendererBackend) Limits(tracker.Family) ruleset.Limits { return model.Limits() }

func (b rendererBackend) Apply(_ context.Context, d *ruleset.Delta) error {
	noteElsewhere(d, b.elsewhere)
	refused := &ruleset.PartialError{Failed: map[tracker.Key]error{}}
	for _, r := range b.renderers {
		tx, err := r.Render(d)
		var partial *ruleset.PartialError
		switch {
		case errors.As(err, &partial):
			maps.Copy(refused.Failed, partial.Failed)
		case err != nil:
			return err
		}
		text := tx.String()
		if table := familyName(tx.Family()) + " proxier"; d.Full {
			text = fmt.Sprintf("add table %s\ndelete table %s\n%s", table, table, text)
		}
		err = b.env.Fail()
		if err == nil {
			err = b.tables.Load(text)
		}
		if err != nil {
			tx.Revert()
			return errors.Join(ruleset.ErrNeedFull, err)
		}
		b.env.Look()
	}
	if len(refused.Failed) != 0 {
		return refused
	}
	return nil
}
