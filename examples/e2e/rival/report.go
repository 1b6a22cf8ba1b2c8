//go:build linux

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Report is the JSON output. The JSON of earlier runs has more.
type Report struct {
	// Date is the begin of the measurement, in RFC 3339.
	Date string `json:"date"`
	// Kernel is the kernel's release. CPUs is the number of CPUs, which the API server,
	// etcd, the clients and the proxy share.
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	// Runs are in the order in which they were made.
	Runs []Run `json:"runs"`
	// Outages is nil if it was not measured.
	Outages *Outages `json:"outages,omitempty"`
}

// Run is one proxy in one mode with one number of Services.
type Run struct {
	// Proxy is "nodeproxy" or "kube-proxy". Version is its output for --version.
	Proxy   string `json:"proxy"`
	Version string `json:"version,omitempty"`
	// MinSyncPeriod is kube-proxy's least time between two syncs, as its configuration names
	// it. It is empty for a proxy with its default: 1 s for kube-proxy, none for nodeproxy.
	MinSyncPeriod string `json:"minSyncPeriod,omitempty"`
	// Mode is "nftables", "iptables" or "ipvs".
	Mode string `json:"mode"`
	// Services is the number of Services. Endpoints is the number of each Service's
	// endpoints.
	Services  int `json:"services"`
	Endpoints int `json:"endpoints"`

	Start       Start       `json:"start"`
	Change      Latency     `json:"change"`
	Resize      Latency     `json:"resize"`
	Burst       Burst       `json:"burst"`
	Connections Connections `json:"connections"`
	Idle        Idle        `json:"idle"`
	// Failed is the error that ended the run early. Later phases were not measured.
	Failed string `json:"failed,omitempty"`
}

// title names the proxy and its settings.
func (r *Run) title() string {
	if r.MinSyncPeriod == "" {
		return r.Proxy
	}
	return r.Proxy + " (" + r.MinSyncPeriod + ")"
}

// Usage is the resource usage of a phase.
type Usage struct {
	// CPUSeconds is CPU time, user and system, including ended child processes.
	CPUSeconds float64 `json:"cpuSeconds"`
	// PeakMiB is the largest resident set of the proxy's process in the phase, without
	// child processes and without the kernel's memory.
	PeakMiB float64 `json:"peakMiB"`
	// Stolen is the share of the machine's CPU time that the hypervisor gave to other guests
	// while this machine had work. Latencies of milliseconds are only comparable if it is
	// small: a change runs through rival, the API server, etcd and the proxy.
	Stolen float64 `json:"stolen"`
}

// Start is the phase from the start of the process until every Service answers. The proxy
// starts Count times, on a new node each time; the median start counts.
type Start struct {
	// Seconds is the time until each of 64 evenly spread Services, among them the first and
	// the last, has answered a connection. Then all Services are tried once. If one does not
	// answer immediately, Seconds is the time until all have answered.
	Seconds float64 `json:"seconds"`
	// MinSeconds and MaxSeconds are the times of the shortest and of the longest start.
	Count      int     `json:"count"`
	MinSeconds float64 `json:"minSeconds"`
	MaxSeconds float64 `json:"maxSeconds"`
	Usage
}

// Latency is the latency of changes made one by one: from the API server's answer to the
// update of an EndpointSlice until an endpoint of the update answers a connection. Each
// update of Change replaces all endpoints of a Service by as many others.
// Each update of Resize leaves a Service with a number of endpoints that no Service has
// had since the start.
type Latency struct {
	Count int `json:"count"`
	Quantiles
	Usage
}

// Quantiles are quantiles of durations in milliseconds.
type Quantiles struct {
	P50ms float64 `json:"p50Ms"`
	P99ms float64 `json:"p99Ms"`
	MaxMs float64 `json:"maxMs"`
}

// Burst is a phase of many changes, each of the endpoints of one Service, at a given rate.
type Burst struct {
	Changes int `json:"changes"`
	// PerSecond is the rate that was reached. The API server may limit it.
	PerSecond float64 `json:"perSecond"`
	// Seconds is the time from the first update until all are in effect.
	Seconds float64 `json:"seconds"`
	// Quantiles are the latencies of 50 evenly spread changes.
	Quantiles
	// Core is the proxy's CPU time divided by the duration of the updates. 1 is one core.
	Core float64 `json:"core"`
	Usage
}

// Connections is the number of TCP connections per second that two clients reach together.
// Each client makes one connection after another: it connects, reads four bytes and resets
// the connection. All proxies with the same number of Services are measured in turn, in rounds of
// a fifth of a second through the last Service and another directly. The rates are means.
type Connections struct {
	// Rounds is 0 in the JSON of an earlier rival, which measured each rate once.
	Rounds int `json:"rounds,omitempty"`
	// PerSecond is the rate through the last Service, and DirectPerSecond the rate to one of
	// its endpoints. Share is their quotient, and ShareError its standard error.
	PerSecond       float64 `json:"perSecond"`
	DirectPerSecond float64 `json:"directPerSecond"`
	Share           float64 `json:"share,omitempty"`
	ShareError      float64 `json:"shareError,omitempty"`
}

// Idle is a phase without changes, 30 seconds after a start.
type Idle struct {
	Seconds float64 `json:"seconds"`
	Usage
}

// column is a column of the table behind the mode, the number of Services and the proxy.
type column struct {
	title, meaning string
	value          func(*Run) string // "–" if it was not measured
}

// columns are those of a report's table.
var columns = []column{
	{"start, s", "from the start of the process until every Service answers; the median of up to five starts",
		func(r *Run) string { return fmt.Sprintf("%.2f", r.Start.Seconds) }},
	{"change, ms", "from the API server's answer to the update of an EndpointSlice until an endpoint of the update answers; the median of the changes, made one by one",
		func(r *Run) string { return milliseconds(r.Change.P50ms) }},
	{"99 %, ms", "the same, the 99 % quantile; with few changes, the longest",
		func(r *Run) string { return milliseconds(r.Change.P99ms) }},
	{"burst, ms", "the longest of 50 latencies among 1,000 changes that are sent as fast as the API server accepts them, 1,000/s at most",
		func(r *Run) string { return milliseconds(r.Burst.MaxMs) }},
	{"memory, MiB", "the largest resident set of the process, without children and without the kernel's memory",
		func(r *Run) string {
			return fmt.Sprintf("%.0f", max(r.Start.PeakMiB, r.Change.PeakMiB, r.Burst.PeakMiB, r.Idle.PeakMiB))
		}},
	{"CPU, ms", "CPU time of a change, with child processes; the mean of the changes made one by one",
		func(r *Run) string { return milliseconds(r.Change.CPUSeconds * 1000 / float64(max(r.Change.Count, 1))) }},
	{"connections, %", "the rate of connections through the last Service, by the rate to the endpoint's own address",
		func(r *Run) string { return r.Connections.share() }},
}

// Markdown writes the runs of reports as a table, with a line about every column, and the
// last outages. If several runs have the same proxy, mode and number of Services, the last one
// counts.
func Markdown(w io.Writer, reports ...*Report) error {
	var runs []*Run
	var outages *Outages
	for _, r := range reports {
		outages = cmp.Or(r.Outages, outages)
		for i := range r.Runs {
			run := &r.Runs[i]
			same := func(o *Run) bool {
				return o.title() == run.title() && o.Mode == run.Mode && o.Services == run.Services
			}
			if at := slices.IndexFunc(runs, same); at >= 0 {
				runs[at] = run
			} else {
				runs = append(runs, run)
			}
		}
	}
	slices.SortStableFunc(runs, func(a, b *Run) int {
		return cmp.Or(cmp.Compare(b.Mode, a.Mode), cmp.Compare(a.Services, b.Services)) // nftables first
	})
	if len(runs) == 0 && outages != nil {
		return outages.markdown(w)
	}
	// Columns that no run measured are left out.
	table := slices.DeleteFunc(slices.Clone(columns), func(c column) bool {
		return !slices.ContainsFunc(runs, func(r *Run) bool { return c.value(r) != "–" })
	})
	var b strings.Builder
	b.WriteString("| mode | Services | proxy |")
	for _, c := range table {
		b.WriteString(" " + c.title + " |")
	}
	b.WriteString("\n|---|---|---|" + strings.Repeat("---|", len(table)) + "\n")
	for _, run := range runs {
		fmt.Fprintf(&b, "| %s | %s | %s |", run.Mode, thousands(run.Services), run.title())
		for _, c := range table {
			b.WriteString(" " + c.value(run) + " |")
		}
		if run.Failed != "" {
			fmt.Fprintf(&b, " failed: %s |", run.Failed)
		}
		b.WriteByte('\n')
	}
	b.WriteByte('\n')
	for _, c := range table {
		title, _, _ := strings.Cut(c.title, ",")
		fmt.Fprintf(&b, "- %s: %s.\n", title, c.meaning)
	}
	if _, err := io.WriteString(w, b.String()); err != nil || outages == nil {
		return err
	}
	return outages.markdown(w)
}

// share formats the share of the rate without a proxy.
func (c Connections) share() string {
	if c.DirectPerSecond == 0 {
		return "–" // not measured
	}
	if c.Rounds == 0 {
		return fmt.Sprintf("%.0f", 100*c.PerSecond/max(c.DirectPerSecond, 1)) // measured with an earlier rival
	}
	return fmt.Sprintf("%.1f", 100*c.Share)
}

func milliseconds(ms float64) string {
	switch {
	case ms == 0:
		return "–" // not measured
	case ms < 10:
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

// thousands returns n with commas.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
