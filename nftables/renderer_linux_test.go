package nftables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// differ matches the chains that nft cannot load as they are (see [Transaction.String]).
var differ = regexp.MustCompile(`^IPv. sticky-send$|^IPv6 (choose-.*|sticky-.*s)$`)

// rulesOf returns the sums of the rules of each chain of a table, in order, without the chains that
// differ.
func rulesOf(tb testing.TB, c connection, table string, f tracker.Family) map[string][]uint64 {
	tb.Helper()
	rules := must.Get(c.Rules(table, f))(tb)
	out := map[string][]uint64{}
	for _, r := range rules {
		if !differ.MatchString(fmt.Sprint(f, " ", r.Chain)) {
			out[r.Chain] = append(out[r.Chain], r.Sum)
		}
	}
	return out
}

// TestTextEqualsBytes drives random worlds through a Backend, and through Renderers whose text the nft tool
// loads in another namespace. After each change, both namespaces must have the same tables, as the kernel dumps them
// and, after every fifth, as the tool lists them.
func TestTextEqualsBytes(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	for seed := range randomSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			testTextEqualsBytes(t, seed)
		})
	}
}

func testTextEqualsBytes(t *testing.T, seed uint64) {
	var hosts [2]*netlab.Host
	var backends [2]*Backend
	for i := range hosts {
		hosts[i] = netlab.NewHost(t)
		netlab.NeedPrograms(t, "nft")
	}
	p := backendtest.NewNode(t, tracker.Config{OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint})
	config := Config{}
	var cursors []*ruleset.Cursor
	full := false
	start := func() {
		for i, h := range hosts {
			must.Get(h.Run(t, "nft", "flush ruleset"))(t)
			if cursors != nil {
				cursors[i].Detach()
				backends[i].Close()
			}
			c := config
			c.NetNS = h.File()
			b := must.Get(open(t.Context(), c, withoutGrace))(t)
			t.Cleanup(func() { b.Close() })
			backends[i] = b
		}
		cursors = []*ruleset.Cursor{p.Engine.Attach("backend", backends[0]), p.Engine.Attach("text", newTextBackend(t, config, hosts[1]))}
		for _, c := range cursors {
			c.OnSync(func(i ruleset.SyncInfo) { full = full || i.Full })
		}
	}
	sync := func() {
		t.Helper()
		full = false
		for _, c := range cursors {
			must.Do(t, c.Sync(t.Context()))
		}
	}
	start()
	sync()
	rng := rand.New(rand.NewPCG(seed, 6))
	// In a user namespace, the tool cannot make its socket's buffer large enough for many tables of hashes.
	changes := backendtest.Changes{Hash: seed == 1, Shared: 4}
	steps := 20
	if testtime.Thorough() && !changes.Hash {
		steps = 40
	}
	for step := range steps {
		for range 1 + rng.IntN(3) {
			changes.Make(p.Tracker, p.Engine, rng)
		}
		if sync(); full {
			start() // what a full delta keeps is not the Renderer's
			sync()
		}
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			compareTables(t, hosts, [2]connection{backends[0].conn, backends[1].conn}, DefaultTable, f, step%5 == 4)
		}
		if t.Failed() {
			t.Fatalf("step %d", step)
		}
	}
}

// gap matches what the tool adds to an interval set: the end of nothing before the first interval.
var gap = regexp.MustCompile(`^(nodeport-ips|service-cidrs) (has|0+:.* true)`)

func withoutGap(lines []string) []string { return slices.DeleteFunc(lines, gap.MatchString) }

// TestEveryRuleEqualsItsText commits every kind of object, and loads the text of the same transaction.
func TestEveryRuleEqualsItsText(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	prefixes := func(list ...string) (l ruleset.LocalTraffic) {
		for _, p := range list {
			l.CIDRs = append(l.CIDRs, netip.MustParsePrefix(p))
		}
		return l
	}
	for name, local := range map[string]ruleset.LocalTraffic{
		"no pods": {}, "bridge": {Bridge: "br-0"}, "prefix": {InterfacePrefix: "veth"},
		"CIDRs": prefixes("0.0.0.0/0", "10.244.0.0/16", "10.3.0.0/17", "10.4.5.6/32", "128.0.0.0/1", "::/0", "fd00:1::/64", "fd00:2::/65", "fd00::7/128"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var conns [2]connection
			var hosts [2]*netlab.Host
			for i := range conns {
				hosts[i] = netlab.NewHost(t)
				netlab.NeedPrograms(t, "nft")
				b := must.Get(New(t.Context(), Config{NetNS: hosts[i].File()}))(t)
				t.Cleanup(func() { b.Close() })
				conns[i] = b.conn
			}
			for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				rules := kernel.Rules{Family: f, Mark: 1 << 31, Seed: 77, Local: local}
				tx := &model.Tx{}
				tx.Object(model.Object{Kind: model.CreateNewTable, Family: f})
				model.NewTable(f, &ruleset.Node{LocalTraffic: local}, model.DefaultConfig, nil, 0).CreateAll(tx)
				for _, o := range []model.Object{
					{Kind: model.NewSet, Set: layout.Allowed(f.Bits())}, {Kind: model.SourceRule, Size: f.Bits()},
					{Kind: model.HandlerChain, Handler: layout.Handler{Buckets: 251, Hash: tracker.HashSource}},
					{Kind: model.ChooserChain, Sticky: layout.StickyHandler{Buckets: 251, Hash: tracker.HashSource}},
					{Kind: model.ChooserChain, Sticky: layout.StickyHandler{Buckets: 251, Hash: tracker.HashSourcePort}},
				} {
					o.Family = f
					tx.Object(o)
				}
				w := conns[0].NewWriter(DefaultTable, rules)
				w.Add(tx)
				must.Do(t, conns[0].Commit(w))
				text := kernel.NewText(DefaultTable, rules)
				text.Add(tx)
				text.Finish()
				if err := hosts[1].Do(func() error { _, err := tool(text.String(), "-f", "-"); return err }); err != nil {
					t.Fatalf("%v in\n%s", err, text.String())
				}
				compareTables(t, hosts, conns, DefaultTable, f, true)
			}
		})
	}
}

// compareTables compares a table by the text of nft, in the second namespace, with one by bytes, and their listings.
func compareTables(tb testing.TB, hosts [2]*netlab.Host, conns [2]connection, table string, f tracker.Family, listings bool) {
	tb.Helper()
	got, want := withoutGap(contents(tb, conns[1], table, f)), withoutGap(contents(tb, conns[0], table, f))
	if !slices.Equal(got, want) {
		tb.Fatalf("table %s: by text\n%s\nby bytes\n%s", table, without(got, want), without(want, got))
	}
	text, bytes := rulesOf(tb, conns[1], table, f), rulesOf(tb, conns[0], table, f)
	for chain := range bytes {
		if !slices.Equal(text[chain], bytes[chain]) {
			tb.Errorf("%v: rules of chain %s differ", f, chain)
		}
	}
	if !listings {
		return
	}
	var listed [2]string
	for i, h := range hosts {
		out := must.Get(h.Run(tb, "nft", "list table "+familyName(f)+" "+table))(tb)
		// The kernel lists chains in the order of their creation.
		parts := strings.Split(strings.TrimSuffix(stable(out), "}\n"), "\n\n")
		slices.Sort(parts)
		listed[i] = strings.Join(parts, "\n\n")
	}
	if listed[0] != listed[1] {
		tb.Fatalf("the listings differ: %s", backendtest.FirstDifference(listed[1], listed[0]))
	}
}

// newTextBackend returns a backend that applies the text of Renderers in a host by the nft tool.
func newTextBackend(tb testing.TB, c Config, h *netlab.Host) ruleset.Backend {
	var renderers []*Renderer
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r := must.Get(NewRenderer(c, f))(tb)
		renderers = append(renderers, r)
	}
	return textBackend{ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		// The next transactions delete the chains that these make unused.
		for _, d := range []*ruleset.Delta{d, {Node: d.Node}} {
			text := ""
			for _, r := range renderers {
				tx, err := r.Render(d)
				if err != nil {
					return err
				}
				if d.Full {
					text += fmt.Sprintf("add table %[1]s %[2]s\ndelete table %[1]s %[2]s\n", familyName(tx.Family()), DefaultTable)
				}
				text += tx.String()
			}
			if text == "" {
				continue
			}
			if err := h.Do(func() error { _, err := tool(text, "-f", "-"); return err }); err != nil {
				return fmt.Errorf("%w in\n%s", err, text)
			}
		}
		return nil
	})}
}

// textBackend has the limits of a [Backend].
type textBackend struct{ ruleset.Backend }

func (textBackend) Limits(tracker.Family) ruleset.Limits { return model.Limits() }
