//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"time"
)

// agent is the process nodeproxy on a node.
type agent struct {
	node *node
	bin  string
	args []string
	wrap func(*exec.Cmd) *exec.Cmd
	log  string
	http *http.Client

	cmd  *exec.Cmd
	done chan struct{}
}

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
	return &agent{
		node: n, bin: bin, args: append(append(args, m.args...), e.args...), wrap: e.wrap, log: filepath.Join(dir, name+".log"),
		http: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
				return n.Dial(ctx, network, "", to)
			},
		}},
	}, nil
}

// start starts the agent. It does not wait until the agent is ready.
func (a *agent) start() error {
	log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(a.bin, a.args...)
	if a.wrap != nil {
		cmd = a.wrap(cmd)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := a.node.Start(cmd); err != nil {
		return err
	}
	done := make(chan struct{})
	a.cmd, a.done = cmd, done
	go func() {
		defer close(done)
		cmd.Wait()
	}()
	return nil
}

// running reports whether the process has not ended.
func (a *agent) running() bool {
	select {
	case <-a.done:
		return false
	default:
		return true
	}
}

// stopTimeout is how long an agent may need to end after SIGTERM.
const stopTimeout = 30 * time.Second

// stop ends the agent with a signal. It returns an error if the agent had ended before, or does
// not end.
func (a *agent) stop(s syscall.Signal) error {
	if !a.running() {
		return a.ended()
	}
	a.cmd.Process.Signal(syscall.SIGCONT)
	a.cmd.Process.Signal(s)
	select {
	case <-a.done:
		return nil
	case <-time.After(stopTimeout):
		a.cmd.Process.Kill()
		<-a.done
		return fmt.Errorf("the agent did not end within %v after signal %v", stopTimeout, s)
	}
}

// ended returns an error for an agent that ended by itself.
func (a *agent) ended() error { return fmt.Errorf("the agent ended by itself: %v", a.cmd.ProcessState) }

func (a *agent) kill() {
	if a.cmd != nil {
		a.cmd.Process.Kill()
		<-a.done
	}
}

// healthy returns an error unless /healthz reports that the agent is healthy.
func (a *agent) healthy() error {
	resp, err := a.http.Get("http://" + healthzAddr + "/livez")
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/livez: %s", resp.Status)
	}
	return nil
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

var syncLine = regexp.MustCompile(`(?m)^synced services=`)

// synced reports whether the agent has synced once.
func (a *agent) synced() bool {
	text, _ := os.ReadFile(a.log)
	return syncLine.Match(text)
}
