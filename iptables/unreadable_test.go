package iptables

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestForeignRulesHideNothing restarts a backend and cleans up while iptables-save cannot print the
// tables. No jump may be written twice, the chains of a deleted Service must go, and nothing may be
// reported as missing.
func TestForeignRulesHideNothing(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, func(c *Config) { c.LocalhostNodePorts, c.CountTraffic = true, true })
		r.everyKind()
		r.set(200, upTo(40))
		r.sync()
		r.set(201, []int{1}) // its chains are written later, by a change
		r.sync()
		show := r.node.hide()
		for range 2 { // two processes
			r.set(200, nil)
			r.start()
			r.sync()
			r.set(201, []int{2})
			r.sync()
			if err := r.backend.Check(t.Context()); err != nil {
				t.Errorf("Check returned %v", err)
			}
		}
		if owned, err := r.owned(); err != nil || !owned {
			t.Errorf("rules are owned: %v, error %v", owned, err)
		}
		for what, err := range map[string]error{"Lookup": second(r.lookup(dataplane.Query{Packet: ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.1:80")}})), "Traffic": second(r.traffic())} {
			if err == nil || !errors.Is(err, iptool.ErrUnreadable) || !strings.Contains(err.Error(), "table nat: ") {
				t.Errorf("%s returned %v, want that it cannot read table nat", what, err)
			}
		}
		show()
		r.verify()

		show = r.node.hide()
		if err := r.cleanup(); err != nil {
			t.Error(err)
		}
		show()
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			if saved := r.command(f, "-save"); strings.Contains(saved, "KUBE-") {
				t.Errorf("%v after the clean-up:\n%s", f, saved)
			}
		}
	}, NFT)
}

func second[T any](_ T, err error) error { return err }
