package dataplane_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

func TestUnsupportedErrorText(t *testing.T) {
	for want, e := range map[string]*dataplane.UnsupportedError{
		"ipvs: module ip_vs is not supported on this system": {Backend: "ipvs", Feature: "module ip_vs"},
		"nftables: map with timeout for IPv6 is not supported on this system (Linux 5.15 or later is needed): file does not exist": {
			Backend: "nftables", Family: tracker.IPv6, Feature: "map with timeout", Minimum: "Linux 5.15", Err: fs.ErrNotExist,
		},
	} {
		if e.Error() != want {
			t.Errorf("%q, want %q", e.Error(), want)
		}
		if !errors.Is(e, dataplane.ErrUnsupported) || errors.Is(e, fs.ErrNotExist) != (e.Err != nil) {
			t.Errorf("%q wraps %v", want, e.Unwrap())
		}
	}
}

func TestDriftErrorRequestsFullDelta(t *testing.T) {
	err := error(&dataplane.DriftError{Backend: "nftables", Family: tracker.IPv6, What: "it is gone"})
	if !errors.Is(err, ruleset.ErrNeedFull) {
		t.Error("it does not wrap ErrNeedFull")
	}
	if got, want := err.Error(), "nftables: IPv6 was altered by another process: it is gone"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
}

func TestWatchReportsFailedChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 59*time.Minute)
		defer cancel()
		var checks, reported []string
		n := 0
		check := func(context.Context) error {
			checks = append(checks, time.Since(begin).String())
			if n++; n%2 == 0 {
				return fmt.Errorf("wrong at %v", time.Since(begin))
			}
			return nil
		}
		err := dataplane.Watch(ctx, 10*time.Minute, check, func(err error) { reported = append(reported, err.Error()) })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Watch returns %v", err)
		}
		if want := []string{"10m0s", "20m0s", "30m0s", "40m0s", "50m0s"}; !slices.Equal(checks, want) {
			t.Errorf("checks at %v, want %v", checks, want)
		}
		if want := []string{"wrong at 20m0s", "wrong at 40m0s"}; !slices.Equal(reported, want) {
			t.Errorf("reported %v, want %v", reported, want)
		}
	})
}

// TestWatchEndsWhenClosed checks that a failure caused by a done context is not
// reported, and that Watch ends with os.ErrClosed.
func TestWatchEndsWhenClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		fail := func(err error) { t.Errorf("reported %v", err) }
		err := dataplane.Watch(ctx, time.Second, func(ctx context.Context) error { cancel(); return ctx.Err() }, fail)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Watch returns %v", err)
		}
		err = dataplane.Watch(t.Context(), time.Second, func(context.Context) error { return fmt.Errorf("x: %w", os.ErrClosed) }, fail)
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("Watch returns %v", err)
		}
		err = dataplane.Watch(t.Context(), 0, func(context.Context) error { return nil }, fail)
		if err == nil || !strings.Contains(err.Error(), "not positive") {
			t.Errorf("Watch returns %v", err)
		}
	})
}
