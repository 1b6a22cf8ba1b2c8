// Package testtime determines how long tests take and wait.
package testtime

import (
	"os"
	"testing"
	"time"
)

// Timeout is how long a test waits for an event before it fails. It is long enough for an
// emulated machine on busy processors. No test passes because of it: tests do not assert
// by time that something happens immediately, unless they use a synthetic clock or subtract
// the stalls of the machine (package stall).
const Timeout = time.Minute

// Thorough reports whether tests should run their long forms, with more rounds: PROXIER_THOROUGH
// is 1 and -short is not set.
func Thorough() bool { return !testing.Short() && os.Getenv("PROXIER_THOROUGH") == "1" }

// NeedThorough skips a test that takes long unless Thorough is true.
func NeedThorough(tb testing.TB) {
	tb.Helper()
	if !Thorough() {
		tb.Skip("takes long; set PROXIER_THOROUGH=1")
	}
}

// Complete reports whether every test should run, those in an emulated machine too:
// PROXIER_REQUIRE_ALL or PROXIER_THOROUGH is 1 and -short is not set.
func Complete() bool {
	return Thorough() || !testing.Short() && os.Getenv("PROXIER_REQUIRE_ALL") == "1"
}

// NeedComplete skips a test that takes long, in an emulated machine or with external programs,
// unless Complete is true.
func NeedComplete(tb testing.TB) {
	tb.Helper()
	if !Complete() {
		tb.Skip("takes long; set PROXIER_REQUIRE_ALL=1")
	}
}
