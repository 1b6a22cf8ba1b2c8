package objects

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
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
	w, err := open()
	if err != nil {
		t.Fatal(err)
	}
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
