// Package testtime determines how long tests take and wait.
package testtime

import (
	"os"
	"slices"
	"strings"
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

// Turn returns which of n data planes gets a world of conformance.Simulate in a short form that does not give
// all worlds to all of them. The world is named as its test, such as "TestSimulation/restart/plain" or
// "TestSimulation/seed=1". The three forms of a world and consecutive seeds go to different planes.
func Turn(test string, n int) int {
	_, world, _ := strings.Cut(test, "/")
	world, mode, _ := strings.Cut(world, "/")
	at := slices.Index([]string{"plain", "failing_writes", "restarts"}, mode)
	for _, c := range []byte(world) {
		at += int(c)
	}
	return at % n
}

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
