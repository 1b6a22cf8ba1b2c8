package iptables

import (
	"errors"
	"strconv"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestLostRulesOfFixedChainsAreNoticed deletes each rule of the chains that Check compares, and
// adds a rule to each of them. Check must notice it immediately, and a sync must repair it.
func TestLostRulesOfFixedChainsAreNoticed(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		sizes := []int{0, 110} // one chain for each dispatcher, or a tree
		if !flavor.memory && !testtime.Complete() {
			sizes = sizes[:1] // each rule costs three calls of a program
		}
		for _, services := range sizes {
			r := newRig(t, flavor, func(c *Config) {
				c.LocalhostNodePorts = true
				c.Families = []tracker.Family{tracker.IPv4}
			})
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
					noticed(c, "-D", c.name, strconv.Itoa(i+1))
					rules++
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
		r, w := newWatched(t, flavor)
		r.set(0, []int{1})
		r.sync()
		w.set("refuse", "C KUBE-MARK-MASQ")
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
