//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// remakeBase returns a script that deletes a base chain and adds it with another specification.
func remakeBase(spec string) string {
	return "flush chain ip proxier nat-prerouting; delete chain ip proxier nat-prerouting; add chain ip proxier nat-prerouting " + spec
}

// alterations lists scripts that alter the tables of alteredRig, each in a way that matters.
var alterations = []string{
	"delete table ip proxier",
	"delete table ip6 proxier",
	"flush chain ip proxier services",
	"add rule ip proxier services counter",
	"add rule ip proxier services ip daddr { 192.0.2.1, 192.0.2.3 } drop",
	"insert rule ip proxier nat-output accept",
	"delete chain ip proxier nat-postrouting",
	"flush map ip proxier tcp-endpoints",
	"delete element ip proxier service-ips { 10.96.0.1 . tcp . 80 }",
	"add element ip proxier cluster-ips { 10.96.0.99 }",
	"flush set ip6 proxier nodeport-ips",
	"add element ip proxier nodeport-ips { 127.0.0.8 }",
	"flush set ip6 proxier service-cidrs",
	"add chain ip proxier strange",
	"add chain ip proxier strange; add rule ip proxier strange drop; insert rule ip proxier services jump strange",
	"add chain ip proxier strange { type filter hook prerouting priority 0; policy drop; }",
	"add set ip proxier strange { type ipv4_addr; }",
	"delete table ip proxier; add table ip proxier",
	"add chain ip proxier filter-forward { policy drop; }",
	"add chain ip6 proxier nat-output { policy drop; }",
	"add table ip proxier { flags dormant; }",
	remakeBase("{ type nat hook prerouting priority -50; }; add rule ip proxier nat-prerouting jump services"),
	remakeBase("{ type nat hook output priority -102; }; add rule ip proxier nat-prerouting jump services"),
	remakeBase("{ type filter hook prerouting priority -102; }; add rule ip proxier nat-prerouting counter"),
	remakeBase("; add rule ip proxier nat-prerouting jump services"),
	"delete element ip proxier handlers { \"8010:0\" }; add element ip proxier handlers { \"8010:0\" : goto pool-3 }",
	"delete element ip proxier handlers { \"8010:0\" }; add element ip proxier handlers { \"8010:0\" : drop }",
	"delete element ip proxier handlers { \"8010:0\" }; add element ip proxier handlers { \"8010:0\" : jump cluster-ip-3 }",
	"add element ip proxier own-handlers { \"8010:0\" : drop }",
	"flush chain ip proxier own-services",
	"delete chain ip proxier filter-input",
	"flush chain ip proxier internal; delete map ip proxier internal-service-ips; add map ip proxier internal-service-ips { type ipv4_addr . inet_proto . inet_service : mark; }",
	"flush chain ip proxier sticky-3-600s; flush chain ip proxier sticky-recall; flush chain ip proxier sticky-confirm; flush chain ip proxier choose-3; delete map ip proxier sticky-clients; add map ip proxier sticky-clients { type ipv4_addr : mark; }",
	"flush chain ip proxier sticky-send; delete map ip proxier sticky-endpoints",
	"flush chain ip proxier sticky-3-600s",
	"delete element ip proxier sticky-handlers { \"0:1\" }",
	"flush map ip proxier sticky-pools",
	"delete element ip proxier layout { 0x4 }; add element ip proxier layout { 0x63 }; add rule ip proxier services counter",
}

// alteredRig returns a rig with two Services, one with affinity.
func alteredRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	r.tracker.SetService(svc(0))
	r.tracker.SetService(svc(1, sticky(600)))
	for i := range 2 {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			r.tracker.SetSlice(epSlice(i, f, upTo(3)...))
		}
	}
	r.sync()
	return r
}

// checkRepaired compares the tables with the ruleset, and with new tables, which it leaves.
func (r *rig) checkRepaired() {
	r.Helper()
	r.verify()
	state := func() (out []string) {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			out = append(out, contents(r, r.backend.conn, DefaultTable, f)...)
			for chain, sums := range rulesOf(r, r.backend.conn, DefaultTable, f) {
				out = append(out, fmt.Sprintf("%v chain %s: %x", f, chain, sums))
			}
		}
		for _, s := range layout.TrafficSets() { // counters may differ
			out = slices.DeleteFunc(out, func(line string) bool { return strings.HasPrefix(line, s.Name()+" ") })
		}
		slices.Sort(out)
		return out
	}
	repaired := state()
	must.Do(r, Cleanup(context.Background(), Config{NetNS: r.host.File()}))
	r.start()
	r.sync()
	if fresh := state(); !slices.Equal(repaired, fresh) {
		r.Errorf("repaired tables have\n%s\nnew ones have\n%s", without(repaired, fresh), without(fresh, repaired))
	}
}

// drifts reports whether Check returns an error about drift.
func (r *rig) drifts() bool {
	r.Helper()
	err := r.backend.Check(context.Background())
	var drift *dataplane.DriftError
	if err != nil && !(errors.As(err, &drift) && errors.Is(err, ruleset.ErrNeedFull)) {
		r.Errorf("Check returned %v", err)
	}
	return err != nil
}

// TestAlteredTablesAreNoticedAndRepaired alters the tables with the nft tool in every way that matters. The
// agent repairs them, and every third alteration (in the long form, each) is repaired by a new process, too.
func TestAlteredTablesAreNoticedAndRepaired(t *testing.T) {
	t.Parallel()
	r := alteredRig(t)
	r.nft("add table ip other; add set ip other s { type ipv4_addr; }")
	if r.drifts() {
		t.Fatal("another program's table was changed, and Check reports drift")
	}
	for i, script := range alterations {
		t.Run(script, func(t *testing.T) {
			r.TB = t
			r.nft(script)
			if !r.drifts() {
				t.Error("Check reports no drift")
			}
			r.cursor.Resync()
			r.sync()
			r.checkRepaired()
			if i%3 != 0 && !testtime.Thorough() {
				return
			}
			r.nft(script)
			r.start()
			r.sync()
			r.checkRepaired()
		})
	}
	r.TB = t
	if out := r.nft("list tables"); !strings.Contains(out, "table ip other") {
		t.Errorf("another program's table is gone: %s", out)
	}
}

// TestChangeDetectsAlteredTables applies a change with a new handler to altered tables before Check runs.
func TestChangeDetectsAlteredTables(t *testing.T) {
	t.Parallel()
	r := alteredRig(t)
	for _, alter := range []string{
		"delete table ip proxier",
		"add element ip proxier tcp-endpoints { \"0:1\" . 0x3 : 10.0.0.1 . 80 }",
		// A change with a new handler reads the tables afterwards. It must not take foreign
		// rules for its own.
		"insert rule ip proxier nat-output accept",
		"add chain ip proxier filter-forward { policy drop; }",
		"flush chain ip proxier pool-3; add rule ip proxier pool-3 drop",
		"add chain ip proxier strange",
		"delete element ip proxier handlers { \"8010:0\" }; add element ip proxier handlers { \"8010:0\" : drop }",
		// The change does not read the elements. The next Check must detect the alteration.
		unread,
	} {
		t.Run(alter, func(t *testing.T) {
			r.TB = t
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(3)...))
			must.Do(r, Cleanup(context.Background(), Config{NetNS: r.host.File()}))
			r.start()
			r.sync()
			r.nft(alter)
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(4)...))
			r.sync()
			if noticed := r.last.Full; noticed == (alter == unread) {
				t.Errorf("the change was a full delta: %t", noticed)
			}
			if alter != unread {
				r.checkRepaired()
			} else if !r.drifts() {
				t.Error("Check reports no drift")
			}
		})
	}
}

const unread = "add element ip proxier cluster-ips { 10.96.0.99 }"

func stickyEndpoints(r *rig) string {
	return normal(r.nft("list map ip " + r.backend.name + " sticky-endpoints"))
}
