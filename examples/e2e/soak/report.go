//go:build linux

package main

import (
	"fmt"
	"io"
	"log"
	"maps"
	"slices"
	"sync"
	"time"
)

// recorder collects the result of a run and writes the log. Its methods are safe for concurrent use.
type recorder struct {
	log   *log.Logger
	start time.Time

	mu sync.Mutex
	// event is the current or last event, and begun its begin.
	event  string
	begun  time.Time
	number int
	// counts counts connections by kind: tcp and udp (one request each), held (lines through
	// connections that stay open), talk (requests from sockets that stay open), and judged (between
	// two events, when everything is in effect).
	counts map[string]*count
	// outage is the reason that excuses losses, and outageEnd when the last such time ended, zero
	// until then.
	outage         string
	outageEnd      time.Time
	left, failures []string
}

// count counts the connections of a kind. made includes all; excused counts the failed ones by the
// reason that excuses them.
type count struct {
	made, lost int
	excused    map[string]int
}

func newRecorder(out io.Writer) *recorder {
	return &recorder{log: log.New(out, "", log.Ltime|log.Lmicroseconds|log.LUTC), start: time.Now(), begun: time.Now(), event: "start", counts: map[string]*count{}}
}

// begin records the begin of an event. If it is an outage, losses are excused until over is called.
func (r *recorder) begin(name string, outage bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.number++
	r.event, r.begun = fmt.Sprintf("%d %s", r.number, name), time.Now()
	if outage {
		r.outage, r.outageEnd = "while rules were missing: "+name, time.Time{}
	}
	r.log.Print("event ", r.event)
}

// over ends an outage.
func (r *recorder) over() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.outageEnd.IsZero() {
		r.outageEnd = time.Now()
	}
}

// result counts a connection, with an error if its outcome was wrong. The reason excuses that if it is
// not empty; an outage while the connection was open excuses it too.
func (r *recorder) result(kind string, begun time.Time, reason string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts[kind] == nil {
		r.counts[kind] = &count{excused: map[string]int{}}
	}
	c := r.counts[kind]
	c.made++
	if err == nil {
		return
	}
	if reason == "" && (r.outageEnd.IsZero() || r.outageEnd.After(begun)) {
		reason = r.outage
	}
	if reason != "" {
		c.excused[reason]++
		return
	}
	c.lost++
	r.fail("%s, begun %v ago: %v", kind, time.Since(begun).Round(time.Millisecond), err)
}

// failf records a failure that does not concern one connection.
func (r *recorder) failf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail(format, args...)
}

func (r *recorder) fail(format string, args ...any) {
	text := fmt.Sprintf("FAILURE %.3f s into event %s: ", time.Since(r.begun).Seconds(), r.event) + fmt.Sprintf(format, args...)
	r.failures = append(r.failures, text)
	r.log.Print(text)
}

// leftover records what is left over.
func (r *recorder) leftover(what []string) {
	for _, w := range what {
		r.left = append(r.left, "LEFT OVER: "+w)
		r.log.Print("LEFT OVER: ", w)
	}
}

// excusedPercent is the largest percentage of a kind's connections that stalls may excuse,
// and freeExcuses a number that they may excuse in any case. With more, the machine is too
// busy to distinguish an agent that loses connections from one that does not.
const excusedPercent, freeExcuses = 1, 20

// limitExcuses records a failure for each kind with too many excused connections.
func (r *recorder) limitExcuses() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for kind, c := range r.counts {
		if n := c.excused[stalled]; n > max(freeExcuses, c.made*excusedPercent/100) {
			r.fail("%s: %d of %d were excused %s: the machine is too busy, or connections are lost", kind, n, c.made, stalled)
		}
	}
}

// progress returns a line that sums up the run so far.
func (r *recorder) progress() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	made := 0
	for _, c := range r.counts {
		made += c.made
	}
	return fmt.Sprintf("%v: %d connections and requests, %d failures; event %s", time.Since(r.start).Round(time.Second), made, len(r.failures), r.event)
}

// ok reports whether nothing was lost and nothing is left over.
func (r *recorder) ok() bool { return len(r.failures) == 0 && len(r.left) == 0 }

// printed is the largest number of failures, and of leftovers, that table writes.
const printed = 10

// table writes the result. The run must have ended.
func (r *recorder) table(out io.Writer) {
	for _, kind := range slices.Sorted(maps.Keys(r.counts)) {
		c := r.counts[kind]
		fmt.Fprintf(out, "%-8s%7d made, %d lost", kind, c.made, c.lost)
		for _, reason := range slices.Sorted(maps.Keys(c.excused)) {
			fmt.Fprintf(out, "; %d excused: %s", c.excused[reason], reason)
		}
		fmt.Fprintln(out)
	}
	for _, line := range slices.Concat(r.left[:min(len(r.left), printed)], r.failures[:min(len(r.failures), printed)]) {
		fmt.Fprintln(out, line)
	}
	fmt.Fprintf(out, "%d events, %d failures, %d left over\n", r.number, len(r.failures), len(r.left))
}
