package iptables

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestCheckRunsNoProgramWithoutChanges removes iptables-restore between two calls of Check.
// The first call runs it. The second must not, until another process changes a table or, with
// iptables-legacy, minutes have passed.
func TestCheckRunsNoProgramWithoutChanges(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r, w := newWatched(t, flavor)
		r.tracker.SetService(svc(0))
		r.tracker.SetSlice(slice(0, tracker.IPv4, 1))
		r.sync()
		if err := r.backend.Check(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.dropPrograms()
		check := func(what string, runs bool) {
			t.Helper()
			if err := r.backend.Check(t.Context()); (err != nil) != runs {
				t.Errorf("%s: a program ran: %t, want %t; error %v", what, err != nil, runs, err)
			}
		}
		check("nothing changed", false)
		b := r.backend
		b.ran = time.Now().Add(-legacyRecheck)
		before := b.checked
		check("minutes later", flavor.Flavor == Legacy)
		b.known, b.checked, b.ran = true, before, time.Now()
		check("nothing changed", false)
		for _, args := range [][]string{{"-t", "nat", "-N", "FOREIGN"}, {"-A", "FORWARD"}} {
			for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				r.command(family, "", args...)
				check(family.String()+" "+strings.Join(args, " "), true)
				if b.checked, b.known = b.generation(t.Context()); !b.known {
					t.Fatal("no generation")
				}
				check("nothing changed", false)
			}
		}
	})
}

// TestWatchReturnsWhenTheBackendIsClosed closes the backend long before the interval ends.
func TestWatchReturnsWhenTheBackendIsClosed(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		r.sync()
		done := make(chan error, 1)
		go func() { done <- r.backend.Watch(t.Context(), time.Hour, func(err error) { t.Error(err) }) }()
		if err := r.backend.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
}

// TestTablesNotYetWrittenAreNoDrift checks tables before the first full delta, and after a failure.
func TestTablesNotYetWrittenAreNoDrift(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		if err := r.backend.Check(t.Context()); err != nil {
			t.Errorf("before the first delta, Check returned %v", err)
		}
		r.sync()
		r.backend.families[0].discard(errors.New("a failure"))
		var drift *dataplane.DriftError
		if err := r.backend.Check(t.Context()); !errors.As(err, &drift) || !strings.Contains(drift.What, "unknown") {
			t.Errorf("after a failure, Check returned %v", err)
		}
	})
}
