package nftables

import (
	"context"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
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

// newPlane returns a data plane in memory whose transactions have at most limit bytes.
func newPlane(tb testing.TB, env conformance.SimEnv, limit int) conformance.Fake {
	m := newMemory()
	m.limit, m.rules = limit, fake.New()
	elsewhere := map[netip.Addr]bool{}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			b := m.backend(tb, Config{Families: env.Families}, withoutGrace)
			return applier{b, func(ctx context.Context, d *ruleset.Delta) error {
				noteElsewhere(d, elsewhere)
				m.fail, m.look = env.Fail, env.Look
				defer func() { m.fail, m.look = nil, nil }()
				return b.Apply(ctx, d)
			}}
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { return handle(m.rules, p, elsewhere) },
		Dump:   m.describe,
	}
}

// handle returns what happens to a packet. elsewhere holds the addresses of other nodes' endpoints.
func handle(tables *fake.Tables, p ruleset.Packet, elsewhere map[netip.Addr]bool) conformance.Outcome {
	out := tables.Handle(p)
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
