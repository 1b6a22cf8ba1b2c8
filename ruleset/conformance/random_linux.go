package conformance

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

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
	// Dump, if not nil, returns what a backend has programmed. After each step it is compared with the result of
	// another backend that gets the final state in one delta. The text must not contain values that may differ, such
	// as allocated numbers.
	Dump func(tb testing.TB, env Env, b ruleset.Backend) string
}

// RunRandom tests a backend in random worlds, each a parallel sub-test named by its seed. After each step of a series
// of changes, random connections must have the result of Trace. If a world fails and -v is given, RunRandom prints a
// small set of changes with which it still fails.
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
				o.random(t, r, seed)
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

func (o Options) random(tb testing.TB, r Random, seed uint64) {
	c := randomConfig(rand.New(rand.NewPCG(seed, 1)), o.Skip, seed%3 == 0 && sctpTracked())
	families, _ := o.validate()
	within := time.Minute
	if !testing.Verbose() {
		within = 0
	}
	randomly(tb, seed, r.Steps, families, o.Skip, c, within, func(inner testing.TB, steps worldgen.Steps) (int, error) {
		w := newWorld(inner, o, c)
		w.lab().dump = r.Dump
		for i, ops := range steps {
			for _, op := range ops {
				w.apply(op)
			}
			if err := w.sync(); err != nil {
				return i, fmt.Errorf("sync: %w", err)
			}
			if err := w.compareDump(); err != nil {
				return i, err
			}
			if _, err := w.judgeAll(w.randomProbes(stepRand(seed, i), r.Packets)); err != nil {
				return i, err
			}
		}
		return 0, nil
	})
	if tb.Failed() && within == 0 {
		tb.Logf("to find a small set of changes that fails, within two minutes, run it again with the same flags and environment and -v -run '%s$'", tb.Name())
	}
}

// randomProbes returns random connections: to every frontend from some host, and to addresses around
// them.
func (w *World) randomProbes(rng *rand.Rand, n int) (out []probe) {
	hosts := []string{"client1", "client2", "remote1", "remote3", "pod1", "pod2", "pod3", nodeName}
	snapshot := w.Engine.Snapshot()
	add := func(proto v1.Protocol, to netip.AddrPort) {
		from := hosts[rng.IntN(len(hosts))]
		// A reply from the other node to its own pod would bypass this node, and a
		// pod's connection to itself starts at the pod's own node.
		p := w.packet(from, proto, to)
		v := snapshot.Trace(p)
		if strings.HasPrefix(from, remoteName) && slices.ContainsFunc(v.Endpoints, func(ep *tracker.Endpoint) bool {
			return ep.Node == remoteName && (!v.MasqueradeTo(ep) || ep.Addr.Addr() == p.From)
		}) {
			from = "client1"
		}
		out = append(out, probe{from, proto, to, ""})
	}
	protocols := []v1.Protocol{tcp}
	if w.does(UDP) {
		protocols = append(protocols, udp)
	}
	some := func(to netip.AddrPort) { add(protocols[rng.IntN(len(protocols))], to) }
	for _, s := range snapshot.Ports {
		for _, fe := range s.Frontends {
			addr := fe.Addr
			if fe.Kind == ruleset.KindNodePort {
				addr = nodeAddresses(s.Key.Family)[rng.IntN(3)]
			}
			add(s.Key.Protocol, netip.AddrPortFrom(addr, fe.Port))
			if rng.IntN(6) == 0 && w.does(ClosedPorts) {
				some(netip.AddrPortFrom(addr, fe.Port+uint16(1+rng.IntN(3))))
			}
		}
	}
	for _, f := range w.Env.Families {
		some(netip.AddrPortFrom(address(nodeName, f), nodePortOwn))
		if w.does(ServiceCIDRs) {
			some(netip.AddrPortFrom(address("cluster199", f), 80))
		}
		some(netip.AddrPortFrom(address("external1", f), 82))
	}
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:min(len(out), n)]
}
