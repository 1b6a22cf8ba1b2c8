package conformance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance/worldgen"
	"github.com/go-proxier/proxier/tracker"
)

// Simulation says how [Simulate] tests a backend.
type Simulation struct {
	// New makes an empty data plane for one world; required.
	New func(tb testing.TB, env SimEnv) Plane
	// Families is the address families to test, nil for both.
	Families []tracker.Family
	// Skip lists the features that the backend does without, and why, as in
	// [Options.Skip]. What such a feature is about is not judged.
	Skip map[Feature]string
	// First is the seed of the first random world; each further one has the next. The
	// same seed makes the same world.
	First uint64
	// Worlds is the number of random worlds, 0 for 24, and Steps is how often each is
	// changed, 0 for 24.
	Worlds, Steps int
}

// SimEnv is what a simulated data plane is made with.
type SimEnv struct {
	// Families is the address families in use.
	Families []tracker.Family
	// Fail returns an error if a write must fail, and nil otherwise. The data plane
	// calls it in each write and returns its error. Whether a write that fails takes
	// effect is the data plane's choice. Fail and Look must be called within Apply, by
	// one goroutine at a time.
	Fail func() error
	// Look judges what packets meet at this moment. A data plane that is written to
	// entry by entry calls it after each write. One that replaces everything in one step
	// need not call it.
	Look func()
}

// Plane is a simulated data plane, with the backends that write to it.
type Plane struct {
	// Backend makes a backend that writes to the data plane; required. It is called
	// again for each restart: the backend made before is then no longer used, and the
	// new one finds the data plane as that one left it.
	Backend func() ruleset.Backend
	// Handle returns what the data plane does with a packet; required. It looks the
	// packet up in what has been written and must not change anything. It is called by
	// one goroutine at a time, also from within Look.
	Handle func(ruleset.Packet) Outcome
	// Dump, if not nil, returns what has been written, a line an entry. After each step
	// of a random world it is compared with that of another data plane, whose backend
	// is given everything at once. What may differ without meaning, such as IDs, must not
	// be in it. It finds entries that no packet meets.
	Dump func() string
}

// Outcome is what a data plane does with the first packet of a connection.
type Outcome struct {
	// Action is what becomes of the packet. 0 counts as [ruleset.ActionPass].
	Action ruleset.Action
	// Endpoints holds, if the packet is forwarded, every endpoint that may get it.
	Endpoints []Choice
	// Affinity is for how long the client stays with its endpoint, 0 for not at all.
	Affinity time.Duration
	// Hash is what of the connection the endpoint follows from.
	Hash tracker.Hash
}

// Choice is an endpoint that may get a packet.
type Choice struct {
	// Addr is the endpoint's address. The zero AddrPort stands for an endpoint that the
	// data plane chooses and does not find.
	Addr netip.AddrPort
	// Weight is its weight among the others.
	Weight int
	// Masquerade reports whether it gets the packet with an address of the node's as
	// the source: because of [ruleset.Frontend.Masquerade], or because the endpoint is
	// the packet's source. It is not judged for endpoints at the node's own addresses.
	Masquerade bool
}

// Simulate tests a backend without packets: it calls [Plane.Handle] where [Run] and
// RunRandom make connections, and compares the [Outcome] with
// [ruleset.Snapshot.Trace]. It needs no privileges and runs on every system.
//
// Every scripted world is run three times: as it is, with writes that fail before
// each step, and with a restart before each step. Random worlds do all of that by
// chance, and frontends move between Services in most of their steps. After each
// step that succeeded, packets from everywhere to every frontend, and to those that
// there were, must meet exactly what the oracle returns. At each [SimEnv.Look]
// a frontend that forwards before and after must forward, to endpoints that there are
// before or after.
//
// Affinity, hashes and weights are judged by what an Outcome states. Whether the data
// plane keeps to it only packets can show.
func Simulate(t *testing.T, s Simulation) {
	t.Helper()
	s, err := s.complete()
	if err != nil {
		t.Fatal(err)
	}
	for _, world := range scriptedWorlds() {
		t.Run(world.name, func(t *testing.T) {
			for _, f := range world.needs {
				if why, ok := s.Skip[f]; ok {
					t.Skipf("the backend does not do %s: %s", f, why)
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

// complete checks the simulation and returns it with the defaults filled in.
func (s Simulation) complete() (Simulation, error) {
	if s.New == nil {
		return s, errors.New("conformance: Simulation.New is required")
	}
	if s.Worlds == 0 {
		s.Worlds = 24
	}
	if s.Steps == 0 {
		s.Steps = 24
	}
	var err error
	s.Families, err = validFamilies(s.Families)
	return s, err
}

// simMode is what a simulated world does besides its script.
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

// random runs a random world. Of one that fails, as few of the changes as it takes are
// printed.
func (s Simulation) random(tb testing.TB, seed uint64) {
	tb.Helper()
	steps := worldgen.Steps{}
	var config config
	generate := func() *worldgen.Generator {
		rng := rand.New(rand.NewPCG(seed, 1))
		config = randomConfig(rng, s.Skip, seed%3 == 0)
		return worldgen.New(seed, randomParams(s.Families, s.Skip, config))
	}
	g := generate()
	for i := range 1 + s.Steps {
		if i == 0 {
			steps = append(steps, g.Start())
		} else {
			steps = append(steps, g.Step())
		}
	}
	at, err := s.try(tb, seed, config, steps)
	if err == nil {
		return
	}
	tb.Errorf("seed %d, step %d: %v", seed, at, err)
	steps = steps[:at+1]
	deadline := time.Now().Add(5 * time.Second)
	fewer := worldgen.Minimise(steps, func(fewer worldgen.Steps) bool {
		_, err := s.try(tb, seed, config, fewer)
		return err != nil
	}, func() bool { return time.Now().After(deadline) })
	_, err = s.try(tb, seed, config, fewer)
	tb.Errorf("%d of %d changes are enough (local traffic %+v, NodePort addresses %v, masquerade all %v): %v\n%s",
		fewer.Ops(), steps.Ops(), config.localTraffic, config.nodePortAddresses, config.masqueradeAll, err, fewer)
}

// try goes through steps in a new world. It returns the step after which something was
// wrong.
func (s Simulation) try(tb testing.TB, seed uint64, c config, steps worldgen.Steps) (int, error) {
	inner := &quiet{TB: tb}
	defer inner.cleanup()
	w := newSimWorld(inner, s, c, nil)
	for i, ops := range steps {
		// What happens in a step depends on its number alone, so that it happens again
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

// compareDump compares what was written step by step with what is written at once.
func (w *simWorld) compareDump() error {
	if w.plane.Dump == nil {
		return nil
	}
	inner := &quiet{TB: w.tb}
	defer inner.cleanup()
	cold := w.o.New(inner, SimEnv{Families: w.o.Families, Fail: func() error { return nil }, Look: func() {}})
	cursor := w.engine.Attach("cold", cold.Backend())
	defer cursor.Detach()
	if err := cursor.Sync(w.tb.Context()); err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	if got, want := w.plane.Dump(), cold.Dump(); got != want {
		if d := difference(got, want); d != "" {
			return fmt.Errorf("what was written step by step differs from what is at once:\n%s", d)
		}
	}
	return nil
}

// simHost is where packets come from.
type simHost struct {
	name, in string
	addr     func(tracker.Family) netip.Addr
}

// host returns the host of a name, as in [row].
func (w *simWorld) host(name string) simHost {
	var n int
	switch {
	case name == nodeName:
		return simHost{name, "", primary}
	case name == "loopback":
		return simHost{name, "", loopback}
	case strings.HasPrefix(name, "client"):
		fmt.Sscanf(name, "client%d", &n)
		return simHost{name, "eth0", func(f tracker.Family) netip.Addr { return clientAddr(f, n) }}
	}
	node, addr := podNamed(name)
	switch {
	case node == remoteName:
		return simHost{name, "eth1", addr}
	case w.config.bridge:
		return simHost{name, bridgeName, addr}
	}
	return simHost{name, interfacePrefix + name, addr}
}

// nodeAddresses returns the node's own addresses.
func (w *simWorld) nodeAddresses(f tracker.Family) []netip.Addr {
	out := nodeAddresses(f)
	for _, t := range w.config.bound {
		out = append(out, t.at(f).Addr())
	}
	return out
}

// podAt returns the name of the pod with the address, or "".
func (w *simWorld) podAt(f tracker.Family, a netip.Addr) string {
	i := slices.IndexFunc(w.pods, func(name string) bool {
		_, addr := podNamed(name)
		return addr(f) == a
	})
	if i < 0 {
		return ""
	}
	return w.pods[i]
}
