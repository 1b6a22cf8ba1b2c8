//go:build linux

package main

import (
	"fmt"
	"io"
	"strings"
)

// Report is the JSON output. Fields may be added, but none is renamed or removed.
type Report struct {
	// Date is when the measurement began, in RFC 3339.
	Date string `json:"date"`
	// Kernel is the kernel's release, CPUs the number of CPUs, which the API server,
	// etcd, the clients and the proxy share.
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	// Runs are in the order in which they were made.
	Runs []Run `json:"runs"`
}

// Run is one proxy in one mode with one number of Services.
type Run struct {
	// Proxy is "nodeproxy" or "kube-proxy", Version what it prints for --version, if
	// anything.
	Proxy   string `json:"proxy"`
	Version string `json:"version,omitempty"`
	// Mode is "nftables" or "iptables".
	Mode string `json:"mode"`
	// Services is the number of Services, Endpoints that of each Service's endpoints.
	Services  int `json:"services"`
	Endpoints int `json:"endpoints"`

	Start       Start       `json:"start"`
	Change      Latency     `json:"change"`
	Resize      Latency     `json:"resize"`
	Burst       Burst       `json:"burst"`
	Connections Connections `json:"connections"`
	Idle        Idle        `json:"idle"`
	// Failed is the error that ended the run early: what follows it was not measured.
	Failed string `json:"failed,omitempty"`
}

// Usage is what a phase took of the machine.
type Usage struct {
	// CPUSeconds is CPU time, user and system, that of ended child processes included.
	CPUSeconds float64 `json:"cpuSeconds"`
	// PeakMiB is the largest resident set of the proxy's process in the phase, without
	// its children and without what the kernel holds for it.
	PeakMiB float64 `json:"peakMiB"`
}

// Start is from the start of the process until every Service answers.
type Start struct {
	// Seconds is until each of 64 Services, spread evenly with the first and the last among
	// them, has answered a connection. Afterwards all Services must answer at once, or this
	// is the time until they did.
	Seconds float64 `json:"seconds"`
	Usage
}

// Latency is how long changes took, made one by one: from the API server's answer to
// the update of an EndpointSlice to the first connection that an endpoint of the update
// answers. Each update of Change replaces all endpoints of a Service by as many others.
// Each update of Resize leaves a Service with a number of endpoints that no Service has
// had since the start.
type Latency struct {
	Count int     `json:"count"`
	P50ms float64 `json:"p50Ms"`
	P99ms float64 `json:"p99Ms"`
	MaxMs float64 `json:"maxMs"`
	Usage
}

// Burst is many changes, each of the endpoints of one Service, at a given rate.
type Burst struct {
	Changes int `json:"changes"`
	// PerSecond is the rate that was reached: the API server limits it.
	PerSecond float64 `json:"perSecond"`
	// Seconds is from the first update until all are in effect.
	Seconds float64 `json:"seconds"`
	// The latencies are those of 50 changes, spread evenly.
	P50ms float64 `json:"p50Ms"`
	P99ms float64 `json:"p99Ms"`
	MaxMs float64 `json:"maxMs"`
	// Core is the proxy's CPU time as a part of the time of the updates: 1 is one core.
	Core float64 `json:"core"`
	Usage
}

// Connections is TCP connections a second that two clients make one after another: each
// connects, reads four bytes and resets the connection.
type Connections struct {
	// PerSecond is through the last Service, and DirectPerSecond to one of its endpoints.
	PerSecond       float64 `json:"perSecond"`
	DirectPerSecond float64 `json:"directPerSecond"`
}

// Idle is a time without changes.
type Idle struct {
	Seconds float64 `json:"seconds"`
	// WakeupsPerSecond is how often a thread of the proxy's process began to wait for
	// something, per second: its voluntary context switches.
	WakeupsPerSecond float64 `json:"wakeupsPerSecond"`
	// Programs reports that the proxy ran other programs.
	Programs bool `json:"programs"`
	Usage
}

// Markdown writes the runs as a table, sorted by mode and number of Services.
func (r *Report) Markdown(w io.Writer) error {
	var b strings.Builder
	b.WriteString("| Mode | Services | Proxy | Start | Change p50 / p99 | New size p50 / max | Burst: rate, max wait, core | Peak memory | CPU: start / burst | Idle: CPU a minute, wake-ups/s | Connections/s (direct) |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, run := range r.Runs {
		peak := max(run.Start.PeakMiB, run.Change.PeakMiB, run.Burst.PeakMiB, run.Idle.PeakMiB)
		idle := "–"
		if run.Idle.Seconds > 0 {
			programs := ""
			if run.Idle.Programs {
				programs = ", runs programs"
			}
			idle = fmt.Sprintf("%.0f ms, %.1f%s", run.Idle.CPUSeconds*1000/run.Idle.Seconds*60, run.Idle.WakeupsPerSecond, programs)
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %.2f s | %s / %s | %s / %s | %.0f/s, %s, %.0f %% | %.0f MiB | %.2f s / %.2f s | %s | %.0f (%.0f) |",
			run.Mode, run.Services, run.Proxy, run.Start.Seconds,
			milliseconds(run.Change.P50ms), milliseconds(run.Change.P99ms), milliseconds(run.Resize.P50ms), milliseconds(run.Resize.MaxMs),
			run.Burst.PerSecond, milliseconds(run.Burst.MaxMs), 100*run.Burst.Core,
			peak, run.Start.CPUSeconds, run.Burst.CPUSeconds, idle, run.Connections.PerSecond, run.Connections.DirectPerSecond)
		if run.Failed != "" {
			fmt.Fprintf(&b, " failed: %s |", run.Failed)
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func milliseconds(ms float64) string {
	if ms < 10 {
		return fmt.Sprintf("%.1f ms", ms)
	}
	return fmt.Sprintf("%.0f ms", ms)
}
