package conformance

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestSimulatedPlanesPass runs the suite against data planes with and without owners
// in the keys of frontends, which take turns in the short form.
func TestSimulatedPlanesPass(t *testing.T) {
	t.Parallel()
	if !testtime.Thorough() {
		planes := [...]func(testing.TB, SimEnv) Fake{simPlanes(false, ""), simPlanes(true, "")}
		Simulate(t, Simulation{Worlds: len(planes), New: func(tb testing.TB, env SimEnv) Fake {
			return planes[testtime.Turn(tb.Name(), len(planes))](tb, env)
		}})
		return
	}
	const worlds = 24
	for i, owners := range []bool{false, true} {
		t.Run(fmt.Sprintf("owners=%t", owners), func(t *testing.T) {
			t.Parallel()
			Simulate(t, Simulation{New: simPlanes(owners, ""), First: uint64(i * worlds), Worlds: worlds})
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
func (r *recorder) Error(args ...any) { r.Errorf("%s", fmt.Sprint(args...)) }
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
	for _, f := range slices.Backward(r.undo) {
		f()
	}
	return r.text.String()
}

// TestSimulateFindsFaults checks that random worlds find each broken backend, and
// that the named scripted world and mode does.
func TestSimulateFindsFaults(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		fault  fault
		owners bool
		// world and mode name a script that must fail, "" for none.
		world     string
		mode      simMode
		complaint string
	}{
		{"ignores errors", false, "node port", failing, `must|forward`},
		{"ignores errors", true, "node port", failing, `must|forward`},
		{"writes frontends before pools", false, "node port", plain, `during Apply: .*forwarded, but to no endpoint`},
		{"empties pools first", false, "internal policy Local", plain, `during Apply: .*forwarded, but to no endpoint`},
		{"ignores frontends that move", true, "frontends move between services", plain, `is not among the endpoints allowed`},
		{"deletes frontends that move", false, "frontends move between services", plain, `must be forward|forwarded before and after`},
		{"ignores affinity that changes", false, "affinity switched on and off", plain, `affinity is 0s, must be 1m0s`},
		{"leaves what an earlier process wrote", true, "restart", plain, `forward to .*, must`},
		{"leaves pools", false, "", plain, `the incremental contents differ`},
		{"names pools by ID", false, "", plain, `endpoint`},
		{"ignores source ranges", false, "source ranges", plain, `source ranges`},
		{"has no hairpin", false, "cluster IP", plain, `must be masqueraded`},
		{"has no protocol in the keys of frontends", false, "keys that differ in the protocol", plain, `must|forward`},
		{"has no port in the keys of frontends", false, "keys that differ in the port", plain, `must|forward`},
		{"has no family in the keys of frontends", false, "keys that differ in the family", plain, `must|forward`},
		{"has no protocol in the keys of pools", false, "port names that move to another protocol", plain, `must|endpoint`},
		{"has no port in the keys of pools", false, "keys that differ in the port", plain, `must|endpoint`},
		{"has no family in the keys of pools", false, "keys that differ in the family", plain, `must|endpoint`},
		{"has no target in the keys of pools", false, "keys that differ in the pool", plain, `must|endpoint`},
		{"has no protocol in the keys of endpoints", false, "keys of endpoints that differ in the protocol", plain, `invalid AddrPort|is not among`},
	} {
		t.Run(fmt.Sprintf("%s/owners=%t", test.fault, test.owners), func(t *testing.T) {
			t.Parallel()
			s := must.Get(Simulation{New: simPlanes(test.owners, test.fault)}.complete())(t)
			want := regexp.MustCompile(test.complaint)
			for _, world := range worldsOfSuite(t) {
				if world.name != test.world {
					continue
				}
				if failures := complaints(t, func(tb testing.TB) { s.script(tb, world, test.mode) }); !want.MatchString(failures) {
					t.Errorf("%q (%s) reports %q, want %s", world.name, test.mode, failures, want)
				}
			}
			if strings.HasPrefix(string(test.fault), "has no ") && test.world != "cluster IP" {
				return // the script has found it; how many random worlds do is chance
			}
			for seed := range uint64(s.Worlds) {
				failures := complaints(t, func(tb testing.TB) { s.random(tb, seed) })
				if failures == "" {
					continue
				}
				if !strings.Contains(failures, "changes suffice") {
					t.Errorf("seed %d was not minimized: %s", seed, failures)
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
	t.Parallel()
	s, err := Simulation{New: func(testing.TB, SimEnv) Fake {
		return Fake{
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
	for _, world := range worldsOfSuite(t) {
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
// and pass once the feature is skipped. A data plane that skips a feature and makes an error in
// something else must fail, too.
func TestSkippedFeaturesAreNotJudged(t *testing.T) {
	t.Parallel()
	type handle func(ruleset.Packet, func(ruleset.Packet) Outcome) Outcome
	// replace returns a handle that has an outcome for packets with an action.
	replace := func(was ruleset.Action, o Outcome) handle {
		return func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
			if out := h(p); out.Action != was {
				return out
			}
			return o
		}
	}
	elsewhere := Outcome{Action: ruleset.ActionForward, Endpoints: []Choice{{Addr: netip.MustParseAddrPort("10.244.1.99:1"), Weight: 1}}}
	for feature, test := range map[Feature]struct {
		world string
		// fault is that of the backend without the feature, or handle changes what it does.
		fault  fault
		handle handle
		// lie or lieFault is an error that the feature does not excuse.
		lie      handle
		lieFault fault
		lieWorld string // world if ""
	}{
		Refuse: {
			world: "no endpoints",
			handle: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				o := h(p)
				if o.Action != ruleset.ActionForward {
					return Outcome{}
				}
				return o
			},
			lie: replace(ruleset.ActionReject, elsewhere),
		},
		Drop: {
			world:  "internal policy Local",
			handle: replace(ruleset.ActionDrop, Outcome{Action: ruleset.ActionReject}),
			lie:    replace(ruleset.ActionDrop, elsewhere),
		},
		UDP: {
			world: "cluster IP",
			handle: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				if p.Protocol == udp {
					return elsewhere
				}
				return h(p)
			},
			lie: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				if o := h(p); p.Protocol == udp || o.Action != ruleset.ActionForward {
					return o
				}
				return elsewhere
			},
		},
		Masquerade: {
			world: "cluster IP",
			handle: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				o := h(p)
				for i := range o.Endpoints {
					o.Endpoints[i].Masquerade = false
				}
				return o
			},
			lie: replace(ruleset.ActionForward, elsewhere),
		},
		ShortCircuit: {
			world: "external policy Local",
			handle: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				p.From, p.InInterface = outsider(p.From), "eth0"
				o := h(p)
				for i := range o.Endpoints {
					o.Endpoints[i].Masquerade = true
				}
				return o
			},
			lie: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				if o := h(p); p.InInterface != "eth0" || o.Action != ruleset.ActionForward {
					return o
				}
				return elsewhere // for clients, which have no short circuit
			},
		},
		PreferLocal: {
			world: "local endpoints preferred",
			handle: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				o := h(p)
				if o.Action != ruleset.ActionForward {
					return o
				}
				p.To = aim{address: "cluster1", port: 80}.at(tracker.FamilyOf(p.To.Addr())) // all endpoints
				return h(p)
			},
			lie: func(p ruleset.Packet, h func(ruleset.Packet) Outcome) Outcome {
				if o := h(p); p.To != (aim{address: "cluster1", port: 80}).at(tracker.FamilyOf(p.To.Addr())) || o.Action != ruleset.ActionForward {
					return o
				}
				return elsewhere
			},
		},
		ReplaceInPlace: {world: "affinity switched on and off", fault: "removes entries to replace them", lieFault: "writes frontends before pools", lieWorld: "node port"},
	} {
		t.Run(string(feature), func(t *testing.T) {
			skipped := map[Feature]string{feature: "lacking", Masquerade: "not simulated", ServiceCIDRs: "not simulated", ClosedPorts: "not simulated"}
			for name, run := range map[string]struct {
				skip   map[Feature]string
				fault  fault
				handle handle
				world  string
				fails  bool
			}{
				"undeclared":            {nil, test.fault, test.handle, test.world, true},
				"declared":              {skipped, test.fault, test.handle, test.world, false},
				"declared, and it lies": {skipped, test.lieFault, test.lie, cmp.Or(test.lieWorld, test.world), true},
			} {
				s, err := Simulation{Skip: run.skip, New: func(tb testing.TB, env SimEnv) Fake {
					p := simPlanes(false, run.fault)(tb, env)
					if inner := p.Handle; run.handle != nil {
						p.Handle = func(pk ruleset.Packet) Outcome { return run.handle(pk, inner) }
					}
					return p
				}}.complete()
				if err != nil {
					t.Fatal(err)
				}
				found := false
				for _, world := range worldsOfSuite(t) {
					if world.name != run.world {
						continue
					}
					found = true
					failures := complaints(t, func(tb testing.TB) { s.script(tb, world, plain) })
					if (failures != "") != run.fails {
						t.Errorf("%q, %s: %q", world.name, name, failures)
					}
				}
				if !found {
					t.Errorf("there is no world %q", run.world)
				}
			}
		})
	}
}

// outsider returns a client's address of the same family.
func outsider(a netip.Addr) netip.Addr {
	return pick(tracker.FamilyOf(a), "192.0.2.10", "2001:db8:1::a")
}
