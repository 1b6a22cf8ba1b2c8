package iptables

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestCheckRunsNoProgramWithoutChanges removes iptables-restore between two calls of Check.
// The first call runs it. The second must not, until another process changes a table or, with
// iptables-legacy, minutes have passed.
func TestCheckRunsNoProgramWithoutChanges(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		r.tracker.SetService(svc(0))
		r.tracker.SetSlice(slice(0, tracker.IPv4, 1))
		r.sync()
		must.Do(t, r.backend.Check(t.Context()))
		r.node.set("missing", "")
		check := func(what string, runs bool) {
			t.Helper()
			if err := r.backend.Check(t.Context()); (err != nil) != runs {
				t.Errorf("%s: a program ran: %t, want %t; error %v", what, err != nil, runs, err)
			}
		}
		check("nothing changed", false)
		b := r.backend
		b.ran = time.Now().Add(-legacyRecheck)
		before := b.checked
		check("minutes later", flavor.Flavor == Legacy)
		b.known, b.checked, b.ran = true, before, time.Now()
		check("nothing changed", false)
		for _, args := range [][]string{{"-t", "nat", "-N", "FOREIGN"}, {"-A", "FORWARD"}} {
			for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				r.command(family, "", args...)
				check(family.String()+" "+strings.Join(args, " "), true)
				if b.checked, b.known = b.generation(t.Context()); !b.known {
					t.Fatal("no generation")
				}
				check("nothing changed", false)
			}
		}
	})
}

// TestWatchReturnsWhenTheBackendIsClosed closes the backend long before the interval ends.
func TestWatchReturnsWhenTheBackendIsClosed(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		r.sync()
		done := make(chan error, 1)
		go func() { done <- r.backend.Watch(t.Context(), time.Hour, func(err error) { t.Error(err) }) }()
		if err := r.backend.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
}

// TestTablesNotYetWrittenAreNoDrift checks tables before the first full delta, and after a failure.
func TestTablesNotYetWrittenAreNoDrift(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		if err := r.backend.Check(t.Context()); err != nil {
			t.Errorf("before the first delta, Check returned %v", err)
		}
		r.sync()
		r.backend.families[0].discard(errors.New("a failure"))
		var drift *dataplane.DriftError
		if err := r.backend.Check(t.Context()); errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull) || !strings.Contains(err.Error(), "unknown") {
			t.Errorf("after a failure, Check returned %v", err)
		}
		// Tables that lost their jumps are altered, even if the rest is unknown.
		r.command(tracker.IPv4, "-restore", r.file("*nat", "COMMIT"))
		if err := r.backend.Check(t.Context()); !errors.As(err, &drift) || drift.Family != tracker.IPv4 || !strings.Contains(drift.What, "missing in table nat") {
			t.Errorf("after a failure and a flush, Check returned %v", err)
		}
	})
}

// TestChangeFindsRestoredTables restores an old state of a table between two changes, as another program
// does that saved the tables before the first one. The second change must not build on the old state.
func TestChangeFindsRestoredTables(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		for _, table := range []string{"filter", "nat"} {
			r := newRig(t, flavor, onlyIPv4)
			r.set(0, []int{1, 2})
			r.set(1, []int{3})
			r.sync()
			old := r.command(tracker.IPv4, "-save", "-t", table)
			r.set(0, nil) // filter and nat change
			r.sync()
			file := filepath.Join(t.TempDir(), "old")
			must.Do(t, os.WriteFile(file, []byte(old), 0o600))
			r.command(tracker.IPv4, "-restore", file)
			var full []bool
			r.cursor.OnSync(func(i ruleset.SyncInfo) { full = append(full, i.Full) })
			r.set(1, nil)
			r.sync()
			r.verify()
			if len(full) != 1 || !full[0] {
				t.Errorf("table %s: full %v, want one full delta", table, full)
			}
		}
	})
}

// TestLostRulesOfFixedChainsAreNoticed deletes each rule of the chains that Check compares, and
// adds a rule to each of them. Check must notice it immediately, and a sync must repair it.
func TestLostRulesOfFixedChainsAreNoticed(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		sizes := []int{0, 110} // one chain for each dispatcher, or a tree
		if !flavor.memory && !testtime.Complete() {
			sizes = sizes[:1] // each rule costs several calls of programs
		}
		for _, services := range sizes {
			r := newRig(t, flavor, onlyIPv4, func(c *Config) { c.LocalhostNodePorts = true })
			r.everyKind()
			for i := range services {
				r.set(100+i, []int{1}, nodePort(30100+int32(i)), externalLocal)
			}
			r.sync()
			noticed := func(c chain, args ...string) {
				t.Helper()
				r.command(tracker.IPv4, "", append([]string{"-t", c.table.String()}, args...)...)
				err := r.backend.Check(t.Context())
				if drift := (*dataplane.DriftError)(nil); !errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull) {
					t.Errorf("after %q in %s, Check returned %v, want a DriftError", args, c.table, err)
				}
				r.cursor.Resync()
				r.sync()
				if err := r.backend.Check(t.Context()); err != nil {
					t.Fatalf("after the repair: %v", err)
				}
			}
			rules := 0
			for _, c := range r.backend.families[0].model.checked() {
				for i := range c.rules {
					if rules++; flavor.memory || testtime.Complete() || rules%5 == 0 {
						noticed(c, "-D", c.name, strconv.Itoa(i+1))
					}
				}
				if flavor.Flavor == NFT {
					noticed(c, "-A", c.name, "-s", "203.0.113.99", "-j", "RETURN")
				}
			}
			if rules < 20 {
				t.Errorf("only %d rules, want those of all chains", rules)
			}
			r.verify()
		}
	})
}

// TestRuleThatTheProgramCannotFindIsNotRepairedForEver uses a program that does not find a rule
// which is in place. After one repair that finds nothing to do, Check must rely on the rest.
func TestRuleThatTheProgramCannotFindIsNotRepairedForEver(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		r.set(0, []int{1})
		r.sync()
		r.node.set("refuse", "C KUBE-MARK-MASQ")
		check := func(drifts bool) {
			t.Helper()
			r.backend.known = false
			if err := r.backend.Check(t.Context()); errors.Is(err, ruleset.ErrNeedFull) != drifts {
				t.Errorf("Check returned %v, want a drift: %t", err, drifts)
			}
			r.cursor.Resync()
			r.sync()
		}
		check(true)  // IPv4
		check(true)  // IPv6
		check(false) //
		r.command(tracker.IPv4, "", "-t", "nat", "-F", "KUBE-POSTROUTING")
		check(true) // counted
		r.command(tracker.IPv4, "", "-t", "nat", "-D", "OUTPUT", "1")
		check(true)
		check(false)
		r.verify()
	}, NFT)
}
