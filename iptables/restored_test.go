package iptables

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestChangeFindsRestoredTables restores an old state of a table between two changes, as another program
// does that saved the tables before the first one. The second change must not build on the old state.
func TestChangeFindsRestoredTables(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		for _, table := range []string{"filter", "nat"} {
			r := newRig(t, flavor)
			r.set(0, []int{1, 2})
			r.set(1, []int{3})
			r.sync()
			old := r.command(tracker.IPv4, "-save", "-t", table)
			r.set(0, nil) // filter and nat change
			r.sync()
			file := filepath.Join(t.TempDir(), "old")
			if err := os.WriteFile(file, []byte(old), 0o600); err != nil {
				t.Fatal(err)
			}
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
