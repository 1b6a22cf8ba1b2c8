//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
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

// alter alters the tables. It skips the test if the tool or the kernel refuses.
func (r *rig) alter(script string) {
	r.Helper()
	if out, err := r.host.Run(r, "nft", script); err != nil {
		r.Fatalf("nft %s: %v\n%s", script, err, out)
	}
}

// checkRepaired compares the tables with the ruleset, and their listing with that of new tables.
func (r *rig) checkRepaired() {
	r.Helper()
	r.verify()
	list := func() string {
		var blocks, flush []string
		for _, s := range layout.TrafficSets() { // counters may differ
			flush = append(flush, "flush set ip proxier "+s.Name(), "flush set ip6 proxier "+s.Name())
		}
		r.nft(strings.Join(flush, "; "))
		for _, family := range []string{"ip", "ip6"} {
			for _, block := range strings.Split(normal(r.nft("list table "+family+" proxier")), "\n\t}\n") {
				blocks = append(blocks, family+strings.TrimPrefix(block, "table "+family+" proxier {"))
			}
		}
		slices.Sort(blocks) // their order depends on the sets that were kept
		return strings.ReplaceAll(strings.Join(blocks, "\n"), "\n\n", "\n")
	}
	repaired := list()
	must.Do(r, Cleanup(context.Background(), Config{NetNS: r.host.File()}))
	r.start()
	r.sync()
	if fresh := list(); repaired != fresh {
		r.Errorf("repaired and fresh tables differ: %s", backendtest.FirstDifference(repaired, fresh))
	}
}

// TestAlteredTablesAreNoticedAndRepaired alters the tables with the nft tool in
// every way that matters.
func TestAlteredTablesAreNoticedAndRepaired(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	for _, script := range alterations {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			r := alteredRig(t)
			r.nft("add table ip other; add set ip other s { type ipv4_addr; }")
			if err := r.backend.Check(context.Background()); err != nil {
				t.Fatalf("another program's table was changed, and Check returned %v", err)
			}
			r.alter(script)
			err := r.backend.Check(context.Background())
			var drift *dataplane.DriftError
			if !errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull) {
				t.Fatalf("Check returned %v", err)
			}
			r.cursor.Resync()
			r.sync()
			r.checkRepaired()
			if out := r.nft("list tables"); !strings.Contains(out, "table ip other") {
				t.Errorf("another program's table is gone: %s", out)
			}
		})
	}
}

// TestRestartRepairsAlteredTables starts a new process with altered tables in the kernel. The short form has every
// third alteration: TestAlteredTablesAreNoticedAndRepaired has all.
func TestRestartRepairsAlteredTables(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	for i, script := range alterations {
		if i%3 != 0 && !testtime.Thorough() {
			continue
		}
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			r := alteredRig(t)
			r.alter(script)
			r.start()
			r.sync()
			r.checkRepaired()
		})
	}
}

// TestRebuiltTableKeepsClients repairs a table by deleting it.
func TestRebuiltTableKeepsClients(t *testing.T) {
	t.Parallel()
	r := alteredRig(t)
	r.nft("add element ip proxier sticky-clients { \"8001:0\" . 172.16.0.9 timeout 600s expires 500s : \"8001:2\" }")
	before := stickyEndpoints(r)
	r.alter("add table ip proxier { flags dormant; }")
	r.cursor.Resync()
	r.sync()
	r.verify()
	if out := r.nft("list map ip proxier sticky-clients"); !remembers(out, "8001:0 . 172.16.0.9 timeout 10m", "8001:2") {
		t.Errorf("clients are %s", out)
	}
	if after := stickyEndpoints(r); after != before {
		t.Errorf("endpoints are %s, were %s", after, before)
	}
}

func stickyEndpoints(r *rig) string {
	return normal(r.nft("list map ip " + r.backend.name + " sticky-endpoints"))
}

// TestChangeDetectsAlteredTables applies a change to altered tables before Check runs.
func TestChangeDetectsAlteredTables(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
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
	} {
		t.Run(alter, func(t *testing.T) {
			t.Parallel()
			r := alteredRig(t)
			r.alter(alter)
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1, 2, 3, 4))
			r.sync()
			if !r.last.Full {
				t.Error("the change did not detect the alteration")
			}
			r.checkRepaired()
		})
	}
}

// TestCheckDetectsAlterationBeforeChange alters elements that a change with a new handler does not
// read. The next Check must detect the alteration.
func TestCheckDetectsAlterationBeforeChange(t *testing.T) {
	t.Parallel()
	r := alteredRig(t)
	r.alter("add element ip proxier cluster-ips { 10.96.0.99 }")
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1, 2, 3, 4))
	r.sync()
	if r.last.Full {
		t.Fatal("the change was a full delta")
	}
	var drift *dataplane.DriftError
	if err := r.backend.Check(context.Background()); !errors.As(err, &drift) {
		t.Fatalf("Check returned %v", err)
	}
}

// TestForeignTransactionsAreNoDrift has another process commit transactions without a pause.
// Check must not report drift.
func TestForeignTransactionsAreNoDrift(t *testing.T) {
	t.Parallel()
	r := alteredRig(t)
	for i := range 150 {
		r.tracker.SetService(svc(i+2, sticky(int32(1000+i))))
		r.tracker.SetSlice(epSlice(i+2, tracker.IPv4, upTo(3)...))
	}
	r.sync()
	conn := must.Get(kernel.Dial(r.host.File(), kernel.SendBuffer))(t)
	defer conn.Close()
	done, stopped := make(chan struct{}), make(chan error)
	go func() {
		w := kernel.NewWriter("other")
		tx := &model.Tx{Objects: []model.Object{{Kind: model.CreateTable, Family: tracker.IPv4}, {Kind: model.DeleteTable, Family: tracker.IPv4}}}
		for {
			w.Reset()
			w.Add(tx)
			err := w.Commit(conn)
			select {
			case <-done:
				stopped <- err
				return
			default:
			}
			if err != nil {
				stopped <- err
				return
			}
		}
	}()
	interrupted := 0
	for i := range 10 {
		if err := r.backend.Check(context.Background()); err != nil {
			t.Errorf("Check %d returned %v", i, err)
			break
		}
		if errors.Is(r.backend.examine(true), nfnl.ErrInterrupted) {
			interrupted++
		}
		r.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(4+i)...))
		r.sync()
		if r.last.Full {
			t.Errorf("change %d was a full delta", i)
		}
		r.cursor.Resync()
		r.sync()
	}
	close(done)
	must.Do(t, <-stopped)
	t.Logf("%d of 10 reads were interrupted by %d transactions", interrupted, conn.Commits())
	r.verify()
	must.Do(t, r.backend.Check(context.Background()))
	r.alter("add chain ip proxier filter-forward { policy drop; }")
	if err := r.backend.Check(context.Background()); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Fatal(fmt.Sprint("Check returned ", err))
	}
}
