package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestRandomChangesEqualAColdStart compares the tables after each change with the tables of a
// cold start.
func TestRandomChangesEqualAColdStart(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		steps := 20
		if !testtime.Thorough() {
			steps = 15
			if !flavor.memory {
				steps = 6 // each runs many programs
			}
		}
		rng := rand.New(rand.NewPCG(7, 7))
		r := newRig(t, flavor, func(c *Config) { c.LocalhostNodePorts = true })
		// Enough for trees of chains, and groups of endpoints.
		for i := range firstRules + 20 {
			r.set(i, []int{i, i + 1})
		}
		r.sync()
		r.verify()
		for range steps {
			for range 1 + rng.IntN(4) {
				i := rng.IntN(firstRules + 40)
				var edits []func(*v1.Service)
				for _, e := range []func(*v1.Service){
					nodePort(30000 + int32(i)), loadBalancer, externalLocal, internalLocal, externalIPs, affinity(1 + int32(rng.IntN(100))),
					func(s *v1.Service) { s.Spec.Ports[0].Port = 81 },
				} {
					if rng.IntN(4) == 0 {
						edits = append(edits, e)
					}
				}
				switch rng.IntN(6) {
				case 0:
					r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: fmt.Sprintf("svc-%d", i)})
				case 1:
					r.tracker.SetService(svc(i, edits...))
				default:
					n := rng.IntN(5)
					if rng.IntN(8) == 0 {
						n = flatPool + rng.IntN(80)
					}
					r.set(i, rng.Perm(200)[:n], edits...)
				}
			}
			switch rng.IntN(12) {
			case 0:
				r.start()
			case 1:
				r.cursor.Resync()
			case 2:
				for _, f := range r.backend.families {
					f.limit = 60 // several inputs
				}
			}
			r.sync()
			r.verify()
		}
	})
}

// TestRestartWritesNothing restarts and resyncs the backend with unchanged Services.
func TestRestartWritesNothing(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		r.everyKind()
		r.sync()
		r.start()
		r.node.calls()
		r.sync()
		if calls := r.node.calls(); !slices.Equal(calls, []string{""}) {
			t.Errorf("a restart wrote %q", calls)
		}
		r.verify()
		r.node.calls()
		r.cursor.Resync()
		r.sync()
		if calls := r.node.calls(); !slices.Equal(calls, []string{""}) {
			t.Errorf("a resync wrote %q", calls)
		}
	})
}

// TestOneEndpointWritesFewLines counts the lines written for one more endpoint.
func TestOneEndpointWritesFewLines(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4)
		for i := range 300 {
			r.set(i, upTo(4))
		}
		r.set(300, upTo(500))
		r.sync()
		for i, most := range map[int]int{7: 14, 300: 80} {
			r.node.calls()
			n := 5
			if i == 300 {
				n = 501
			}
			r.tracker.SetSlice(slice(i, tracker.IPv4, upTo(n)...))
			r.sync()
			if calls := r.node.calls(); len(calls) > most || slices.Contains(calls, "iptables *filter") {
				t.Errorf("%d lines for one endpoint of %d:\n%s", len(calls), n, strings.Join(calls, "\n"))
			}
		}
		r.verify()
	})
}

// TestEndpointsOfManyServicesTakeFewInputs counts the inputs for changed endpoints of many
// Services. The time that the kernel takes for an input grows with the table, in which
// nf_tables looks for loops of chains.
func TestEndpointsOfManyServicesTakeFewInputs(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4)
		for i := range 130 {
			r.set(i, upTo(2))
		}
		r.sync()
		r.node.calls()
		for i := range 130 {
			r.tracker.SetSlice(slice(i, tracker.IPv4, 3, 4))
		}
		r.sync()
		calls, inputs := r.node.calls(), 0
		for _, l := range calls {
			if l == "iptables *nat" {
				inputs++
			}
		}
		if most := 1 + 3*len(calls)/r.backend.families[0].limit; inputs > most {
			t.Errorf("%d lines are in %d inputs, want at most %d", len(calls), inputs, most)
		}
		r.verify()
	})
}

// TestAlteredTablesAreRepaired alters the tables in many ways. A full delta must repair each
// of them, and Check must notice those that are not hidden.
func TestAlteredTablesAreRepaired(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4)
		r.everyKind()
		r.sync()
		old := filepath.Join(t.TempDir(), "saved")
		must.Do(t, os.WriteFile(old, []byte(r.command(tracker.IPv4, "-save")), 0o644))
		r.setEndpoints(0, 1, 2, 20)
		r.sync()
		for _, c := range []struct {
			what   string
			hidden bool
			args   [][]string
		}{
			{"nat flushed", false, [][]string{{"-t", "nat", "-F"}}},
			{"nat flushed and its chains deleted", false, [][]string{{"-t", "nat", "-F"}, {"-t", "nat", "-X"}}},
			{"filter flushed and its chains deleted", false, [][]string{{"-F"}, {"-X"}}},
			{"a jump deleted", false, [][]string{{"-t", "nat", "-D", "OUTPUT", "1"}}},
			{"another jump deleted", false, [][]string{{"-D", "FORWARD", "2"}}},
			{"all jumps of a chain deleted", false, [][]string{{"-F", "INPUT"}}},
			{"put back to an earlier state", false, nil},
			{"a chain emptied", true, [][]string{{"-t", "nat", "-F", "KUBE-SVC-5CM4KLYDMO5OV66S"}}},
			{"a rule added", flavor.Flavor == Legacy, [][]string{{"-t", "nat", "-I", "KUBE-SERVICES", "-j", "RETURN"}}},
			{"a stale chain added", true, [][]string{{"-t", "nat", "-N", "KUBE-SEP-STALE"}, {"-t", "nat", "-A", "KUBE-SEP-STALE", "-j", "KUBE-MARK-MASQ"}}},
			{"a jump of an earlier version", true, [][]string{{
				"-A", "OUTPUT", "-m", "conntrack", "--ctstate", "NEW",
				"-m", "comment", "--comment", "kubernetes externally-visible service portals", "-j", "KUBE-EXTERNAL-SERVICES",
			}}},
			{"a jump doubled", true, [][]string{{"-t", "nat", "-A", "OUTPUT", "-m", "comment", "--comment", "kubernetes service portals", "-j", "KUBE-SERVICES"}}},
		} {
			for _, args := range c.args {
				r.command(tracker.IPv4, "", args...)
			}
			if c.args == nil {
				r.command(tracker.IPv4, "-restore", old)
			}
			err := r.backend.Check(context.Background())
			if drift := (*dataplane.DriftError)(nil); !c.hidden && (!errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull)) {
				t.Errorf("%s: Check returned %v, want a DriftError", c.what, err)
			} else if c.hidden && err != nil {
				t.Errorf("%s: Check returned %v; if it detects this now, change hidden", c.what, err)
			}
			r.cursor.Resync()
			if err := r.cursor.Sync(context.Background()); err != nil {
				t.Fatalf("%s: %v", c.what, err)
			}
			r.verify()
		}
	})
}

// TestHangingProgramIsKilled runs an iptables-restore that hangs, before or after its work.
func TestHangingProgramIsKilled(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4)
		r.set(0, []int{1})
		r.sync()
		for i, how := range []string{"hang", "late"} {
			r.node.set(how, "")
			r.node.timeout(300 * time.Millisecond)
			r.setEndpoints(0, 1, 2+i)
			err := r.cursor.Sync(context.Background())
			// If the program did its work, the full sync after the failure detects that.
			if how == "hang" && !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("%s: %v, want a deadline that passed", how, err)
			}
			r.node.set("", "")
			r.node.timeout(time.Minute)
			r.sync()
			r.verify()
		}
		// The context ends before the program.
		r.node.set("hang", "")
		ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer stop()
		r.setEndpoints(0, 9)
		if err := r.cursor.Sync(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		r.node.set("", "")
		r.sync()
		r.verify()
	}, NFT)
}

// TestCleanupLeavesForeignRules cleans up tables that other programs use, too.
func TestCleanupLeavesForeignRules(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4, func(c *Config) { c.LocalhostNodePorts = true })
		r.command(tracker.IPv4, "-restore", "--noflush", r.file(
			"*nat", ":CNI-HOSTPORT - [0:0]", "-A CNI-HOSTPORT -p tcp --dport 99 -j RETURN", "-A PREROUTING -j CNI-HOSTPORT", "COMMIT",
			"*filter", ":KUBE-FIREWALL - [0:0]", ":KUBE-ROUTER-INPUT - [0:0]", "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP",
			"-A INPUT -j KUBE-FIREWALL", "-A INPUT -s 10.1.2.3/32 -j DROP", "COMMIT",
			"*mangle", ":KUBE-KUBELET-CANARY - [0:0]", "COMMIT"))
		before := save(r)
		// These chains are kube-proxy's alone.
		r.command(tracker.IPv4, "-restore", "--noflush", r.file("*mangle", ":KUBE-PROXY-CANARY - [0:0]", "COMMIT",
			"*filter", ":KUBE-SOURCE-RANGES-FIREWALL - [0:0]", "-A KUBE-SOURCE-RANGES-FIREWALL -j DROP", "COMMIT"))
		r.everyKind()
		for i := range 200 {
			r.set(100+i, []int{1})
		}
		r.sync()
		must.Do(t, r.cleanup())
		if after := save(r); after != before {
			t.Errorf("after Cleanup\n%s\nbefore\n%s", after, before)
		}
		if err := r.cleanup(); err != nil {
			t.Errorf("without anything to remove: %v", err)
		}
		// A chain that other programs use stays.
		r.cursor.Resync()
		r.sync()
		r.command(tracker.IPv4, "", "-t", "nat", "-A", "CNI-HOSTPORT", "-j", "KUBE-MARK-MASQ")
		must.Do(t, r.cleanup())
		if got := r.command(tracker.IPv4, "-save", "-t", "nat"); !strings.Contains(got, "-A KUBE-MARK-MASQ -j MARK") || !strings.Contains(got, "-A KUBE-POSTROUTING") || strings.Contains(got, "KUBE-SVC-") {
			t.Errorf("after Cleanup:\n%s", got)
		}
	})
}

// save returns the tables without comments and counters.
func save(r *rig) string {
	var out []string
	for line := range strings.Lines(r.command(tracker.IPv4, "-save")) {
		if !strings.HasPrefix(line, "#") {
			out = append(out, line[:min(len(line), strings.IndexByte(line+"[", '['))])
		}
	}
	return strings.Join(out, "\n")
}

func TestClosedBackendReturnsErrClosed(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		r := newRig(t, flavor)
		r.sync()
		for range 2 {
			if err := r.backend.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := r.backend.Apply(t.Context(), &ruleset.Delta{}); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Apply: %v", err)
		}
		if err := r.backend.Check(t.Context()); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Check: %v", err)
		}
		if err := r.backend.Watch(t.Context(), time.Millisecond, func(error) {}); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Watch: %v", err)
		}
	}, NFT)
}

func TestInvalidConfigsAreRejected(t *testing.T) {
	for _, c := range []Config{
		{Families: []tracker.Family{}},
		{Families: []tracker.Family{9}},
		{Families: []tracker.Family{tracker.IPv4, tracker.IPv4}},
		{Flavor: "ebtables"},
		{MasqueradeMark: 3},
	} {
		_, made := New(t.Context(), c)
		_, owned := Owned(t.Context(), c)
		_, found := LookupAll(t.Context(), c, []dataplane.Query{{}})
		for _, err := range []error{made, Probe(t.Context(), c), Cleanup(t.Context(), c), owned, found} {
			if !errors.Is(err, ruleset.ErrConfig) {
				t.Errorf("%+v: %v, want ErrConfig", c, err)
			}
		}
	}
	path := t.TempDir()
	t.Setenv("PATH", path)
	if _, err := New(t.Context(), Config{}); !errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("no program: %v", err)
	}
	for _, name := range []string{"iptables-restore", "iptables-save"} {
		must.Do(t, os.WriteFile(filepath.Join(path, name), []byte("#!/bin/true"), 0o755))
	}
	if _, err := New(t.Context(), Config{}); !errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("another program: %v", err)
	}
}

func TestUncountedCreatesNoObject(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, func(c *Config) { c.LocalhostNodePorts, c.uncounted = true, true })
		r.everyKind()
		r.sync()
		r.verify()
		if err := r.with(func(_ Config, k kernel) error {
			a, err := k.Accounts()
			if err != nil {
				return err
			}
			defer a.Close()
			for _, name := range countersFor(true) {
				if n, ok, _ := a.Packets(name); ok {
					t.Errorf("object %s exists with %d packets", name, n)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	})
}

// TestRangesOfReleaseAreReplaced starts on the chains that release 0.2.0 had for ranges of ports. Only other rules
// may be left.
func TestRangesOfReleaseAreReplaced(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4)
		r.set(0, []int{1}, externalIPs, affinity(60))
		r.sync()
		before := r.kernel(tracker.IPv4)
		r.command(tracker.IPv4, "-restore", "--noflush", r.file(
			"*nat", ":KUBE-SVC-RANGES - [0:0]", ":KUBE-SVC-SINGLE - [0:0]", ":KUBE-EXT-SINGLE - [0:0]", ":KUBE-SVC-R-0A600000/30 - [0:0]",
			"-A KUBE-SERVICES -j KUBE-SVC-RANGES",
			"-A KUBE-SVC-RANGES -j KUBE-SVC-SINGLE", "-A KUBE-SVC-RANGES -j KUBE-EXT-SINGLE",
			"-A KUBE-SVC-RANGES -d 10.96.0.0/30 -j KUBE-SVC-R-0A600000/30",
			"-A KUBE-SVC-R-0A600000/30 -d 10.96.0.1/32 -p tcp -m tcp --dport 80:9000 -j ACCEPT",
			"-A KUBE-SVC-SINGLE -d 10.96.0.0/32 -p tcp -m tcp --dport 80 -j ACCEPT",
			"COMMIT", "*filter", ":KUBE-REFUSED-RANGES - [0:0]", ":KUBE-RRNG-0A600000/30 - [0:0]",
			"-A KUBE-EXTERNAL-SERVICES -j KUBE-REFUSED-RANGES",
			"-A KUBE-REFUSED-RANGES -d 10.96.0.0/30 -j KUBE-RRNG-0A600000/30",
			"-A KUBE-RRNG-0A600000/30 -d 198.51.100.1/32 -p tcp -m tcp --dport 80:9000 -j DROP", "COMMIT"))
		if maps.EqualFunc(r.kernel(tracker.IPv4), before, slices.Equal) {
			t.Fatal("the chains were not added")
		}
		r.start()
		r.sync()
		r.verify()
		if after := r.kernel(tracker.IPv4); !maps.EqualFunc(after, before, slices.Equal) {
			t.Errorf("the tables are\n%v\nwant\n%v", after, before)
		}
	})
}
