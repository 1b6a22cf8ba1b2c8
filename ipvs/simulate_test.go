package ipvs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestSimulation runs the conformance suite with a kernel in memory.
func TestSimulation(t *testing.T) {
	t.Parallel()
	backendtest.Simulate(t, skips, newPlane, newVendorPlane)
}

func TestReleasesDeltas(t *testing.T) {
	t.Parallel()
	backendtest.ReleasesDeltas(t, newPlane)
}

func TestRefusesNothing(t *testing.T) { backendtest.RefusesNothing(t, newPlane, newVendorPlane) }

// foreignMark is what network policies of another program set in the mark of all packets.
const foreignMark = "0x30000/0x30000"

// newPlane returns a Backend beside network policies of another program.
func newPlane(tb testing.TB, env conformance.SimEnv) conformance.Fake {
	config := must.Get(Config{Families: env.Families}.withDefaults())(tb)
	m := newMemory(env.NodeAddresses...)
	for _, t := range m.tables {
		for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
			must.Do(tb, t.Run("-A", chain, "-j", "MARK", "--set-xmark", foreignMark))
		}
	}
	w := &watched{memory: m, fail: env.Fail, look: env.Look}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			w.Backend = newBackend(config, m.handle())
			return w
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { w.settle(tb); return m.handlePacket(p) },
		Dump:   func() string { w.settle(tb); return m.dump() },
	}
}

// watched is a Backend whose writes fail only in Apply.
type watched struct {
	*Backend
	memory *memory
	fail   func() error
	look   func()
	// applying is set during Apply, and applied after it.
	applying, applied bool
}

func (w *watched) Apply(ctx context.Context, d *ruleset.Delta) error {
	w.memory.fail, w.memory.look = w.fail, w.look
	w.applying = true
	err := w.Backend.Apply(ctx, d)
	w.applying, w.applied = false, true
	w.memory.fail, w.memory.look = nil, nil
	return err
}

// settle does after Apply what Watch does every second. No real server has connections.
func (w *watched) settle(tb testing.TB) {
	if w.applying || !w.applied {
		return
	}
	w.applied = false
	if err := w.tend(context.Background(), time.Now().Add(time.Hour)); err != nil && !errors.Is(err, ruleset.ErrNeedFull) {
		tb.Error(err)
	}
}

// dump returns everything in the namespace, without packet marks, which depend on the order of
// changes.
func (m *memory) dump() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	// internal holds the destinations whose internal traffic has a virtual server, by mark.
	internal := map[virtualKey]string{}
	for name, set := range m.sets {
		for e, mark := range set.elements {
			line := name + " " + e.text()
			if mark != 0 {
				k := virtualKey{family: e.family, mark: mark}
				if m.servers[k] != nil && (internal[k] == "" || line < internal[k]) {
					internal[k] = line
				}
				line += " " + strconv.FormatBool(m.servers[k] != nil)
			}
			out = append(out, line)
		}
	}
	for k, v := range m.servers {
		name := k.String()
		if k.mark != 0 {
			name = "internal traffic to " + internal[k]
		}
		out = append(out, fmt.Sprint(name, " ", v.virtual))
		for at, r := range v.reals {
			out = append(out, fmt.Sprint(name, " has ", at, " ", r.weight))
		}
	}
	for name, d := range m.devices {
		for a := range d.addrs {
			out = append(out, name+" "+a.String())
		}
	}
	slices.Sort(out)
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		var rules strings.Builder
		if err := m.tables[f].Save(context.Background(), "", &rules); err != nil {
			panic(err)
		}
		out = append(out, rules.String())
	}
	return strings.Join(out, "\n")
}
