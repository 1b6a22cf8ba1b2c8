//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"text/tabwriter"
	"time"
)

// Report is the result of a run, as JSON.
type Report struct {
	Mode, Source string
	Services     int
	Endpoints    int
	Seed         uint64
	Begun        time.Time
	Seconds      float64
	// Connections counts connections by kind: tcp and udp (one request each), held (lines
	// through connections that stay open), talk (requests from sockets that stay open),
	// judged (between two events, when everything is in effect).
	Connections map[string]*Count
	// Stalls is the number of the machine's stalls, and StallSeconds their total length.
	Stalls       int
	StallSeconds float64
	Events       map[string]*Event
	// Leftovers describes what was left over at the end.
	Leftovers []string
	// Usage holds the agent's resource usage at four times: without Services, after a cold
	// start with all Services, at the end with the same Services, and at the end without
	// Services.
	Usage map[string]Usage
	// Failures holds the first failures. Lost is the number of all.
	Failures []Failure
	Lost     int
}

// Count counts the connections of a kind.
type Count struct {
	Made, Lost int
	// Excused counts failed connections by the reason that excuses them. Made includes them.
	Excused map[string]int `json:",omitempty"`
}

// Event describes all events of a kind.
type Event struct {
	Times int
	// Milliseconds holds for each event the time from the last commit, or from the other
	// program's action, until the change was in effect or the rules were repaired.
	Milliseconds []float64
}

// Usage is the agent's resource usage. HeapBytes is the heap in use after a collection.
type Usage struct {
	HeapBytes, RSSBytes       int
	Files, Sockets, Goroutine int
	// Objects holds the sizes of the kernel's objects.
	Objects map[string]int `json:",omitempty"`
}

// Failure is a loss without an excuse, or an error of the agent.
type Failure struct {
	At time.Time
	// Event is the current or last event, and After the time since its begin in seconds.
	Event string
	After float64
	What  string
}

// maxFailures is the most failures that a report holds.
const maxFailures = 200

// recorder collects the Report and writes the log. It is safe for concurrent use.
type recorder struct {
	mu     sync.Mutex
	r      Report
	log    io.Writer
	event  string
	begun  time.Time
	events int
	// outages holds the times in which losses are excused.
	outages []outage
}

type outage struct {
	from, to time.Time // to is zero until the end
	reason   string
}

func newRecorder(log io.Writer) *recorder {
	return &recorder{log: log, event: "start", r: Report{
		Begun: time.Now(), Connections: map[string]*Count{}, Events: map[string]*Event{}, Usage: map[string]Usage{},
	}}
}

// logf writes a line with the time.
func (r *recorder) logf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.write(format, args...)
}

func (r *recorder) write(format string, args ...any) {
	fmt.Fprintf(r.log, "%s %s\n", time.Now().UTC().Format("15:04:05.000"), fmt.Sprintf(format, args...))
}

// begin records the begin of an event.
func (r *recorder) begin(name, detail string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events++
	r.event, r.begun = fmt.Sprintf("%d %s", r.events, name), time.Now()
	r.write("event %s: %s", r.event, detail)
}

// end records the end of an event, and how long after its last change all was in effect.
func (r *recorder) end(name string, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.r.Events[name]
	if e == nil {
		e = &Event{}
		r.r.Events[name] = e
	}
	e.Times++
	e.Milliseconds = append(e.Milliseconds, float64(took.Microseconds())/1000)
	r.write("in effect after %v", took.Round(time.Millisecond))
}

func (r *recorder) count(kind string) *Count {
	c := r.r.Connections[kind]
	if c == nil {
		c = &Count{Excused: map[string]int{}}
		r.r.Connections[kind] = c
	}
	return c
}

// made counts a connection with the right outcome.
func (r *recorder) made(kind string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count(kind).Made++
}

// lost counts a connection with a wrong outcome. The reason excuses it if that is not
// empty; an outage while the connection was open excuses it too. lost reports whether
// nothing excuses it.
func (r *recorder) lost(kind string, begun time.Time, reason string, err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.outages {
		if reason == "" && (o.to.IsZero() || o.to.After(begun)) {
			reason = o.reason
		}
	}
	c := r.count(kind)
	c.Made++
	if reason != "" {
		c.Excused[reason]++
		return false
	}
	c.Lost++
	r.fail("%s, begun %v ago: %v", kind, time.Since(begun).Round(time.Millisecond), err)
	return true
}

// excusedPercent is the largest percentage of a kind's connections that stalls may excuse,
// and freeExcuses a number that they may excuse in any case. With more, the machine is too
// busy to distinguish an agent that loses connections from one that does not.
const excusedPercent, freeExcuses = 1, 20

// limitExcuses records a failure for each kind with too many excused connections.
func (r *recorder) limitExcuses() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for kind, c := range r.r.Connections {
		if n := c.Excused[stalled]; n > max(freeExcuses, c.Made*excusedPercent/100) {
			r.fail("%s: %d of %d were excused %s: the machine is too busy, or connections are lost", kind, n, c.Made, stalled)
		}
	}
}

// failf records a failure that does not concern one connection.
func (r *recorder) failf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail(format, args...)
}

func (r *recorder) fail(format string, args ...any) {
	f := Failure{At: time.Now(), Event: r.event, After: time.Since(r.begun).Seconds(), What: fmt.Sprintf(format, args...)}
	r.r.Lost++
	if len(r.r.Failures) < maxFailures {
		r.r.Failures = append(r.r.Failures, f)
	}
	r.write("FAILURE %.3f s into event %s: %s", f.After, f.Event, f.What)
}

// outage begins a time in which losses are excused. end ends it.
func (r *recorder) outage(reason string) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.outages = append(r.outages, outage{from: time.Now(), reason: reason})
	i := len(r.outages) - 1
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.outages[i].to = time.Now()
	}
}

// leftover records something that is left over.
func (r *recorder) leftover(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := fmt.Sprintf(format, args...)
	r.r.Leftovers = append(r.r.Leftovers, text)
	r.write("LEFT OVER: %s", text)
}

func (r *recorder) usage(when string, u Usage) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.r.Usage[when] = u
	r.write("usage %s: %+v", when, u)
}

// progress returns a line that sums up the run so far.
func (r *recorder) progress() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	made, lost, excused := 0, 0, 0
	for _, c := range r.r.Connections {
		made, lost = made+c.Made, lost+c.Lost
		for _, n := range c.Excused {
			excused += n
		}
	}
	return fmt.Sprintf("%v: %d events, %d connections and requests, %d excused, %d lost, %d failures; event %s",
		time.Since(r.r.Begun).Round(time.Second), r.events, made, excused, lost, r.r.Lost, r.event)
}

// ok reports whether nothing was lost and nothing is left over.
func (r *Report) ok() bool { return r.Lost == 0 && len(r.Leftovers) == 0 }

// writeJSON writes the report to a file.
func (r *Report) writeJSON(file string) error {
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// table writes the report as text.
func (r *Report) table(out io.Writer) {
	fmt.Fprintf(out, "\nmode %s, %d Services of %d endpoints, objects from %s, seed %d, %v\n\n",
		r.Mode, r.Services, r.Endpoints, r.Source, r.Seed, time.Duration(r.Seconds*float64(time.Second)).Round(time.Second))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "event\ttimes\tin effect after: p50\tp99\tmost, ms\t")
	for _, name := range slices.Sorted(maps.Keys(r.Events)) {
		e := r.Events[name]
		ms := slices.Sorted(slices.Values(e.Milliseconds))
		at := func(q float64) float64 { return ms[min(len(ms)-1, int(q*float64(len(ms))))] }
		fmt.Fprintf(w, "%s\t%d\t%.0f\t%.0f\t%.0f\t\n", name, e.Times, at(.5), at(.99), ms[len(ms)-1])
	}
	w.Flush()
	fmt.Fprintln(out)
	fmt.Fprintln(w, "connections\tmade\tlost\texcused\t")
	for _, kind := range slices.Sorted(maps.Keys(r.Connections)) {
		c := r.Connections[kind]
		why := ""
		for _, reason := range slices.Sorted(maps.Keys(c.Excused)) {
			why += fmt.Sprintf("%d %s; ", c.Excused[reason], reason)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t\n", kind, c.Made, c.Lost, why)
	}
	w.Flush()
	fmt.Fprintf(out, "\nThe machine stalled %d times, %.1f s in all.\n\n", r.Stalls, r.StallSeconds)
	fmt.Fprintln(w, "the agent\theap, MB\tresident, MB\tfiles\tsockets\tgoroutines\t")
	for _, when := range usageTimes {
		if u, ok := r.Usage[when]; ok {
			fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%d\t%d\t%d\t\n", when, float64(u.HeapBytes)/1e6, float64(u.RSSBytes)/1e6, u.Files, u.Sockets, u.Goroutine)
		}
	}
	w.Flush()
	fmt.Fprintln(out)
	for _, l := range r.Leftovers {
		fmt.Fprintln(out, "LEFT OVER:", l)
	}
	for i, f := range r.Failures {
		if i == 10 {
			fmt.Fprintf(out, "... and %d more\n", r.Lost-i)
			break
		}
		fmt.Fprintf(out, "FAILURE at %s, %.3f s into event %s: %s\n", f.At.UTC().Format("15:04:05.000"), f.After, f.Event, f.What)
	}
	if r.ok() {
		fmt.Fprintln(out, "Nothing was lost without an excuse, and nothing is left over.")
	} else {
		fmt.Fprintf(out, "%d failures, %d left over.\n", r.Lost, len(r.Leftovers))
	}
}
