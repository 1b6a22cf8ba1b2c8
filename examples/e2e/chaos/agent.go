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
)

const (
	healthzAddr = "127.0.0.1:10256"
	// metricsAddr has a port that no NodePort of a world has.
	metricsAddr = "127.0.0.1:29249"
)

// newAgent returns an agent that is not started. Its files are in the folder dir. Its folder for
// temporary files is below it, and must be empty after a clean-up.
func newAgent(bin string, n *node, m *mode, e environment, dir string) (*agent, error) {
	config, own := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "tmp")
	if err := os.WriteFile(config, []byte(kubeconfig), 0o644); err != nil {
		return nil, err
	}
	if err := os.Mkdir(own, 0o755); err != nil {
		return nil, err
	}
	args := []string{
		"run", "--kubeconfig", config, "--kube-api-content-type", "application/json", "--kube-api-qps", "1000", "--kube-api-burst", "1000",
		"--hostname-override", nodeName, "--cluster-cidr", clusterCIDRs, "--sync-period", "2s", "--service-traffic-metrics", "--profiling",
		"--healthz-bind-address", healthzAddr, "--metrics-bind-address", metricsAddr, "--nodeport-addresses", m.nodePorts,
		// The limits of connection tracking apply to the whole machine.
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
	}
	wrap := func(c *exec.Cmd) *exec.Cmd {
		if e.wrap != nil {
			c = e.wrap(c)
		}
		c.Dir, c.Env = own, append(os.Environ(), "TMPDIR="+own, "HOME="+own)
		if e.path != "" {
			c.Env = append(c.Env, "PATH="+e.path+":"+os.Getenv("PATH"))
		}
		return c
	}
	return &agent{host: n.Host, bin: bin, args: append(append(args, m.args...), e.args...), dir: own, wrap: wrap, log: filepath.Join(dir, "log")}, nil
}

// healthy returns an error unless /livez reports that the agent is healthy. A connection that begins while
// a rule is missing may be masqueraded, and then no packet of it arrives for as long as connection tracking
// remembers it: two minutes. So a request that takes long is given up.
func (a *agent) healthy() error {
	_, err := a.getWithin(healthzAddr+"/livez", 5*time.Second)
	return err
}

var crash = regexp.MustCompile(`(?m)^(panic:|fatal error:|WARNING: DATA RACE).*`)

// crashed returns an error if the log shows a panic or a data race.
func (a *agent) crashed() error {
	text, err := os.ReadFile(a.log)
	if err != nil {
		return err
	}
	if m := crash.Find(text); m != nil {
		return fmt.Errorf("the agent's log: %s", m)
	}
	return nil
}

func (a *agent) cleanUp() error {
	cmd, err := a.command("run", "--cleanup")
	if err != nil {
		return err
	}
	return cmd.Wait()
}

// allowance holds by how much the metrics of an agent may exceed those of a new one. Go's maps do not shrink, buffers are
// kept for the next change, and idle connections to the API server, with two goroutines each, for 90 seconds.
var allowance = map[string]float64{"go_memstats_heap_alloc_bytes": 12 << 20, "go_goroutines": 10, "process_open_fds": 5}

// usageMetric matches the metrics of the agent's resource usage.
var usageMetric = regexp.MustCompile(`(?m)^(go_memstats_heap_alloc_bytes|go_goroutines|process_open_fds) (\S+)$`)

// usage returns the agent's resource usage after a garbage collection.
func (a *agent) usage() (map[string]float64, error) {
	for range 3 { // a collection runs finalizers, which release more memory for the next one
		if _, err := a.get(metricsAddr + "/debug/pprof/heap?gc=1"); err != nil {
			return nil, err
		}
	}
	text, err := a.get(metricsAddr + "/metrics")
	out := map[string]float64{}
	for _, m := range usageMetric.FindAllStringSubmatch(text, -1) {
		if out[m[1]], err = strconv.ParseFloat(m[2], 64); err != nil {
			return nil, err
		}
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

// differences lists the addresses and ports of Services for which the kernel's rules have other endpoints than the
// objects, and the Services that the kernel alone has.
func (a *agent) differences() ([]string, error) {
	var out, diag bytes.Buffer
	cmd := a.wrap(exec.Command(a.bin, append([]string{"render", "--diff", "kernel"}, a.args[1:]...)...))
	cmd.Stdout, cmd.Stderr = &out, &diag
	err := a.host.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if out.Len() == 0 && err != nil {
		return nil, fmt.Errorf("render --diff kernel: %w: %s", err, diag.Bytes())
	}
	return strings.FieldsFunc(out.String(), func(r rune) bool { return r == '\n' }), nil
}
