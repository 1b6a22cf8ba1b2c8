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
	Mode     string `json:"mode"`
	Services int    `json:"services"`

	Start       Start       `json:"start,omitzero"`
	Change      Latency     `json:"change,omitzero"`
	Burst       Latency     `json:"burst,omitzero"`
	Connections Connections `json:"connections,omitzero"`
	// FollowedSeconds has the time of each outage of the API server, from the moment when that is ready again until
	// a change that was made then is in effect. All proxies run at the same time, with the smallest number of
	// Services.
	FollowedSeconds []float64 `json:"followedSeconds,omitempty"`
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

// Usage is the resource usage of a phase, as columns describe it.
type Usage struct {
	CPUSeconds float64 `json:"cpuSeconds"`
	PeakMiB    float64 `json:"peakMiB"`
}

// Start is the phase from the start of the process until every Service answers.
type Start struct {
	// Seconds is the time until each of 64 evenly spread Services, among them the first and
	// the last, has answered a connection. Then all Services are tried once. If one does not
	// answer immediately, Seconds is the time until all have answered.
	Seconds float64 `json:"seconds"`
	Usage
}

// Latency has the latencies of Count changes, which replace all endpoints of a Service by as many others.
type Latency struct {
	Count int     `json:"count"`
	P50ms float64 `json:"p50Ms"`
	P99ms float64 `json:"p99Ms"`
	MaxMs float64 `json:"maxMs"`
	Usage
}

// Connections has the rates of TCP connections that two clients reach together, through the last Service and to
// one of its endpoints. Each client connects, reads four bytes and resets the connection, again and again. All
// proxies with the same number of Services are measured in turn, in rounds of a fifth of a second for each rate.
type Connections struct {
	PerSecond       float64 `json:"perSecond"`
	DirectPerSecond float64 `json:"directPerSecond"`
}

// columns are those of a report's table behind the mode, the number of Services and the proxy. A value
// is "–" if it was not measured.
var columns = []struct {
	title, meaning string
	value          func(*Run) string
}{
	{"start, s", "from the start of the process until every Service answers; the median of up to five starts",
		func(r *Run) string { return fmt.Sprintf("%.2f", r.Start.Seconds) }},
	{"change, ms", "from the API server's answer to the update of an EndpointSlice until an endpoint of the update answers; the median of the changes, made one by one",
		func(r *Run) string { return short(r.Change.P50ms) }},
	{"99 %, ms", "the same, the 99 % quantile; with few changes, the longest",
		func(r *Run) string { return short(r.Change.P99ms) }},
	{"burst, ms", "the longest of 50 latencies among 1,000 changes that are sent as fast as the API server accepts them, 1,000/s at most",
		func(r *Run) string { return short(r.Burst.MaxMs) }},
	{"memory, MiB", "the largest resident set of the process, without children and without the kernel's memory",
		func(r *Run) string { return short(max(r.Start.PeakMiB, r.Change.PeakMiB, r.Burst.PeakMiB)) }},
	{"CPU, ms", "CPU time of a change, with child processes; the mean of the changes made one by one",
		func(r *Run) string { return short(r.Change.CPUSeconds * 1000 / float64(max(r.Change.Count, 1))) }},
	{"connections, %", "the rate of connections through the last Service, by the rate to the endpoint's own address",
		func(r *Run) string {
			return short(100 * r.Connections.PerSecond / max(r.Connections.DirectPerSecond, 1))
		}},
	{"outage, s", "from the return of an API server that was away for two minutes until a change is in effect, with all proxies at a time; the longest of two",
		func(r *Run) string { return short(slices.Max(append(r.FollowedSeconds, 0))) }},
}

// merge returns the runs of reports, nftables first, with few Services first. If several have the same proxy, mode
// and number of Services, the last one counts.
func merge(reports []*Report) (runs []*Run) {
	for _, r := range reports {
		for _, run := range r.Runs {
			runs = append(slices.DeleteFunc(runs, func(o *Run) bool {
				return o.title() == run.title() && o.Mode == run.Mode && o.Services == run.Services
			}), &run)
		}
	}
	slices.SortStableFunc(runs, func(a, b *Run) int {
		return cmp.Or(cmp.Compare(b.Mode, a.Mode), cmp.Compare(a.Services, b.Services))
	})
	return runs
}

// Markdown writes the runs of reports as a table, with a line about every column.
func Markdown(w io.Writer, reports ...*Report) error {
	var b strings.Builder
	b.WriteString("| mode | Services | proxy |")
	for _, c := range columns {
		b.WriteString(" " + c.title + " |")
	}
	b.WriteString("\n|---|---|---|" + strings.Repeat("---|", len(columns)) + "\n")
	for _, run := range merge(reports) {
		fmt.Fprintf(&b, "| %s | %s | %s |", run.Mode, thousands(run.Services), run.title())
		for _, c := range columns {
			b.WriteString(" " + c.value(run) + " |")
		}
		if run.Failed != "" {
			fmt.Fprintf(&b, " failed: %s |", run.Failed)
		}
		b.WriteByte('\n')
	}
	b.WriteByte('\n')
	for _, c := range columns {
		title, _, _ := strings.Cut(c.title, ",")
		fmt.Fprintf(&b, "- %s: %s.\n", title, c.meaning)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// short returns a number with two digits or those before its point, or "–" for 0.
func short(v float64) string {
	switch {
	case v == 0:
		return "–" // not measured
	case v < 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// thousands returns n with commas.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
