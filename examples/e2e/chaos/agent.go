//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/examples/internal/process"
)

const (
	healthzAddr = "127.0.0.1:10256"
	// metricsAddr has a port that no NodePort of a world has.
	metricsAddr = "127.0.0.1:29249"
)

// prepareAgent prepares a folder and the command of the world's agents.
func (w *world) prepareAgent() error {
	w.tmp, w.log = filepath.Join(w.dir, "tmp"), filepath.Join(w.dir, "log")
	w.command = []string{"sh", "-c", `cd "$0" && TMPDIR=$0 HOME=$0 exec "$@"`, w.tmp, w.o.nodeproxy}
	w.args = append([]string{
		"--master", "http://" + apiAddress, "--kube-api-content-type", "application/json", "--kube-api-qps", "1000", "--kube-api-burst", "1000",
		"--hostname-override", nodeName, "--cluster-cidr", clusterCIDRs, "--sync-period", "2s", "--service-traffic-metrics", "--profiling",
		"--healthz-bind-address", healthzAddr, "--metrics-bind-address", metricsAddr, "--nodeport-addresses", w.mode.nodePorts,
		// The limits of connection tracking apply to the whole machine.
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
	}, w.mode.args...)
	if err := os.Mkdir(w.tmp, 0o755); err != nil || w.mode.prepare == nil {
		return err
	}
	return w.mode.prepare(w)
}

// startAgent starts the agent. It does not wait until the agent is ready.
func (w *world) startAgent() (err error) {
	args := slices.Concat(w.command, []string{"run"}, w.args)
	w.agent, err = process.Start(w.node.Host, exec.Command(args[0], args[1:]...), w.log)
	return err
}

// restart ends the agent with a signal, calls f, and starts the agent.
func (w *world) restart(s syscall.Signal, f func()) error {
	if err := w.agent.Stop(s); err != nil {
		w.rec.failf("%v", err)
	}
	if f != nil {
		f()
	}
	w.oracle.restarted.Store(true)
	return w.startAgent()
}

// nodeproxy runs nodeproxy on the node to its end and returns its output.
func (w *world) nodeproxy(args ...string) (string, error) {
	args = slices.Concat(w.command, args)
	return w.node.Output(args[0], args[1:]...)
}

func (w *world) cleanUp() {
	if _, err := w.nodeproxy("run", "--cleanup"); err != nil {
		w.rec.failf("%v", err)
	}
}

// differences lists the addresses and ports of Services for which the kernel's rules have other endpoints than the
// objects, and the Services that the kernel alone has.
func (w *world) differences() ([]string, error) {
	out, err := w.nodeproxy(append([]string{"render", "--diff", "kernel"}, w.args...)...)
	if len(out) != 0 {
		err = nil // differences are an error, too
	}
	return strings.FieldsFunc(out, func(r rune) bool { return r == '\n' }), err
}

// get returns the answer of one of the agent's servers, such as "127.0.0.1:10256/healthz". A status
// other than 200 is an error.
func (w *world) get(page string, limit time.Duration) (string, error) {
	code, text, _ := w.node.Get(page, limit)
	if code != 200 {
		return text, fmt.Errorf("%s: status %d: %s", page, code, text)
	}
	return text, nil
}

var crash = regexp.MustCompile(`(?m)^(panic:|fatal error:|WARNING: DATA RACE).*`)

// healthy returns an error unless the agent runs, /livez reports that it is healthy, and its log shows no
// panic or data race. A connection that begins while a rule is missing may be masqueraded, and then no packet
// of it arrives for as long as connection tracking remembers it: two minutes. So a request that takes long is
// given up.
func (w *world) healthy() error {
	text, err := os.ReadFile(w.log)
	if m := crash.Find(text); m != nil {
		return fmt.Errorf("the agent's log: %s", m)
	}
	if err == nil {
		err = w.agent.Ended()
	}
	if err == nil {
		_, err = w.get(healthzAddr+"/livez", 5*time.Second)
	}
	return err
}

// allowance holds by how much the metrics of an agent may exceed those of a new one. Go's maps do not shrink, buffers are
// kept for the next change, and idle connections to the API server, with two goroutines each, for 90 seconds.
var allowance = map[string]float64{"go_memstats_heap_alloc_bytes": 12 << 20, "go_goroutines": 10, "process_open_fds": 5}

// usage returns the agent's resource usage after a garbage collection.
func (w *world) usage() (map[string]float64, error) {
	for range 3 { // a collection runs finalizers, which release more memory for the next one
		if _, err := w.get(metricsAddr+"/debug/pprof/heap?gc=1", time.Minute); err != nil {
			return nil, err
		}
	}
	text, err := w.get(metricsAddr+"/metrics", time.Minute)
	out := map[string]float64{}
	for line := range strings.Lines(text) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), " "); allowance[name] != 0 {
			out[name], _ = strconv.ParseFloat(value, 64)
		}
	}
	if err == nil && len(out) != len(allowance) {
		err = fmt.Errorf("/metrics has only %v", out)
	}
	return out, err
}

// excess lists the resources of which the process before this one used more.
func (w *world) excess(before map[string]float64) (out []string, err error) {
	now, err := w.usage()
	for name, more := range allowance {
		if before[name] > now[name]+more {
			out = append(out, fmt.Sprintf("the agent's %s: %.0f, and %.0f of a new agent", name, before[name], now[name]))
		}
	}
	return out, err
}
