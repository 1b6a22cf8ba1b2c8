package backendconf

import (
	"errors"
	"log/slog"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

func TestFamiliesAreCheckedAndCopied(t *testing.T) {
	both := []tracker.Family{tracker.IPv4, tracker.IPv6}
	if got, err := Families(nil); err != nil || !slices.Equal(got, both) {
		t.Errorf("nil: %v, %v", got, err)
	}
	given := []tracker.Family{tracker.IPv6}
	got, err := Families(given)
	given[0] = tracker.IPv4
	if err != nil || !slices.Equal(got, []tracker.Family{tracker.IPv6}) {
		t.Errorf("the result shares the caller's slice: %v, %v", got, err)
	}
	for _, bad := range [][]tracker.Family{{}, {0}, {3}, {tracker.IPv4, tracker.IPv4}} {
		if got, err := Families(bad); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("%v: %v, %v, want ErrConfig", bad, got, err)
		}
	}
}

func TestNilLogDiscards(t *testing.T) {
	if l := slog.Default(); Log(l) != l {
		t.Error("Log replaces a logger")
	}
	if Log(nil).Enabled(t.Context(), slog.LevelError) {
		t.Error("nil does not discard")
	}
}

func TestMasqueradeMarkHasOneBit(t *testing.T) {
	for mark, want := range map[dataplane.MasqueradeMark]dataplane.MasqueradeMark{0: 0x4000, 1: 1, 1 << 31: 1 << 31, 0x80: 0x80, 3: 0, 0xffffffff: 0} {
		var families []tracker.Family
		var log *slog.Logger
		got := mark
		switch err := Complete(&families, &got, &log); {
		case want == 0 && !errors.Is(err, ruleset.ErrConfig):
			t.Errorf("%#x: %v, want ErrConfig", uint32(mark), err)
		case want != 0 && (got != want || err != nil):
			t.Errorf("%#x: %#x, %v, want %#x", uint32(mark), uint32(got), err, uint32(want))
		}
	}
}
