package iptables

import (
	"context"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestSimulation runs the conformance suite with a kernel in memory. The second data plane divides changes into
// inputs of few lines and does not look at the states between them: a chain of a Service may then be in
// effect before the rules that lead to it. The third one is a vendor's.
func TestSimulation(t *testing.T) {
	t.Parallel()
	plane := func(flavor Flavor, divided bool) func(testing.TB, conformance.SimEnv) conformance.Fake {
		return func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
			return simulated(tb, env, flavor, divided)
		}
	}
	backendtest.Simulate(t, skips, plane(NFT, false), plane(Legacy, true), newVendorPlane)
}

func TestReleasesDeltas(t *testing.T) {
	t.Parallel()
	backendtest.ReleasesDeltas(t, func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
		return simulated(tb, env, NFT, false)
	})
}

func TestRefusesNothing(t *testing.T) {
	backendtest.RefusesNothing(t, func(tb testing.TB, env conformance.SimEnv) conformance.Fake { return simulated(tb, env, NFT, false) }, newVendorPlane)
}

// simulated returns a data plane in memory. Some of its failing writes meet a lock, some are
// refused or too large, and some programs are killed, before or after their work.
func simulated(tb testing.TB, env conformance.SimEnv, flavor Flavor, divided bool) conformance.Fake {
	m := newMemory(flavor)
	applying, failures := false, 0
	for _, t := range m.tables {
		lost := false
		t.Before = func(input string) error {
			if !applying {
				return nil
			}
			err := env.Fail()
			if err == nil {
				return nil
			}
			e := &CommandError{Program: "memory-restore", Status: 1, Message: err.Error()}
			kind := failures % 5
			failures++
			if kind < 2 && (strings.Contains(input, "\n-X ") || strings.Contains(input, chainProbe)) {
				// No Service is at fault, and stale chains must not stay until the next full delta.
				kind = 2
			}
			switch kind {
			case 0: // refused
			case 1:
				e.Message = "Message too long"
			case 2:
				e.Status, e.Cause = 4, ErrLocked
			case 3:
				e.Status, e.Cause = -1, err
			case 4:
				lost = true
				return nil
			}
			return e
		}
		t.After = func(string) error {
			if applying && !divided {
				env.Look()
			}
			if lost {
				lost = false
				return &CommandError{Program: "memory-restore", Status: -1, Message: "killed after its work"}
			}
			return nil
		}
	}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			c := must.Get(Config{Flavor: flavor, Families: env.Families}.withDefaults())(tb)
			b := must.Get(newBackend(context.Background(), c, m))(tb)
			for _, f := range b.families {
				if divided {
					f.limit = 60
				}
			}
			return simBackend{b, &applying}
		},
		Handle: func(p ruleset.Packet) conformance.Outcome {
			return m.tables[tracker.FamilyOf(p.To.Addr())].Handle(p)
		},
		Dump: func() string {
			var out []string
			for _, f := range env.Families {
				out = append(out, m.lines(f)...)
			}
			return strings.Join(out, "\n")
		},
	}
}

// simBackend sets applying during Apply.
type simBackend struct {
	*Backend
	applying *bool
}

func (b simBackend) Apply(ctx context.Context, d *ruleset.Delta) error {
	*b.applying = true
	defer func() { *b.applying = false }()
	return b.Backend.Apply(ctx, d)
}
