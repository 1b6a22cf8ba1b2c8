package conformance

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestSimulatedPlanesPass runs the suite against data planes with and without owners
// in the keys of frontends.
func TestSimulatedPlanesPass(t *testing.T) {
	for _, owners := range []bool{false, true} {
		t.Run(fmt.Sprintf("owners=%t", owners), func(t *testing.T) {
			Simulate(t, Simulation{New: simPlanes(owners, "")})
		})
	}
}

// recorder is a test whose failures are stored and have no effect.
type recorder struct {
	testing.TB
	mu   sync.Mutex
	text strings.Builder
	undo []func()
}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(&r.text, format+"\n", args...)
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}
func (r *recorder) Fatal(args ...any) { r.Fatalf("%s", fmt.Sprint(args...)) }
func (r *recorder) FailNow()          { runtime.Goexit() }
func (r *recorder) Helper()           {}
func (r *recorder) Cleanup(f func())  { r.undo = append(r.undo, f) }

// complaints runs f as a test and returns its failure messages.
func complaints(t *testing.T, f func(tb testing.TB)) string {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(r)
	}()
	<-done
	for _, f := range r.undo {
		f()
	}
	return r.text.String()
}

// TestSimulateFindsFaults checks that random worlds find each broken backend, and
// that the named scripted world and mode does.
func TestSimulateFindsFaults(t *testing.T) {
	for _, test := range []struct {
		fault  fault
		owners bool
		// world and mode name a script that must fail, "" for none.
		world     string
		mode      simMode
		complaint string
	}{
		{"ignores errors", false, "node port", failing, `must be|forward`},
		{"ignores errors", true, "node port", failing, `must be|forward`},
		{"writes frontends before pools", false, "node port", plain, `during Apply: .*forwarded, but to no endpoint`},
		{"empties pools first", false, "internal policy Local", plain, `during Apply: .*forwarded, but to no endpoint`},
		{"ignores frontends that move", true, "frontends move between services", plain, `is not among the endpoints allowed`},
		{"deletes frontends that move", false, "frontends move between services", plain, `must be forward|forwarded before and after`},
		{"ignores affinity that changes", false, "affinity switched on and off", plain, `affinity is 0s, must be 1m0s`},
		{"leaves what an earlier process wrote", true, "restart", plain, `forward to .*, must be`},
		{"leaves pools", false, "", plain, `the incremental contents differ`},
		{"names pools by ID", false, "", plain, `endpoint`},
		{"ignores source ranges", false, "source ranges", plain, `source ranges`},
		{"has no hairpin", false, "cluster IP", plain, `masquerade is false, must be true`},
	} {
		t.Run(fmt.Sprintf("%s/owners=%t", test.fault, test.owners), func(t *testing.T) {
			t.Parallel()
			s, err := Simulation{New: simPlanes(test.owners, test.fault)}.complete()
			if err != nil {
				t.Fatal(err)
			}
			want := regexp.MustCompile(test.complaint)
			for _, world := range scriptedWorlds() {
				if world.name != test.world {
					continue
				}
				if failures := complaints(t, func(tb testing.TB) { s.script(tb, world, test.mode) }); !want.MatchString(failures) {
					t.Errorf("%q (%s) reports %q, want %s", world.name, test.mode, failures, want)
				}
			}
			for seed := range uint64(s.Worlds) {
				failures := complaints(t, func(tb testing.TB) { s.random(tb, seed) })
				if failures == "" {
					continue
				}
				if !strings.Contains(failures, "changes suffice") {
					t.Errorf("seed %d was not minimised: %s", seed, failures)
				}
				return
			}
			t.Errorf("no random world fails")
		})
	}
}

// TestIdleBackendFailsSimulation checks that a backend that does nothing fails in the
// first world.
func TestIdleBackendFailsSimulation(t *testing.T) {
	s, err := Simulation{New: func(testing.TB, SimEnv) Plane {
		return Plane{
			Backend: func() ruleset.Backend {
				return ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil })
			},
			Handle: func(ruleset.Packet) Outcome { return Outcome{} },
		}
	}}.complete()
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for _, world := range scriptedWorlds() {
		for _, mode := range simModes {
			if complaints(t, func(tb testing.TB) { s.script(tb, world, mode) }) == "" {
				t.Errorf("%q (%s) does not fail", world.name, mode)
			}
		}
	}
	for seed := range uint64(s.Worlds) {
		if complaints(t, func(tb testing.TB) { s.random(tb, seed) }) == "" {
			t.Errorf("seed %d does not fail", seed)
		}
	}
	t.Logf("all failures within %v", time.Since(start))
}

// TestSkippedFeaturesAreNotJudged runs data planes that lack one feature each. They must fail,
// and pass once the feature is skipped.
func TestSkippedFeaturesAreNotJudged(t *testing.T) {
	lacking := map[Feature]struct {
		world  string
		handle func(ruleset.Packet, func(ruleset.Packet) Outcome) Outcome
	}{
		Refuse: {"no endpoints", func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
			o := h(p)
			if o.Action != ruleset.ActionForward {
				return Outcome{}
			}
			return o
		}},
		Masquerade: {"cluster IP", func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
			o := h(p)
			for i := range o.Endpoints {
				o.Endpoints[i].Masquerade = false
			}
			return o
		}},
		ShortCircuit: {"external policy Local", func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
			p.From, p.InInterface = outsider(p.From), "eth0"
			o := h(p)
			for i := range o.Endpoints {
				o.Endpoints[i].Masquerade = true
			}
			return o
		}},
	}
	for feature, test := range lacking {
		t.Run(string(feature), func(t *testing.T) {
			for _, skip := range []map[Feature]string{nil, {feature: "lacking", Masquerade: "not simulated", ServiceCIDRs: "not simulated", ClosedPorts: "not simulated"}} {
				s, err := Simulation{Skip: skip, New: func(tb testing.TB, env SimEnv) Plane {
					p := simPlanes(false, "")(tb, env)
					handle := p.Handle
					p.Handle = func(pk ruleset.Packet) Outcome { return test.handle(pk, handle) }
					return p
				}}.complete()
				if err != nil {
					t.Fatal(err)
				}
				for _, world := range scriptedWorlds() {
					if world.name != test.world {
						continue
					}
					failures := complaints(t, func(tb testing.TB) { s.script(tb, world, plain) })
					if (failures != "") != (skip == nil) {
						t.Errorf("%q with %v skipped: %q", world.name, skip, failures)
					}
				}
			}
		})
	}
}

// outsider returns a client's address of the same family.
func outsider(a netip.Addr) netip.Addr {
	return pick(tracker.FamilyOf(a), "192.0.2.10", "2001:db8:1::a")
}
