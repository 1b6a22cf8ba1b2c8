package objects

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestAddressesThatCannotBeReadStay makes a reading of the node's addresses fail, at the start and
// later.
func TestAddressesThatCannotBeReadStay(t *testing.T) {
	var own []netip.Addr
	var failed error
	calls := ""
	hooks := WorldHooks{
		Own:      func() ([]netip.Addr, error) { return own, failed },
		OwnInUse: func(err error) { calls += fmt.Sprint(err == nil, " ") },
	}
	open := func() (*World, error) {
		return New(configtest.Parsed(t, []string{"run", "--cluster-cidr=10.0.0.0/8"}), []tracker.Family{tracker.IPv4}, nil, hooks, slog.New(slog.DiscardHandler))
	}
	broken := errors.New("no memory")
	failed = broken
	if _, err := open(); !errors.Is(err, broken) {
		t.Errorf("at the start: error %v", err)
	}
	own, failed = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
	w := must.Get(open())(t)
	own, failed = nil, broken
	w.RefreshNode()
	if got := fmt.Sprint(w.Tracker.Node().Addresses); got != "[192.0.2.1]" {
		t.Errorf("addresses %s after a reading that failed", got)
	}
	failed = nil
	w.RefreshNode()
	if got := w.Tracker.Node().Addresses; len(got) != 0 {
		t.Errorf("addresses %v of a node that has none", got)
	}
	if want := "false true false true "; calls != want {
		t.Errorf("OwnInUse: %s, want %s", calls, want)
	}
}

// TestObjectsHandedInTogetherAreSyncedTogether syncs while objects are handed in, and hands objects in
// while a delta is applied. Neither waits for the other.
func TestObjectsHandedInTogetherAreSyncedTogether(t *testing.T) {
	w := must.Get(New(configtest.Parsed(t, []string{"run", "--cluster-cidr=10.0.0.0/8"}), []tracker.Family{tracker.IPv4}, nil, WorldHooks{}, slog.New(slog.DiscardHandler)))(t)
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	service := func(n int) { w.SetService(web(fmt.Sprint("s", n), fmt.Sprintf("10.96.0.%d", n))) }
	var changes []int
	var applying func()
	cursor := w.Engine.Attach("rules", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		changes = append(changes, len(d.Changes))
		if applying != nil {
			applying()
			applying = nil
		}
		return nil
	}))
	sync := func() {
		t.Helper()
		must.Do(t, cursor.Sync(t.Context()))
	}
	sync()
	w.together(func() {
		service(1)
		sync()
		service(2)
	})
	applying = func() { w.together(func() { service(3); service(4) }) }
	sync()
	sync()
	if got, want := fmt.Sprint(changes), "[0 2 2]"; got != want {
		t.Errorf("changes of each delta: %s, want %s", got, want)
	}
}

// TestNodeAddressTakesPrecedenceByFamily checks which source the node's addresses come from.
func TestNodeAddressTakesPrecedenceByFamily(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(dir+"/node.yaml", []byte("apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: z}}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}, {type: InternalIP, address: '2001:db8::1'}, {type: ExternalIP, address: 198.51.100.1}]}\n"), 0o644))
	for _, tt := range []struct{ name, bind, want string }{
		{"n1", "0.0.0.0", "[192.0.2.1 2001:db8::1] z"},
		{"n1", "::", "[192.0.2.1 2001:db8::1] z"},
		{"n1", "203.0.113.1", "[203.0.113.1 2001:db8::1] z"},
		{"n1", "2001:db8::9", "[2001:db8::9 192.0.2.1] z"},
		{"n2", "203.0.113.1", "[203.0.113.1] "},
	} {
		c := configtest.Parsed(t, []string{"run", "--manifests", dir, "--hostname-override", tt.name, "--bind-address", tt.bind})
		n := must.Get(Peek(t.Context(), c, slog.New(slog.DiscardHandler)))(t).Tracker.Node()
		if got := fmt.Sprint(n.Addresses, " ", n.Zone); got != tt.want {
			t.Errorf("%s at %s: %s, want %s", tt.name, tt.bind, got, tt.want)
		}
	}
}
