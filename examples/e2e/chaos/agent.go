//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/go-proxier/proxier/examples/internal/process"
)

const (
	healthzAddr = "127.0.0.1:10256"
	// metricsAddr has a port that no NodePort of a world has.
	metricsAddr = "127.0.0.1:29249"
)

// agent runs one process nodeproxy after another on a node. Its methods must not be called
// concurrently.
type agent struct {
	// Process is the last one that was started, nil before the first start.
	*process.Process
	node *node
	env  environment
	bin  string
	args []string
	// dir is the folder for its files and for temporary ones, which must be empty after a clean-up.
	dir string
	// log is the file to which the output of all processes is appended.
	log string
}

// newAgent returns an agent that is not started. Its files are in the folder dir.
func newAgent(bin string, n *node, m *mode, e environment, dir string) (*agent, error) {
	config, own := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "tmp")
	if err := os.WriteFile(config, []byte(kubeconfig), 0o644); err != nil {
		return nil, err
	}
	args := []string{
		"--kubeconfig", config, "--kube-api-content-type", "application/json", "--kube-api-qps", "1000", "--kube-api-burst", "1000",
		"--hostname-override", nodeName, "--cluster-cidr", clusterCIDRs, "--sync-period", "2s", "--service-traffic-metrics", "--profiling",
		"--healthz-bind-address", healthzAddr, "--metrics-bind-address", metricsAddr, "--nodeport-addresses", m.nodePorts,
		// The limits of connection tracking apply to the whole machine.
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
	}
	a := &agent{node: n, env: e, bin: bin, args: append(append(args, m.args...), e.args...), dir: own, log: filepath.Join(dir, "log")}
	return a, os.Mkdir(own, 0o755)
}

// command returns the command that runs nodeproxy.
func (a *agent) command(args ...string) *exec.Cmd {
	c := exec.Command(a.bin, args...)
	if a.env.wrap != nil {
		c = a.env.wrap(c)
	}
	c.Dir, c.Env = a.dir, append(os.Environ(), "TMPDIR="+a.dir, "HOME="+a.dir)
	if a.env.path != "" {
		c.Env = append(c.Env, "PATH="+a.env.path+":"+os.Getenv("PATH"))
	}
	return c
}

// start starts the agent. It does not wait until the agent is ready.
func (a *agent) start() (err error) {
	a.Process, err = process.Start(a.node.Host, a.command(append([]string{"run"}, a.args...)...), a.log)
	return err
}

// output runs nodeproxy on the node to its end.
func (a *agent) output(args ...string) ([]byte, error) {
	var out, diag bytes.Buffer
	cmd := a.command(args...)
	cmd.Stdout, cmd.Stderr = &out, &diag
	err := a.node.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(args[:2], " "), err, diag.Bytes())
	}
	return out.Bytes(), err
}

func (a *agent) cleanUp() error {
	_, err := a.output("run", "--cleanup")
	return err
}

// differences lists the addresses and ports of Services for which the kernel's rules have other endpoints than the
// objects, and the Services that the kernel alone has.
func (a *agent) differences() ([]string, error) {
	out, err := a.output(append([]string{"render", "--diff", "kernel"}, a.args...)...)
	if len(out) != 0 {
		err = nil // differences are an error, too
	}
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == '\n' }), err
}

// get returns the answer of one of the agent's servers, such as "127.0.0.1:10256/healthz". A status
// other than 200 is an error.
func (a *agent) get(page string, limit time.Duration) (string, error) {
	code, text, _ := a.node.Get(page, limit)
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
func (a *agent) healthy() error {
	text, err := os.ReadFile(a.log)
	if m := crash.Find(text); m != nil {
		return fmt.Errorf("the agent's log: %s", m)
	}
	if err == nil {
		err = a.Ended()
	}
	if err == nil {
		_, err = a.get(healthzAddr+"/livez", 5*time.Second)
	}
	return err
}

// allowance holds by how much the metrics of an agent may exceed those of a new one. Go's maps do not shrink, buffers are
// kept for the next change, and idle connections to the API server, with two goroutines each, for 90 seconds.
var allowance = map[string]float64{"go_memstats_heap_alloc_bytes": 12 << 20, "go_goroutines": 10, "process_open_fds": 5}

// usageMetric matches the metrics of the agent's resource usage.
var usageMetric = regexp.MustCompile(`(?m)^(go_memstats_heap_alloc_bytes|go_goroutines|process_open_fds) (\S+)$`)

// usage returns the agent's resource usage after a garbage collection.
func (a *agent) usage() (map[string]float64, error) {
	for range 3 { // a collection runs finalizers, which release more memory for the next one
		if _, err := a.get(metricsAddr+"/debug/pprof/heap?gc=1", time.Minute); err != nil {
			return nil, err
		}
	}
	text, err := a.get(metricsAddr+"/metrics", time.Minute)
	out := map[string]float64{}
	for _, m := range usageMetric.FindAllStringSubmatch(text, -1) {
		out[m[1]], _ = strconv.ParseFloat(m[2], 64)
	}
	if err == nil && len(out) != len(allowance) {
		err = fmt.Errorf("/metrics has only %v", out)
	}
	return out, err
}

// excess lists the resources of which the process before this one used more.
func (a *agent) excess(before map[string]float64) (out []string, err error) {
	now, err := a.usage()
	for name, more := range allowance {
		if before[name] > now[name]+more {
			out = append(out, fmt.Sprintf("the agent's %s: %.0f, and %.0f of a new agent", name, before[name], now[name]))
		}
	}
	return out, err
}
