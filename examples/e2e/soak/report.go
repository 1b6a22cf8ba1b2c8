//go:build linux

package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"
)

// recorder collects the result of a run and writes the log. Its methods are safe for concurrent use.
type recorder struct {
	mu    sync.Mutex
	log   io.Writer
	start time.Time
	// event is the current or last event, and begun its begin.
	event  string
	begun  time.Time
	number int
	// counts counts connections by kind: tcp and udp (one request each), held (lines through
	// connections that stay open), talk (requests from sockets that stay open), and judged (between
	// two events, when everything is in effect).
	counts map[string]*count
	// outages holds the times in which losses are excused.
	outages        []*outage
	left, failures []string
}

// count counts the connections of a kind. made includes all; excused counts the failed ones by the
// reason that excuses them.
type count struct {
	made, lost int
	excused    map[string]int
}

type outage struct {
	to     time.Time // zero until the end
	reason string
}

func newRecorder(log io.Writer) *recorder {
	return &recorder{log: log, start: time.Now(), begun: time.Now(), event: "start", counts: map[string]*count{}}
}

// logf writes a line with the time.
func (r *recorder) logf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.write(fmt.Sprintf(format, args...))
}

func (r *recorder) write(line string) {
	fmt.Fprintln(r.log, time.Now().UTC().Format("15:04:05.000"), line)
}

// begin records the begin of an event.
func (r *recorder) begin(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.number++
	r.event, r.begun = fmt.Sprintf("%d %s", r.number, name), time.Now()
	r.write("event " + r.event)
}

func (r *recorder) count(kind string) *count {
	if r.counts[kind] == nil {
		r.counts[kind] = &count{excused: map[string]int{}}
	}
	r.counts[kind].made++
	return r.counts[kind]
}

// made counts a connection with the right outcome.
func (r *recorder) made(kind string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count(kind)
}

// lost counts a connection with a wrong outcome. The reason excuses it if that is not
// empty; an outage while the connection was open excuses it too.
func (r *recorder) lost(kind string, begun time.Time, reason string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.outages {
		if reason == "" && (o.to.IsZero() || o.to.After(begun)) {
			reason = o.reason
		}
	}
	c := r.count(kind)
	if reason != "" {
		c.excused[reason]++
		return
	}
	c.lost++
	r.fail(fmt.Sprintf("%s, begun %v ago: %v", kind, time.Since(begun).Round(time.Millisecond), err))
}

// failf records a failure that does not concern one connection.
func (r *recorder) failf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail(fmt.Sprintf(format, args...))
}

func (r *recorder) fail(what string) {
	text := fmt.Sprintf("FAILURE %.3f s into event %s: %s", time.Since(r.begun).Seconds(), r.event, what)
	r.failures = append(r.failures, text)
	r.write(text)
}

// outage begins a time in which losses are excused. end ends it.
func (r *recorder) outage(reason string) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := &outage{reason: reason}
	r.outages = append(r.outages, o)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		o.to = time.Now()
	}
}

// leftover records what is left over.
func (r *recorder) leftover(what []string) {
	for _, w := range what {
		r.left = append(r.left, "LEFT OVER: "+w)
		r.logf("LEFT OVER: %s", w)
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
			r.fail(fmt.Sprintf("%s: %d of %d were excused %s: the machine is too busy, or connections are lost", kind, n, c.made, stalled))
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
