//go:build linux

package iptables

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// TestCheckRunsNoProgramWithoutTransactions takes iptables-restore away between two calls
// of Check. The first runs it. The second must not, until another process commits a
// transaction to nf_tables.
func TestCheckRunsNoProgramWithoutTransactions(t *testing.T) {
	t.Parallel()
	w := &watched{tb: t, dir: t.TempDir()}
	r := newRig(t, NFT, w.through)
	r.tracker.SetService(svc(0))
	r.tracker.SetSlice(slice(0, tracker.IPv4, 1))
	r.sync()
	if err := r.backend.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		if err := os.Remove(filepath.Join(w.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.backend.Check(t.Context()); err != nil {
		t.Errorf("nothing was committed: %v", err)
	}
	if _, err := r.host.Output("iptables-nft", "-t", "nat", "-N", "SOMEBODY"); err != nil {
		t.Fatal(err)
	}
	if err := r.backend.Check(t.Context()); err == nil {
		t.Error("no program was run after a transaction of another process")
	}
}
