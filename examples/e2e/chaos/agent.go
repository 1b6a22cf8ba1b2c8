//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/go-proxier/proxier/examples/e2e/internal/nodeagent"
)

// agent is the process nodeproxy on a node.
type agent struct{ nodeagent.Agent }

const (
	healthzAddr = "127.0.0.1:10256"
	metricsAddr = "127.0.0.1:10249"
)

// newAgent returns an agent that is not started. dir is a folder for its files.
func newAgent(bin string, n *node, m *mode, e environment, dir, name string) (*agent, error) {
	config := filepath.Join(dir, name+".kubeconfig")
	if err := os.WriteFile(config, []byte(kubeconfig), 0o644); err != nil {
		return nil, err
	}
	args := []string{
		"run", "--kubeconfig", config, "--kube-api-content-type", "application/json", "--kube-api-qps", "1000", "--kube-api-burst", "1000",
		"--hostname-override", nodeName, "--cluster-cidr", clusterCIDRs, "--sync-period", "2s", "--service-traffic-metrics",
		"--healthz-bind-address", healthzAddr, "--metrics-bind-address", metricsAddr,
		// The limits of connection tracking apply to the whole machine.
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
	}
	return &agent{nodeagent.Agent{Host: n.Host, Bin: bin, Args: append(append(args, m.args...), e.args...), Wrap: e.wrap, Log: filepath.Join(dir, name+".log")}}, nil
}

// healthy returns an error unless /livez reports that the agent is healthy.
func (a *agent) healthy() error {
	_, err := a.Get(healthzAddr + "/livez")
	return err
}

var crash = regexp.MustCompile(`(?m)^(panic:|fatal error:|WARNING: DATA RACE).*`)

// crashed returns an error if the log shows a panic or a data race.
func (a *agent) crashed() error {
	text, err := os.ReadFile(a.Log)
	if err != nil {
		return err
	}
	if m := crash.Find(text); m != nil {
		return fmt.Errorf("the agent's log: %s", m)
	}
	return nil
}

var syncLine = regexp.MustCompile(`(?m)^synced services=`)

// synced reports whether the agent has synced once.
func (a *agent) synced() bool {
	text, _ := os.ReadFile(a.Log)
	return syncLine.Match(text)
}
