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
	// Fail returns an error if a write must fail. The data plane calls it in each write and returns its error. A
	// failed write may or may not take effect. Fail and Look must be called within Apply, by one goroutine at a time.
	Fail func() error
	// Look checks the current handling of packets. A data plane that is written entry by entry calls it after each
	// write.
	Look func()
}

// Fake is a simulated data plane, with the backends that write to it.
type Fake struct {
	// Backend makes a backend that writes to the data plane. It is required. It is called again for each restart: the
	// previous backend is no longer used, and the new one gets the data plane in its current state.
	Backend func() ruleset.Backend
	// Handle returns what the data plane does with a packet. It is required, and must not change anything. It is
	// called by one goroutine at a time, also from within Look.
	Handle func(ruleset.Packet) Outcome
	// Dump, if not nil, returns the contents of the data plane, one line per entry. After each step of a random world
	// it is compared with another data plane, whose backend gets everything in one delta, to find entries that no
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

	// seen describes a result of connections.
	seen string
}

// Choice is an endpoint that may get a packet.
type Choice struct {
	// Addr is the endpoint's address. The zero AddrPort means an endpoint that the
	// data plane chooses and does not find.
	Addr netip.AddrPort
	// Weight is the endpoint's weight relative to the others.
	Weight int
	// Masquerade reports whether the endpoint sees an address of the node as the source. It is ignored for endpoints
	// at the node's own addresses.
	Masquerade bool
}

// Simulate tests a backend without packets. It calls [Fake].Handle where [Run] and RunRandom make connections, and
// compares the [Outcome] with [ruleset.Snapshot.Trace]. It needs no privileges and runs on every system.
//
// Simulate runs every scripted world three times: unchanged, with failing writes before each step, and with a restart
// before each step. Random worlds do all of this at random, and in most of their steps frontends move between
// Services. After each successful step, packets from every kind of host to every current and former frontend must get
// the result of Trace. At each [SimEnv].Look a frontend that forwards before and after must forward, to endpoints
// that exist before or after. One that forwards neither before nor after must not forward. A data plane that removes
// an entry to replace it skips [ReplaceInPlace].
//
// Affinity, hashes and weights are compared with the Outcome. Only packets can show whether the data plane implements
// them.
func Simulate(t *testing.T, s Simulation) {
	t.Helper()
	s, err := s.complete()
	if err != nil {
		t.Fatal(err)
	}
	worlds, err := suite(s.Scripts, false)
	if err != nil {
		t.Fatal(err)
	}
	eachWorld(t, worlds, s.Skip, func(t *testing.T, world world) {
		t.Parallel()
		for _, mode := range simModes {
			if _, ok := s.Skip[Restart]; ok && mode == restarting {
				continue
			}
			t.Run(string(mode), func(t *testing.T) { s.script(t, world, mode) })
		}
	})
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

func (s Simulation) script(tb testing.TB, world world, mode simMode) {
	w := s.world(tb, world.config)
	w.mode = mode
	world.run(w.World)
}

func (s Simulation) world(tb testing.TB, c config) *simulated {
	tb.Helper()
	m := &simulated{World: newWorldOf(tb, c, s.Families, s.Skip, rand.New(rand.NewPCG(1, 1))), o: s}
	m.attach()
	return m
}

func (s Simulation) random(tb testing.TB, seed uint64) {
	tb.Helper()
	config := randomConfig(rand.New(rand.NewPCG(seed, 1)), s.Skip, seed%3 == 0)
	if seed%2 == 0 {
		config.delta = 2 // pools grow and shrink in several deltas
	}
	randomly(tb, seed, s.Steps, s.Families, s.Skip, config, 5*time.Second, func(inner testing.TB, steps worldgen.Steps) (int, error) {
		w := s.world(inner, config)
		for i, ops := range steps {
			w.rng = stepRand(seed, i)
			if err := w.randomStep(ops); err != nil {
				return i, err
			}
		}
		return 0, nil
	})
}

func (m *simulated) randomStep(ops []worldgen.Op) error {
	restart := m.does(Restart) && m.rng.IntN(8) == 0
	if restart {
		m.Cursor.Detach()
	}
	for _, o := range ops {
		m.apply(o)
	}
	if restart {
		m.World.attach()
	}
	if m.rng.IntN(8) == 0 {
		m.Cursor.Resync()
	}
	m.mode = plain
	if m.rng.IntN(2) == 0 {
		m.mode = failing
	}
	if err := m.sync(); err != nil {
		return err
	}
	return m.compareDump()
}
