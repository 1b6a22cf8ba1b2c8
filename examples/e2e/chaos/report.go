//go:build linux

package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// recorder collects the result of a world. Its methods are safe for concurrent use, except limitStalls and
// traffic, which are for the end.
type recorder struct {
	mu       sync.Mutex
	steps    []string
	failures []string
	// made counts the connections by kind: tcp and udp (one request each), held (lines through
	// connections that stay open), talk (requests from sockets that stay open) and affinity (the second of two). The
	// others count failed ones.
	made                  map[string]int
	lost, excused, stalls int
	// brokenUntil is when rules were missing last because of a fault, in the future while they are.
	brokenUntil time.Time
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.steps = append(r.steps, time.Now().UTC().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

func (r *recorder) failf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	r.note("FAILED %s", text)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, text)
}

// failed reports whether there is a failure.
func (r *recorder) failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.failures) != 0
}

// setBroken records whether rules are missing because of a fault. While they are, losses are excused.
func (r *recorder) setBroken(broken bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); broken {
		r.brokenUntil = now.Add(24 * time.Hour)
	} else if now.Before(r.brokenUntil) {
		r.brokenUntil = now
	}
}

// brokenSince reports whether rules were missing after a time.
func (r *recorder) brokenSince(t time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.brokenUntil.After(t)
}

// result counts a connection, with an error if its outcome was wrong. The error is excused if the
// machine stalled, or if rules were missing while the connection was open.
func (r *recorder) result(kind string, begun time.Time, stalled bool, err error) {
	broken := r.brokenSince(begun)
	if err != nil && !broken && !stalled {
		r.failf("%s, begun %v ago: %v", kind, time.Since(begun).Round(time.Millisecond), err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.made[kind]++
	switch {
	case err == nil:
	case broken:
		r.excused++
	case stalled:
		r.stalls++
	default:
		r.lost++
	}
}

// stalledPercent is the largest percentage of connections that stalls may excuse, and freeStalls a
// number that they may excuse in any case. With more, the machine is too busy to distinguish an agent
// that loses connections from one that does not.
const stalledPercent, freeStalls = 1, 20

// limitStalls records a failure if stalls excused too many connections.
func (r *recorder) limitStalls() {
	all := 0
	for _, n := range r.made {
		all += n
	}
	if r.stalls > max(freeStalls, all*stalledPercent/100) {
		r.failf("%d of %d connections were lost while the machine stalled: it is too busy, or connections are lost", r.stalls, all)
	}
}

// traffic returns the counts in one line.
func (r *recorder) traffic() string {
	var out []string
	for _, kind := range slices.Sorted(maps.Keys(r.made)) {
		out = append(out, fmt.Sprintf("%s %d", kind, r.made[kind]))
	}
	return fmt.Sprintf("%s; %d lost, %d excused by missing rules and %d by stalls", strings.Join(out, ", "), r.lost, r.excused, r.stalls)
}
