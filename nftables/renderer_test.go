package nftables

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func newRenderer(tb testing.TB, c Config) *Renderer {
	tb.Helper()
	r, err := NewRenderer(c, tracker.IPv4)
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// TestTransactionsAreValues renders without a kernel.
func TestTransactionsAreValues(t *testing.T) {
	p := backendtest.NewNode(t, tracker.Config{})
	p.Tracker.SetService(svc(0))
	p.Tracker.SetSlice(epSlice(0, tracker.IPv4, 1, 2))
	r := newRenderer(t, Config{Table: "other", CountPackets: true})
	needsFull := func(when string) {
		t.Helper()
		if tx, err := r.Render(&ruleset.Delta{Node: &ruleset.Node{}}); tx != nil || !errors.Is(err, ruleset.ErrNeedFull) {
			t.Errorf("an incremental delta %s: %v", when, err)
		}
	}
	needsFull("first")
	tx, err := r.Render(p.Engine.Snapshot().Delta())
	if err != nil {
		t.Fatal(err)
	}
	text := tx.String()
	if text != tx.String() || !strings.HasPrefix(text, "create table ip other\n") || !strings.Contains(text, "table ip other-packets {") {
		t.Errorf("text:\n%s", text)
	}
	hooked := slices.ContainsFunc(tx.Chains(), func(c Chain) bool {
		return c.Name == "nat-output" && strings.HasPrefix(c.Hook, "type nat hook output") && slices.Equal(c.Rules, []string{"jump services"})
	})
	if tx.Family() != tracker.IPv4 || tx.Empty() || !hooked {
		t.Errorf("family %v, chains %v", tx.Family(), tx.Chains())
	}
	if tx, err := r.Render(&ruleset.Delta{Node: p.Engine.Snapshot().Node}); err != nil || !tx.Empty() || tx.String() != "" {
		t.Errorf("no change: %v, %v", tx, err)
	}
	tx.Revert()
	needsFull("after Revert")
	if _, err := NewRenderer(Config{MasqueradeMark: 3}, tracker.IPv4); !errors.Is(err, ruleset.ErrConfig) {
		t.Errorf("two bits: %v", err)
	}
}

// TestRendererRefusesServices renders a Service with a range that no translation shifts.
func TestRendererRefusesServices(t *testing.T) {
	p := backendtest.NewNode(t, tracker.Config{OnService: worldgen.OnService})
	for i, last := range []uint16{65000, 100} {
		p.Tracker.SetService(svc(i, func(s *v1.Service) { worldgen.SetPortRange(s, "p", 80, last, 70) }))
		p.Tracker.SetSlice(epSlice(i, tracker.IPv4, 1))
	}
	tx, err := newRenderer(t, Config{}).Render(p.Engine.Snapshot().Delta())
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) || len(partial.Failed) != 1 || !strings.Contains(tx.String(), "10.96.0.2 . tcp . 80-100") || strings.Contains(tx.String(), "10.96.0.1 ") {
		t.Errorf("%v in\n%s", err, tx)
	}
}

// TestOffloadTextIsListed compares the rules with those that the tool listed in a kernel with flowtables.
func TestOffloadTextIsListed(t *testing.T) {
	golden, err := os.ReadFile("testdata/offload-ipv4.nft")
	if err != nil {
		t.Fatal(err)
	}
	p := backendtest.NewNode(t, tracker.Config{})
	tx, err := newRenderer(t, Config{Offload: &Offload{Interfaces: []string{"*"}, UDP: true}}).Render(p.Engine.Snapshot().Delta())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range tx.Chains() {
		if c.Name != layout.ChainToFastPath && c.Name != layout.ChainFilterForward {
			continue
		}
		_, listed, _ := strings.Cut(string(golden), "chain "+c.Name+" {\n")
		listed, _, _ = strings.Cut(listed, "\t}\n")
		if !strings.HasSuffix(listed, "\t\t"+strings.Join(c.Rules, "\n\t\t")+"\n") {
			t.Errorf("chain %s: %q\nlisted:\n%s", c.Name, c.Rules, listed)
		}
	}
}
