package conformance

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// broken is a backend with one fault, and the failure that it must cause. It is package nftables' backend, which gets
// everything in each delta.
type broken struct {
	name string
	// distort changes its deltas. before and after are scripts for the nft tool around each Apply.
	distort       func(*ruleset.Delta)
	before, after string
	// ownHash is set if each backend has a seed of its own for hashes.
	ownHash bool
	// config is its configuration.
	config nftables.Config
	// skip is its Options.Skip, nil for that of package nftables.
	skip map[Feature]string
	// world is a world that must fail, and complaint its expected message.
	world, complaint string
	// stalled and delay are fields of Options.
	stalled bool
	delay   time.Duration
	// bothFamilies is set if one family does not show the fault.
	bothFamilies bool
}

func brokenBackends() []broken {
	return []broken{
		{
			name: "is correct, on a machine that is too slow for a result", delay: 400 * time.Millisecond,
			world: "affinity expires", complaint: `not checked: the machine was too busy for any of 16 clients`,
		}, {
			name: "loses the first packet of a connection", after: losesFirst,
			world: "cluster IP", complaint: `failed: the first packet was lost, must be forwarded|\(the first packet was lost\)`,
		}, {
			name: "refuses only the second packet of a connection", after: losesFirst,
			world: "no endpoints", complaint: `the first packet was lost, a later one refused, must be refused`,
		}, {
			name: "loses the first packet of a connection, on a machine that always stalls", after: losesFirst, stalled: true,
			world: "no endpoints", complaint: `connections had a packet lost in a stall of the machine and were excused, more than 16`,
		}, {
			name: "ignores internal policy Local",
			distort: eachService(func(s *ruleset.Port) {
				retarget(s, ruleset.KindClusterIP, ruleset.TargetLocal, ruleset.TargetCluster)
			}),
			world: "internal policy Local", complaint: `not among the endpoints allowed`,
		}, {
			name: "ignores external policy Local",
			distort: eachService(func(s *ruleset.Port) {
				retarget(s, ruleset.KindNodePort, ruleset.TargetLocal, ruleset.TargetCluster)
			}),
			world: "external policy Local", complaint: `not among the endpoints allowed`,
		}, {
			name: "does not short-circuit",
			distort: eachFrontend(func(f *ruleset.Frontend) {
				f.Internal = f.Target
			}),
			world: "external policy Local", complaint: `pod3 .* only 1 were ever used|pod3 .*no answer, must be forwarded`,
		}, {
			name:    "drops instead of refusing",
			distort: eachFrontend(func(f *ruleset.Frontend) { f.Target, f.Internal = swap(f.Target), swap(f.Internal) }),
			world:   "no endpoints", complaint: `no answer, must be refused`,
		}, {
			name:    "refuses instead of dropping",
			distort: eachFrontend(func(f *ruleset.Frontend) { f.Target, f.Internal = swap(f.Target), swap(f.Internal) }),
			world:   "internal policy Local", complaint: `refused, must get no answer`,
		}, {
			name:    "never masquerades",
			distort: eachFrontend(func(f *ruleset.Frontend) { f.Masquerade = ruleset.MasqueradeNever }),
			world:   "cluster IP", complaint: `client1 .*must be masqueraded`,
		}, {
			name:    "always masquerades",
			distort: eachFrontend(func(f *ruleset.Frontend) { f.Masquerade = ruleset.MasqueradeAlways }),
			world:   "external policy Local", complaint: `client1 .*must keep its source`,
		}, {
			name:    "does not masquerade the node's own connections",
			distort: eachFrontend(func(f *ruleset.Frontend) { f.Masquerade = ruleset.MasqueradeNever }),
			world:   "external IP", complaint: `must be masqueraded`,
		}, {
			name:  "keeps sources although it skips SourceAddress",
			skip:  map[Feature]string{SourceAddress: "declared"},
			world: "external policy Local", complaint: `client1 .*must be masqueraded`,
		}, {
			name: "does not recognize pods", distort: func(d *ruleset.Delta) {
				n := *d.Node
				n.LocalTraffic = ruleset.LocalTraffic{}
				d.Node = &n
			},
			world: "local traffic by bridge", complaint: `pod3 .*must keep its source`,
		}, {
			name: "has no hairpin", after: "flush set ip proxier hairpin-connections",
			world: "cluster IP", complaint: `pod1 .*must be forwarded|pod1 .*must be masqueraded`,
		}, {
			name:    "ignores source ranges",
			distort: eachFrontend(func(f *ruleset.Frontend) { f.Sources = nil }),
			world:   "source ranges", complaint: `client2 .*reached .*, must get no answer`,
		}, {
			name:    "applies source ranges to everything",
			distort: eachService(restrictAll),
			world:   "source ranges", complaint: `must be forwarded`,
		}, {
			name: "loses one endpoint",
			distort: eachService(func(s *ruleset.Port) {
				if n := len(s.Selection.Cluster); n > 1 {
					s.Selection.Cluster = s.Selection.Cluster[:n-1]
				}
			}),
			world: "cluster IP", complaint: `of 3 endpoints only 2 were ever used`,
		}, {
			name: "keeps removed endpoints", distort: keepEndpoints(),
			world: "no endpoints", complaint: `reached .*, must be refused|must be refused`,
		}, {
			name: "keeps deleted services",
			distort: func(d *ruleset.Delta) {
				d.Changes = slices.DeleteFunc(d.Changes, func(c ruleset.Change) bool { return c.New == nil })
			},
			world: "service CIDR", complaint: `reached .*, must get no answer`,
		}, {
			name: "serves IPv4 only", bothFamilies: true, distort: eachService(func(s *ruleset.Port) {
				if s.Key.Family == tracker.IPv6 {
					s.Frontends = nil
				}
			}),
			world: "cluster IP", complaint: `fd00:10:96::1.*must be forwarded`,
		}, {
			name: "serves TCP only", distort: tcpOnly,
			world: "cluster IP", complaint: `UDP .*must be forwarded`,
		}, {
			name: "ignores affinity", distort: eachService(func(s *ruleset.Port) { reAffinity(s, 0) }),
			world: "affinity", complaint: `was moved from .* for no reason`,
		}, {
			name: "forgets clients on every change", after: "flush map ip proxier sticky-clients",
			world: "affinity", complaint: `was moved from .* though only another service changed`,
		}, {
			name: "never forgets clients", distort: eachService(func(s *ruleset.Port) { reAffinity(s, time.Hour) }),
			world: "affinity expires", complaint: `after the timeout`,
		}, {
			name: "forgets clients too early", distort: eachService(func(s *ruleset.Port) { reAffinity(s, time.Second) }),
			world: "affinity expires", complaint: `was moved from .* before its affinity timeout`,
		}, {
			name: "serves NodePorts at all addresses", distort: func(d *ruleset.Delta) {
				n := *d.Node
				n.NodePorts4.All, n.NodePorts6.All = true, true
				d.Node = &n
			},
			world: "node port at primary addresses", complaint: `reached .*must pass`,
		}, {
			name: "stops the node's own packets to itself on their way out", after: "add table inet fault; flush table inet fault; add chain inet fault c { type filter hook output priority 0; }; add rule inet fault c fib daddr type local th dport 30080 reject",
			world: "no endpoints", complaint: `refused, sending failed with EPERM, must be refused: node port`,
		}, {
			name: "lets closed ports pass", config: nftables.Config{Stages: nftables.Stages{NoFilter: true}},
			world: "closed ports", complaint: `no answer, must be refused`,
		}, {
			name: "refuses at unused addresses", distort: func(d *ruleset.Delta) {
				n := *d.Node
				n.ServiceCIDRs = nil
				d.Node = &n
			},
			after: "add table inet fault; flush table inet fault; add chain inet fault c { type filter hook forward priority 0; }; add rule inet fault c ct state new reject",
			world: "service CIDR", complaint: `refused, must get no answer`,
		}, {
			name: "ignores external policy Local with affinity",
			distort: eachService(func(s *ruleset.Port) {
				if s.Spec.Affinity != 0 {
					retarget(s, ruleset.KindNodePort, ruleset.TargetLocal, ruleset.TargetCluster)
				}
			}),
			world: "everything together", complaint: `not among the endpoints allowed`,
		}, {
			name: "is uneven", distort: eachService(func(s *ruleset.Port) { s.Selection.Cluster = weighted(s.Selection.Cluster, 9) }),
			world: "weights", complaint: `over 5 endpoints does not match their weights`,
		}, {
			name: "ignores weights", distort: eachService(func(s *ruleset.Port) { s.Selection.Cluster = weighted(s.Selection.Cluster, 1) }),
			world: "weights", complaint: `over 5 endpoints does not match their weights`,
		}, {
			name: "sends to endpoints of weight 0", distort: eachService(func(s *ruleset.Port) {
				s.Selection.Cluster = weighted(s.Endpoints, 1)
			}),
			world: "weight 0", complaint: `not among the endpoints allowed`,
		}, {
			name: "does not hash although it declares it", distort: noHash, skip: map[Feature]string{},
			world: "hash of the source", complaint: `was moved from .* for no reason`,
		}, {
			name: "always moves clients although it may move them only after changes", distort: noHash, skip: map[Feature]string{HashOfEndpoints: "declared"},
			world: "hash and policies", complaint: `a hash of the source, but connections went to [23] endpoints`,
		}, {
			name: "keeps clients at removed endpoints", distort: keepEndpoints(),
			world: "affinity", complaint: `is still sent to .* when another endpoint was removed`,
		}, {
			name: "hashes in a way of its own on each node", ownHash: true, skip: planeSkips,
			world: "hash of the source", complaint: `was moved from .* on another node`,
		}, {
			name: "hashes ports in a way of its own on each node", ownHash: true, skip: planeSkips,
			world: "hash of source and port", complaint: `was moved from .* without pod1`,
		}, {
			name: "hashes to few endpoints", distort: eachService(func(s *ruleset.Port) { s.Selection.Cluster = weighted(s.Selection.Cluster, 200) }),
			world: "hash of source and port", complaint: `200 clients reached [1-6] endpoints, at least 6 expected, and at most 33 % at one`,
		}, {
			name:  "resets established connections",
			after: "add table inet fault; flush table inet fault; add chain inet fault c { type filter hook forward priority 0; }; add rule inet fault c tcp dport 8080 ct state established ct packets > 6 reject with tcp reset",
			world: "established connections", complaint: `after (nothing|a full resync): open connection from`,
		}, {
			name: "has gaps", before: "delete table ip proxier",
			world: "changes under load", complaint: `connections, [1-9][0-9]* failed`,
		}, {
			name: "deletes frontends that moved", distort: deleteMoved,
			world: "frontends that move", complaint: `connections, [1-9][0-9]* failed`,
		},
	}
}

// deleteMoved removes moved frontends from their new owner, like a backend that
// deletes the old owner's entry by its address last.
func deleteMoved(d *ruleset.Delta) {
	moved := map[tracker.Key][]ruleset.Frontend{}
	for _, c := range d.Changes {
		for f := range c.TakenFrontends() {
			moved[c.Key] = append(moved[c.Key], f)
		}
	}
	eachService(func(s *ruleset.Port) {
		s.Frontends = slices.DeleteFunc(s.Frontends, func(f ruleset.Frontend) bool {
			return slices.ContainsFunc(moved[s.Key], func(m ruleset.Frontend) bool {
				return f.Kind == m.Kind && f.Addr == m.Addr && f.Port == m.Port
			})
		})
	})(d)
}

// TestBrokenBackendsFail runs a world of the suite against each broken backend and checks for the
// expected message.
func TestBrokenBackendsFail(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	needNft(t)
	for _, b := range brokenBackends() {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			w := worldNamed(t, b.world)
			complaint := regexp.MustCompile(b.complaint)
			// On a busy machine short timeouts can cause other failures. Then the
			// test is repeated with the usual timeouts.
			for _, hurry := range []bool{true, false} {
				out := complaints(t, func(tb testing.TB) { w.run(newWorld(talkative{tb}, b.options(hurry), w.config)) })
				switch {
				case complaint.MatchString(out):
					return
				case hurry:
					t.Logf("longer timeouts after %q", out)
				default:
					t.Errorf("the world %q does not report %q but %q", b.world, b.complaint, out)
				}
			}
		})
	}
}

// talkative is a test whose log is part of its failures.
type talkative struct{ testing.TB }

func (t talkative) Log(args ...any)                 { t.Error(args...) }
func (t talkative) Logf(format string, args ...any) { t.Errorf(format, args...) }

// worldNamed returns a world of the suite.
func worldNamed(t *testing.T, name string) world {
	t.Helper()
	worlds := must.Get(suite(nil, true))(t)
	i := slices.IndexFunc(worlds, func(w world) bool { return w.name == name })
	if i < 0 {
		t.Fatalf("there is no world %q", name)
	}
	return worlds[i]
}

// TestPlaneThatRefusesInsteadOfDroppingPasses runs a world against a backend that skips Drop.
// TestBrokenBackendsFail runs such a backend without the skip.
func TestPlaneThatRefusesInsteadOfDroppingPasses(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	needNft(t)
	skip := maps.Clone(planeSkips)
	skip[Drop] = "the backend refuses"
	w := worldNamed(t, "internal policy Local")
	plane := broken{distort: eachFrontend(func(f *ruleset.Frontend) {
		if f.Target == ruleset.TargetDrop {
			f.Target = ruleset.TargetReject
		}
		if f.Internal == ruleset.TargetDrop {
			f.Internal = ruleset.TargetReject
		}
	})}
	w.run(newWorld(t, Options{Skip: skip, New: plane.backend}, w.config))
}

// options returns the options for worlds of the broken backend: with short timeouts, or with long
// ones even for connections that it accepts.
func (b broken) options(hurry bool) Options {
	wait, quiet := 3*time.Second, silence
	if !hurry {
		wait, quiet = testtime.Timeout, 3*time.Second
	}
	if b.skip == nil {
		b.skip = planeSkips
	}
	families := fewFamilies()
	if b.bothFamilies {
		families = nil
	}
	return Options{Skip: b.skip, Families: families, timeout: wait, silence: quiet, stalled: b.stalled, delay: b.delay, New: b.backend}
}

// backend returns the backend. It is the Options.New of a correct one, too.
func (b broken) backend(tb testing.TB, env Env) ruleset.Backend {
	b.config.NetNS, b.config.Families = env.NetNS, env.Families
	inner := must.Get(nftables.New(tb.Context(), b.config))(tb)
	tb.Cleanup(func() { inner.Close() })
	ports := map[tracker.Key]*ruleset.Port{}
	begun, seed := false, rand.Uint64()
	return ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		own := *d
		if b.ownHash {
			n := *d.Node
			n.HashSeed = seed
			own.Node = &n
		}
		own.Changes = slices.Clone(d.Changes)
		if b.distort != nil {
			b.distort(&own)
		}
		if d.Full {
			clear(ports)
		}
		for _, c := range own.Changes {
			ports[c.Key] = c.New
		}
		own.Full, own.Changes = true, nil
		for _, key := range slices.SortedFunc(maps.Keys(ports), tracker.Key.Compare) {
			if p := ports[key]; p != nil {
				own.Changes = append(own.Changes, ruleset.Change{Key: key, New: p, Fields: ruleset.FieldAll})
			}
		}
		if b.before != "" && begun {
			if err := nft(ctx, b.before); err != nil {
				return err
			}
			time.Sleep(20 * time.Millisecond)
		}
		begun = true
		if err := inner.Apply(ctx, &own); err != nil || b.after == "" {
			return err
		}
		return nft(ctx, b.after)
	})
}

// nft runs a script, in one transaction.
func nft(ctx context.Context, script string) error {
	cmd := exec.CommandContext(ctx, "nft", script)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// planeSkips lists the features that package nftables lacks.
var planeSkips = map[Feature]string{LoopbackNodePorts: "a packet from a loopback address cannot leave the node"}

// weighted returns copies of endpoints, of which the first one has a weight and the others have weight 1.
func weighted(eps []*tracker.Endpoint, first uint16) []*tracker.Endpoint {
	out := make([]*tracker.Endpoint, len(eps))
	for i, ep := range eps {
		c := *ep
		c.Weight = 1
		if i == 0 {
			c.Weight = first
		}
		out[i] = &c
	}
	return out
}

// losesFirst drops the first packet of every TCP connection from other hosts.
const losesFirst = `add table ip fault
add set ip fault first { type ipv4_addr . inet_service . ipv4_addr . inet_service; flags dynamic,timeout; timeout 10m; size 65535; }
add chain ip fault c { type filter hook prerouting priority -110; }
flush chain ip fault c
add rule ip fault c tcp flags & (syn | ack) == syn ip saddr . tcp sport . ip daddr . tcp dport != @first add @first { ip saddr . tcp sport . ip daddr . tcp dport } drop`

// noHash removes the hash of each Service.
var noHash = eachService(func(s *ruleset.Port) {
	p := *s.Spec
	p.Hash = tracker.HashNone
	s.Spec = &p
})

// eachService changes copies of the Services in a delta.
func eachService(f func(*ruleset.Port)) func(*ruleset.Delta) {
	return func(d *ruleset.Delta) {
		for i, c := range d.Changes {
			if c.New != nil {
				s := *c.New
				s.Frontends = slices.Clone(s.Frontends)
				f(&s)
				d.Changes[i].New = &s
			}
		}
	}
}

// eachFrontend changes copies of the frontends in a delta.
func eachFrontend(f func(*ruleset.Frontend)) func(*ruleset.Delta) {
	return eachService(func(s *ruleset.Port) {
		for i := range s.Frontends {
			f(&s.Frontends[i])
		}
	})
}

// retarget replaces a target of frontends of a kind by another.
func retarget(s *ruleset.Port, k ruleset.Kind, from, to ruleset.Target) {
	// Endpoints that no policy uses are not selected.
	s.Selection.Cluster, s.Selection.Reachable = s.Endpoints, s.Endpoints
	for i := range s.Frontends {
		if f := &s.Frontends[i]; f.Kind == k && f.Target == from {
			f.Target, f.Internal = to, to
		}
	}
}

// swap exchanges refusing and dropping.
func swap(t ruleset.Target) ruleset.Target {
	switch t {
	case ruleset.TargetReject:
		return ruleset.TargetDrop
	case ruleset.TargetDrop:
		return ruleset.TargetReject
	}
	return t
}

// restrictAll applies the source ranges of load-balancer IPs to every frontend with an address.
func restrictAll(s *ruleset.Port) {
	for _, f := range s.Frontends {
		if len(f.Sources) == 0 {
			continue
		}
		for i := range s.Frontends {
			if s.Frontends[i].Kind != ruleset.KindNodePort {
				s.Frontends[i].Sources = f.Sources
			}
		}
		return
	}
}

// keepEndpoints does not remove the last endpoints of a Service.
func keepEndpoints() func(*ruleset.Delta) {
	had := map[tracker.Key]*ruleset.Port{}
	return func(d *ruleset.Delta) {
		for i, c := range d.Changes {
			if old := had[c.Key]; c.New != nil && old != nil && len(c.New.Selection.Reachable) < len(old.Selection.Reachable) {
				d.Changes[i].New = old
			}
			had[c.Key] = d.Changes[i].New
		}
	}
}

// reAffinity changes the affinity timeout of a Service with client affinity.
func reAffinity(s *ruleset.Port, timeout time.Duration) {
	if s.Spec.Affinity != 0 {
		p := *s.Spec
		p.Affinity = timeout
		s.Spec = &p
	}
}
