package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Random configures [RunRandom].
type Random struct {
	// First is the seed of the first world. Each further world has the next seed. The
	// same seed makes the same world.
	First uint64
	// Worlds is the number of worlds, 0 for 10, and Steps the number of changes of
	// each, 0 for 4.
	Worlds, Steps int
	// For, if not 0, is the duration for which worlds are made, whatever Worlds is.
	For time.Duration
	// Packets is the number of connections after each step, 0 for 60.
	Packets int
	// Dump, if not nil, returns what a backend has programmed. After each step it is
	// compared with the result of another backend, made in its own namespace, that
	// gets the final state in one delta. The text must not contain values that may differ,
	// such as allocated numbers.
	Dump func(tb testing.TB, env Env, b ruleset.Backend) string
}

// RunRandom tests a backend in random worlds, each a parallel sub-test named by its
// seed. After each step of a series of changes, random connections must have the
// result of Trace. If a world fails and -v is given, RunRandom prints a small set of
// changes with which it still fails. Retransmissions are excused as by [Run].
func RunRandom(t *testing.T, o Options, r Random) {
	t.Helper()
	if _, err := o.validate(); err != nil {
		t.Fatal(err)
	}
	if !forwards(t, o) {
		return
	}
	r.Worlds, r.Steps, r.Packets = cmp.Or(r.Worlds, 10), cmp.Or(r.Steps, 4), cmp.Or(r.Packets, 60)
	o.run = new(excuses)
	t.Cleanup(func() { o.run.report(t) })
	run := func(t *testing.T, first, worlds int) {
		for i := range worlds {
			seed := r.First + uint64(first+i)
			t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
				t.Parallel()
				newRandomWorld(t, o, r, seed).run()
			})
		}
	}
	if r.For == 0 {
		run(t, 0, r.Worlds)
		return
	}
	const atOnce = 8
	start := time.Now()
	for first := 0; time.Since(start) < r.For && !t.Failed(); first += atOnce {
		t.Run(fmt.Sprintf("after=%v", time.Since(start).Round(time.Second)), func(t *testing.T) { run(t, first, atOnce) })
	}
}

// randomWorld is a random world.
type randomWorld struct {
	testing.TB
	options Options
	random  Random
	seed    uint64
	rng     *rand.Rand
	// config is the configuration of the network, the same each time the world is made.
	config config
}

func newRandomWorld(tb testing.TB, o Options, r Random, seed uint64) *randomWorld {
	w := &randomWorld{TB: tb, options: o, random: r, seed: seed, rng: rand.New(rand.NewPCG(seed, 1))}
	w.config = randomConfig(w.rng, o.Skip, seed%3 == 0 && sctpTracked())
	return w
}

// generator returns the generator of a world's changes.
func (w *randomWorld) generator(world *World) *worldgen.Generator {
	return worldgen.New(w.seed, w.params(world))
}

func (w *randomWorld) params(world *World) worldgen.Params {
	return randomParams(world.Env.Families, w.options.Skip, w.config)
}

// failure is the failure of a step.
type failure struct {
	err error
	// packets holds the failed connections, if the failure is about connections.
	packets []packet
}

// packet is one connection to make.
type packet struct {
	from string
	row  row
	f    tracker.Family
}

func (w *randomWorld) run() {
	w.Helper()
	world := newWorld(w, w.options, w.config)
	g := w.generator(world)
	steps := worldgen.Steps{}
	for i := range 1 + w.random.Steps {
		ops := g.Start
		if i > 0 {
			ops = g.Step
		}
		steps = append(steps, ops())
		m := w.step(world, steps[i], nil)
		if m.err == nil {
			continue
		}
		w.Errorf("seed %d, step %d: %v", w.seed, i, m.err)
		if !testing.Verbose() {
			w.Logf("to find a small set of changes that fails, within two minutes, run it again with the same flags and environment and -v -run '%s$'", w.Name())
			return
		}
		deadline := time.Now().Add(time.Minute)
		fewer := worldgen.Minimize(steps, func(s worldgen.Steps) bool { return w.fails(s, m) }, func() bool { return time.Now().After(deadline) })
		w.Errorf("%d of %d changes suffice to fail (local traffic %+v, NodePort addresses %v, masquerade all %v):\n%s",
			fewer.Ops(), steps.Ops(), world.Engine.Snapshot().Node.LocalTraffic, w.config.nodePortAddresses, w.config.masqueradeAll, fewer)
		return
	}
}

// fails reports whether the steps, in a new world, fail like m.
func (w *randomWorld) fails(steps worldgen.Steps, m failure) bool {
	failed := false
	inner := &quiet{TB: w.TB}
	func() {
		defer inner.cleanup()
		world := newWorld(inner, w.options, w.config)
		for i, ops := range steps {
			if i != len(steps)-1 {
				for _, o := range ops {
					o.Apply(world.Tracker)
				}
				if world.sync() != nil {
					failed = m.packets == nil
					return
				}
				continue
			}
			failed = w.step(world, ops, m.packets).err != nil
		}
	}()
	return failed
}

// step applies changes and checks connections afterwards: the given ones or random
// ones.
func (w *randomWorld) step(world *World, ops []worldgen.Op, packets []packet) failure {
	for _, o := range ops {
		o.Apply(world.Tracker)
	}
	if err := world.sync(); err != nil {
		return failure{err: fmt.Errorf("sync: %w", err)}
	}
	if packets == nil {
		if w.random.Dump != nil {
			if err := w.compare(world); err != nil {
				return failure{err: err}
			}
		}
		packets = w.packets(world)
	}
	return world.judgeAll(packets)
}

// compare compares the result of programming step by step with that of programming everything in one delta.
func (w *randomWorld) compare(world *World) error {
	inner := &quiet{TB: w.TB}
	defer inner.cleanup()
	_, hosts := netlab.NewHosts(inner, "cold")
	h := hosts["cold"]
	for _, f := range world.Env.Families {
		for _, a := range []netip.Addr{primary(f), secondary(f), gateway(f)} {
			if err := h.AddAddr("lo", single(a)); err != nil {
				return err
			}
		}
	}
	env := Env{NetNS: h.File(), Families: world.Env.Families, do: h.Do}
	cold := &World{Engine: world.Engine, Env: env, scene: scene{tb: inner}, options: w.options, net: &network{node: h}}
	cold.attach()
	defer cold.Cursor.Detach()
	if err := cold.sync(); err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	got, want := w.random.Dump(w.TB, world.Env, world.backend), w.random.Dump(w.TB, env, cold.backend)
	if got == want {
		return nil
	}
	return fmt.Errorf("the incremental result differs from that of a cold start:\n%s", difference(got, want))
}

// packets returns random connections: to every frontend from some host, and to
// addresses around them.
func (w *randomWorld) packets(world *World) []packet {
	hosts := []string{"client1", "client2", "remote1", "remote3", "pod1", "pod2", "pod3", nodeName}
	var out []packet
	snapshot := world.Engine.Snapshot()
	add := func(proto v1.Protocol, a netip.AddrPort) {
		p := packet{
			from: hosts[w.rng.IntN(len(hosts))], f: tracker.FamilyOf(a.Addr()),
			row: row{proto: proto, to: target{name: "address", at: func(tracker.Family) netip.AddrPort { return a }}},
		}
		// A reply from the other node to its own pod would bypass this node, and a
		// pod's connection to itself starts at the pod's own node.
		v := world.trace(snapshot, p)
		if strings.HasPrefix(p.from, remoteName) && slices.ContainsFunc(v.Endpoints, func(ep *tracker.Endpoint) bool {
			return ep.Node == remoteName && (!v.MasqueradeTo(ep) || ep.Addr.Addr() == world.net.hosts[p.from].addr(p.f))
		}) {
			p.from = "client1"
		}
		out = append(out, p)
	}
	protocols := world.protocols()
	for _, s := range snapshot.Ports {
		for _, fe := range s.Frontends {
			addr := fe.Addr
			if fe.Kind == ruleset.KindNodePort {
				own := nodeAddresses(s.Key.Family)[:3]
				addr = own[w.rng.IntN(len(own))]
			}
			add(s.Key.Protocol, netip.AddrPortFrom(addr, fe.Port))
			if w.rng.IntN(6) == 0 && world.does(ClosedPorts) {
				add(protocols[w.rng.IntN(len(protocols))], netip.AddrPortFrom(addr, fe.Port+uint16(1+w.rng.IntN(3))))
			}
		}
	}
	for _, f := range world.Env.Families {
		add(protocols[w.rng.IntN(len(protocols))], netip.AddrPortFrom(primary(f), nodePortOwn))
		if world.does(ServiceCIDRs) {
			add(protocols[w.rng.IntN(len(protocols))], clusterIP(199, 80).at(f))
		}
		add(protocols[w.rng.IntN(len(protocols))], externalIP(1, 82).at(f))
	}
	w.rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:min(len(out), w.random.Packets)]
}

// trace returns the expected result of a connection.
func (w *World) trace(s *ruleset.Snapshot, p packet) ruleset.Verdict {
	return s.Trace(w.packet(w.origin(p.from), p.row.proto, p.row.to.at(p.f)))
}

// judgeAll makes connections. It makes those to the same Service one after another:
// two concurrent connections of a client could store two affinities.
func (w *World) judgeAll(packets []packet) failure {
	snapshot := w.Engine.Snapshot()
	groups := map[string][]packet{}
	for i, p := range packets {
		key := fmt.Sprint(i)
		if v := w.trace(snapshot, p); v.Affinity != 0 {
			key = v.Port.Key.String()
		}
		groups[key] = append(groups[key], p)
	}
	var (
		mu    sync.Mutex
		out   failure
		wg    sync.WaitGroup
		limit = make(chan struct{}, concurrentChecks)
	)
	for _, group := range groups {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			for _, p := range group {
				from, to := w.net.hosts[p.from], p.row.to.at(p.f)
				p.row.want = w.describe(w.trace(snapshot, p), p.f)
				if err := w.judge(snapshot, from, p.row, p.f); err != nil {
					mu.Lock()
					out.err = errors.Join(out.err, fmt.Errorf("%s from %s (%s) to %s: %w", p.row.proto, p.from, from.addr(p.f), to, err))
					out.packets = append(out.packets, p)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return out
}
