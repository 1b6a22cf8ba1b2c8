//go:build linux

package main

import (
	"fmt"
	"io"
	"strings"
)

// Report is the JSON output. Fields may be added, but none is renamed or removed.
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
	// Mode is "nftables" or "iptables".
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
	// answer at once, Seconds is the time until all have answered.
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
	Parts
	Usage
}

// Quantiles are quantiles of durations in milliseconds.
type Quantiles struct {
	P50ms float64 `json:"p50Ms"`
	P99ms float64 `json:"p99Ms"`
	MaxMs float64 `json:"maxMs"`
}

// Parts separates the API server's part of a latency from the proxy's. Rival watches the same
// EndpointSlices with client-go and does nothing else with them.
type Parts struct {
	// Watch is the time from the API server's answer until rival's watch receives the change,
	// which is the floor for every program that follows the API server. It is 0 if the watch
	// is before the answer, and the whole latency if the packet is before the watch.
	Watch Quantiles `json:"watch"`
	// Proxy is the rest of each latency.
	Proxy Quantiles `json:"proxy"`
}

// Burst is a phase of many changes, each of the endpoints of one Service, at a given rate.
type Burst struct {
	Changes int `json:"changes"`
	// PerSecond is the rate that was reached. The API server may limit it.
	PerSecond float64 `json:"perSecond"`
	// Seconds is the time from the first update until all are in effect.
	Seconds float64 `json:"seconds"`
	// Quantiles and Parts are the latencies of 50 evenly spread changes.
	Quantiles
	Parts
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
	// WakeupsPerSecond is the number of voluntary context switches of the proxy's process
	// per second, over all threads.
	WakeupsPerSecond float64 `json:"wakeupsPerSecond"`
	// ActivePerSecond is the number of tenths of a second, per second, in which a thread of the
	// proxy ran. When one thread of a Go program wakes up, it wakes up others several times.
	ActivePerSecond float64 `json:"activePerSecond"`
	// Programs reports that the proxy ran other programs.
	Programs bool `json:"programs"`
	Usage
}

// Markdown writes the runs as a table, sorted by mode and number of Services.
func (r *Report) Markdown(w io.Writer) error {
	var b strings.Builder
	b.WriteString("| Mode | Services | Proxy | Start | Change p50 / p99 (bare watch) | New size p50 / max | Burst: rate, max wait (bare watch), core | Peak memory | CPU: start / burst | Idle: CPU a minute, thread switches/s, active tenths/s | Connections/s (of direct) | Stolen CPU: changes / burst |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, run := range r.Runs {
		peak := max(run.Start.PeakMiB, run.Change.PeakMiB, run.Burst.PeakMiB, run.Idle.PeakMiB)
		idle := "–"
		if run.Idle.Seconds > 0 {
			programs := ""
			if run.Idle.Programs {
				programs = ", runs programs"
			}
			active := "–" // measured with an earlier rival
			if run.Idle.ActivePerSecond > 0 || run.Connections.Rounds > 0 {
				active = fmt.Sprintf("%.2f", run.Idle.ActivePerSecond)
			}
			idle = fmt.Sprintf("%.0f ms, %.1f, %s%s", run.Idle.CPUSeconds*1000/run.Idle.Seconds*60, run.Idle.WakeupsPerSecond, active, programs)
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %.2f s | %s / %s%s | %s / %s | %.0f/s, %s%s, %.0f %% | %.0f MiB | %.2f s / %.2f s | %s | %.0f (%s) | %s |",
			run.Mode, run.Services, run.title(), run.Start.Seconds,
			milliseconds(run.Change.P50ms), milliseconds(run.Change.P99ms), floor(run.Change.Watch.P99ms, run.Change.Parts), milliseconds(run.Resize.P50ms), milliseconds(run.Resize.MaxMs),
			run.Burst.PerSecond, milliseconds(run.Burst.MaxMs), floor(run.Burst.Watch.MaxMs, run.Burst.Parts), 100*run.Burst.Core,
			peak, run.Start.CPUSeconds, run.Burst.CPUSeconds, idle, run.Connections.PerSecond, run.Connections.share(),
			run.stolen())
		if run.Failed != "" {
			fmt.Fprintf(&b, " failed: %s |", run.Failed)
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// stolen formats the stolen CPU time of the phases that measure latencies.
func (r *Run) stolen() string {
	if r.Change.Parts == (Parts{}) {
		return "–" // measured with an earlier rival
	}
	return fmt.Sprintf("%.1f %% / %.1f %%", 100*r.Change.Stolen, 100*r.Burst.Stolen)
}

// share formats the share of the rate without a proxy.
func (c Connections) share() string {
	if c.Rounds == 0 {
		return fmt.Sprintf("%.0f %%", 100*c.PerSecond/max(c.DirectPerSecond, 1)) // measured with an earlier rival
	}
	return fmt.Sprintf("%.1f ± %.1f %%", 100*c.Share, 100*c.ShareError)
}

// floor formats the watch's part of a latency, if it was measured.
func floor(ms float64, p Parts) string {
	if p == (Parts{}) {
		return "" // measured with an earlier rival
	}
	return " (" + milliseconds(ms) + ")"
}

func milliseconds(ms float64) string {
	if ms < 10 {
		return fmt.Sprintf("%.1f ms", ms)
	}
	return fmt.Sprintf("%.0f ms", ms)
}
