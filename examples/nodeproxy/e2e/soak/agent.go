//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
)

// agent is the process nodeproxy on the node.
type agent struct {
	host *netlab.Host
	bin  string
	args []string
	// dir is its folder for temporary files, which must be empty at the end.
	dir  string
	log  *os.File
	env  []string
	http *http.Client

	cmd  *exec.Cmd
	done chan struct{}
	// ended is called with an error if the agent ends unexpectedly.
	ended func(error)
}

// metricsAddr is the address of the agent's metrics and profiles.
const metricsAddr = "127.0.0.1:10249"

func newAgent(o *options, h *netlab.Host, src source, dir string, ended func(error)) (*agent, error) {
	a := &agent{host: h, bin: o.nodeproxy, dir: filepath.Join(dir, "agent"), ended: ended, args: append([]string{
		"run", "--hostname-override", nodeName, "--proxy-mode", o.mode, "--cluster-cidr", localPodCIDRs[0] + "," + localPodCIDRs[1],
		"--nodeport-addresses", "primary", "--profiling", "--metrics-bind-address", metricsAddr,
		// The agent must not change the limits of connection tracking, which apply to the whole
		// machine.
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
	}, src.args()...)}
	if err := os.Mkdir(a.dir, 0o755); err != nil {
		return nil, err
	}
	a.env = append(os.Environ(), "TMPDIR="+a.dir, "HOME="+a.dir)
	if o.iptables != "" {
		path, err := flavourPath(filepath.Join(dir, "bin"), o.iptables)
		if err != nil {
			return nil, err
		}
		a.env = append(a.env, "PATH="+path)
	}
	a.http = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return h.Dial(ctx, network, "", to)
		},
	}}
	var err error
	a.log, err = os.Create(filepath.Join(dir, "agent.log"))
	return a, err
}

// flavourPath returns a PATH in which iptables, iptables-save and so on are the programs
// of a flavour.
func flavourPath(dir, flavour string) (string, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, what := range []string{"", "-save", "-restore"} {
			path, err := exec.LookPath(program + "-" + flavour + what)
			if err != nil {
				return "", err
			}
			if err := os.Symlink(path, filepath.Join(dir, program+what)); err != nil {
				return "", err
			}
		}
	}
	return dir + ":" + os.Getenv("PATH"), nil
}

// start starts the agent. It does not wait until the agent is ready.
func (a *agent) start() error {
	fmt.Fprintf(a.log, "== %s start\n", time.Now().UTC().Format("15:04:05.000"))
	a.cmd = exec.Command(a.bin, a.args...)
	a.cmd.Stdout, a.cmd.Stderr, a.cmd.Env, a.cmd.Dir = a.log, a.log, a.env, a.dir
	if err := a.host.Start(a.cmd); err != nil {
		return err
	}
	cmd, done := a.cmd, make(chan struct{})
	a.done = done
	go func() {
		defer close(done)
		if err := cmd.Wait(); cmd.ProcessState != nil && !cmd.ProcessState.Success() {
			if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signal() == syscall.SIGKILL {
				return
			}
			a.ended(fmt.Errorf("the agent ended: %w", err))
		}
	}()
	return nil
}

// stop ends the agent with a signal and waits for its end.
func (a *agent) stop(s syscall.Signal) {
	if a.cmd == nil {
		return
	}
	a.cmd.Process.Signal(s)
	select {
	case <-a.done:
	case <-time.After(30 * time.Second):
		a.ended(fmt.Errorf("the agent did not end after signal %v", s))
		a.cmd.Process.Kill()
		<-a.done
	}
	a.cmd = nil
}

// cleanup runs nodeproxy run --cleanup.
func (a *agent) cleanup() error {
	cmd := exec.Command(a.bin, "run", "--cleanup")
	cmd.Env, cmd.Dir = a.env, a.dir
	cmd.Stdout, cmd.Stderr = a.log, a.log
	if err := a.host.Start(cmd); err != nil {
		return err
	}
	return cmd.Wait()
}

func (a *agent) close() {
	if a.cmd != nil {
		a.cmd.Process.Kill()
		<-a.done
	}
	a.log.Close()
}

func (a *agent) get(path string) (string, error) {
	resp, err := a.http.Get("http://" + metricsAddr + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", path, resp.Status)
	}
	return string(text), err
}

var (
	heapAlloc  = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)$`)
	goroutines = regexp.MustCompile(`^goroutine profile: total (\d+)`)
)

// usage measures the agent's resource usage.
func (a *agent) usage() (u Usage, err error) {
	numberIn := func(path string, r *regexp.Regexp) (n int) {
		text, e := a.get(path)
		m := r.FindStringSubmatch(text)
		if m == nil {
			err = fmt.Errorf("%s: no %s: %w", path, r, e)
			return 0
		}
		n, _ = strconv.Atoi(m[1])
		return n
	}
	for range 3 { // a collection runs finalizers, which release more memory for the next one
		u.HeapBytes = numberIn("/debug/pprof/heap?gc=1&debug=1", heapAlloc)
	}
	u.Goroutine = numberIn("/debug/pprof/goroutine?debug=1", goroutines)
	proc := fmt.Sprintf("/proc/%d", a.cmd.Process.Pid)
	status, e := os.ReadFile(proc + "/status")
	if e != nil {
		return u, e
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, _ := strconv.Atoi(strings.Fields(rest)[0])
			u.RSSBytes = kb << 10
		}
	}
	list, e := os.ReadDir(proc + "/fd")
	if e != nil {
		return u, e
	}
	for _, f := range list {
		to, e := os.Readlink(filepath.Join(proc, "fd", f.Name()))
		switch {
		case e != nil: // closed since
		case strings.HasPrefix(to, "socket:"):
			u.Sockets++
		default:
			u.Files++
		}
	}
	return u, err
}
