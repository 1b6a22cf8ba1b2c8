package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Simulation configures [Simulate].
type Simulation struct {
	// New makes an empty data plane for one world. It is required.
	New func(tb testing.TB, env SimEnv) Fake
	// Families lists the address families to test. Nil means both.
	Families []tracker.Family
	// Skip lists the features that the backend lacks, with a reason, as in
	// [Options].Skip. Simulate does not check behavior about these features.
	Skip map[Feature]string
	// First is the seed of the first random world. Each further world has the next
	// seed. The same seed makes the same world.
	First uint64
	// Worlds is the number of random worlds, and Steps the number of changes of each.
	// 0 means 24.
	Worlds, Steps int
	// Scripts, if not nil, is a folder with worlds that Simulate runs after those of the suite,
	// in files *.txt. README.md of the folder worlds describes them.
	Scripts fs.FS
}

// SimEnv is the environment of a simulated data plane.
type SimEnv struct {
	// Families lists the address families in use.
	Families []tracker.Family
	// NodeAddresses lists the node's own addresses, which every packet has in
	// [ruleset.Packet].NodeAddresses.
	NodeAddresses []netip.Addr
	// Fail returns an error if a write must fail, and nil otherwise. The data plane
	// calls it in each write and returns its error. A failed write may or may not
	// take effect. Fail and Look must be called within Apply, by one goroutine at a
	// time.
	Fail func() error
	// Look checks the current handling of packets. A data plane that is written entry
	// by entry calls it after each write. One that replaces everything in one step
	// need not call it.
	Look func()
}

// Fake is a simulated data plane, with the backends that write to it.
type Fake struct {
	// Backend makes a backend that writes to the data plane. It is required. It is
	// called again for each restart: the previous backend is then no longer used, and
	// the new one gets the data plane in its current state.
	Backend func() ruleset.Backend
	// Handle returns what the data plane does with a packet. It is required. It looks
	// the packet up in the data plane and must not change anything. It is called by
	// one goroutine at a time, also from within Look.
	Handle func(ruleset.Packet) Outcome
	// Dump, if not nil, returns the contents of the data plane, one line per entry.
	// After each step of a random world it is compared with the contents of another
	// data plane, whose backend gets everything in one delta. This finds entries that no
	// packet uses. The text must not contain values that may differ, such as IDs.
	Dump func() string
}

// Outcome is the handling of the first packet of a connection by a data plane.
type Outcome struct {
	// Action is what happens to the packet. 0 counts as [ruleset.ActionPass].
	Action ruleset.Action
	// Endpoints holds the endpoints that may get the packet, if it is forwarded.
	Endpoints []Choice
	// Affinity is the time for which the client keeps its endpoint, 0 for none.
	Affinity time.Duration
	// Hash is the part of the connection that determines the endpoint.
	Hash tracker.Hash
}

// Choice is an endpoint that may get a packet.
type Choice struct {
	// Addr is the endpoint's address. The zero AddrPort means an endpoint that the
	// data plane chooses and does not find.
	Addr netip.AddrPort
	// Weight is the endpoint's weight relative to the others.
	Weight int
	// Masquerade reports whether the endpoint sees an address of the node as the
	// source, either because of [ruleset.Frontend].Masquerade or because the endpoint
	// is the packet's source. It is ignored for endpoints at the node's own
	// addresses.
	Masquerade bool
}

// Simulate tests a backend without packets. It calls [Fake].Handle where [Run] and
// RunRandom make connections, and compares the [Outcome] with
// [ruleset.Snapshot.Trace]. It needs no privileges and runs on every system.
//
// Simulate runs every scripted world three times: unchanged, with failing writes
// before each step, and with a restart before each step. Random worlds do all of this
// at random, and in most of their steps frontends move between Services. After each
// successful step, packets from every kind of host to every current and former
// frontend must get the result of Trace. At each [SimEnv].Look a frontend that
// forwards before and after must forward, to endpoints that exist before or after. One that
// forwards neither before nor after must not forward. A data plane that removes an entry to
// replace it breaks these rules, and skips [ReplaceInPlace].
//
// Affinity, hashes and weights are compared with the Outcome. Only packets can show
// whether the data plane implements them.
func Simulate(t *testing.T, s Simulation) {
	t.Helper()
	s, err := s.complete()
	if err != nil {
		t.Fatal(err)
	}
	worlds, err := withScripts(scriptedWorlds(), s.Scripts)
	if err != nil {
		t.Fatal(err)
	}
	for _, world := range worlds {
		t.Run(world.name, func(t *testing.T) {
			for _, f := range world.needs {
				if why, ok := s.Skip[f]; ok {
					t.Skipf("the backend does not support %s: %s", f, why)
				}
			}
			t.Parallel()
			for _, mode := range simModes {
				if _, ok := s.Skip[Restart]; ok && mode == restarting {
					continue
				}
				t.Run(string(mode), func(t *testing.T) { s.script(t, world, mode) })
			}
		})
	}
	for i := range s.Worlds {
		seed := s.First + uint64(i)
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			s.random(t, seed)
		})
	}
}

// complete validates the simulation and fills in the defaults.
func (s Simulation) complete() (Simulation, error) {
	if s.New == nil {
		return s, errors.New("conformance: Simulation.New is required")
	}
	s.Worlds, s.Steps = cmp.Or(s.Worlds, 24), cmp.Or(s.Steps, 24)
	var err error
	s.Families, err = validFamilies(s.Families)
	return s, err
}

// simMode is what a simulated world does in addition to its script.
type simMode string

const (
	plain      simMode = "plain"
	failing    simMode = "failing writes"
	restarting simMode = "restarts"
)

var simModes = []simMode{plain, failing, restarting}

// script runs a scripted world.
func (s Simulation) script(tb testing.TB, world world, mode simMode) {
	w := newSimWorld(tb, s, world.config, rand.New(rand.NewPCG(1, 1)))
	w.mode = mode
	world.run(w)
}

// random runs a random world. If it fails, random prints a small set of changes with
// which it still fails.
func (s Simulation) random(tb testing.TB, seed uint64) {
	tb.Helper()
	config := randomConfig(rand.New(rand.NewPCG(seed, 1)), s.Skip, seed%3 == 0)
	if seed%2 == 0 {
		config.delta = 2 // pools grow and shrink in several deltas
	}
	g := worldgen.New(seed, randomParams(s.Families, s.Skip, config))
	steps := worldgen.Steps{g.Start()}
	for range s.Steps {
		steps = append(steps, g.Step())
	}
	at, err := s.try(tb, seed, config, steps)
	if err == nil {
		return
	}
	tb.Errorf("seed %d, step %d: %v", seed, at, err)
	steps = steps[:at+1]
	deadline := time.Now().Add(5 * time.Second)
	fewer := worldgen.Minimize(steps, func(fewer worldgen.Steps) bool {
		_, err := s.try(tb, seed, config, fewer)
		return err != nil
	}, func() bool { return time.Now().After(deadline) })
	_, err = s.try(tb, seed, config, fewer)
	tb.Errorf("%d of %d changes suffice to fail (local traffic %+v, NodePort addresses %v, masquerade all %v): %v\n%s",
		fewer.Ops(), steps.Ops(), config.localTraffic, config.nodePortAddresses, config.masqueradeAll, err, fewer)
}

// try performs steps in a new world. It returns the step that failed, if any.
func (s Simulation) try(tb testing.TB, seed uint64, c config, steps worldgen.Steps) (int, error) {
	inner := &quiet{TB: tb}
	defer inner.cleanup()
	w := newSimWorld(inner, s, c, nil)
	for i, ops := range steps {
		// The random choices of a step depend on its number only, so that they repeat
		// in a world with fewer changes.
		w.rng = rand.New(rand.NewPCG(seed, uint64(i)))
		restart := w.does(Restart) && w.rng.IntN(8) == 0
		if restart {
			w.detach()
		}
		for _, o := range ops {
			w.apply(o)
		}
		if restart {
			w.attach()
		}
		if w.rng.IntN(8) == 0 {
			w.resync()
		}
		w.mode = plain
		if w.rng.IntN(2) == 0 {
			w.mode = failing
		}
		if err := w.sync(); err != nil {
			return i, err
		}
		if err := w.compareDump(); err != nil {
			return i, err
		}
	}
	return 0, nil
}

// compareDump compares the result of writing step by step with that of writing
// everything in one delta.
func (w *simWorld) compareDump() error {
	if w.plane.Dump == nil {
		return nil
	}
	inner := &quiet{TB: w.tb}
	defer inner.cleanup()
	cold := w.o.New(inner, SimEnv{Families: w.ipFamilies, NodeAddresses: w.allAddresses(), Fail: func() error { return nil }, Look: func() {}})
	cursor := w.engine.Attach("cold", cold.Backend())
	defer cursor.Detach()
	if err := cursor.Sync(w.tb.Context()); err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	if got, want := w.plane.Dump(), cold.Dump(); got != want {
		if d := difference(got, want); d != "" {
			return fmt.Errorf("the incremental contents differ from those of a new data plane:\n%s", d)
		}
	}
	return nil
}
