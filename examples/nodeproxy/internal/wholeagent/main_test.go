//go:build linux

package wholeagent

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// programEnv makes the test binary run as nodeproxy.
const programEnv = "NODEPROXY_TEST_PROGRAM"

// otherUserEnv makes startWith start a process without capabilities in the host.
const otherUserEnv = "NODEPROXY_TEST_OTHER_USER"

// filesEnv is the number of files that a process may open.
const filesEnv = "NODEPROXY_TEST_FILES"

func TestMain(m *testing.M) {
	if os.Getenv(signalEnv) != "" {
		dropAfterSignal()
	}
	if os.Getenv(programEnv) == "" {
		lock, err := os.Executable() // any file: the default one may belong to another user
		if err == nil {
			err = os.Setenv("XTABLES_LOCKFILE", lock)
		}
		if err != nil {
			panic(err)
		}
		netlab.Parallel(8) // most tests wait for the agent, which waits for its intervals
		netlab.Main(m)
	}
	if os.Getenv(readOnlyEnv) != "" {
		if err := readOnlySysctls(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
	}
	if n, err := strconv.ParseUint(os.Getenv(filesEnv), 10, 64); err == nil {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: n}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
	}
	os.Exit(program.Main())
}

// process is nodeproxy in another process, or in this one.
type process struct {
	*exec.Cmd                    // nil in this process
	end       context.CancelFunc // of one in this process
	code      int                // of one in this process that has ended
	lines     chan string        // standard output; closed at its end
	dir       string             // of the manifests

	mu   sync.Mutex
	diag bytes.Buffer // standard error
}

// embed runs nodeproxy in this process, in a host, until the end of the test. It has all but what main and
// the kernel do for a process: signals, capabilities, and the format of its log.
func embed(t *testing.T, h *netlab.Host, args ...string) *process {
	t.Helper()
	ctx, end := context.WithCancel(context.Background())
	p := &process{end: end, lines: make(chan string, 1000)}
	r, w := io.Pipe()
	go func() {
		err := h.Do(func() error {
			p.code = program.Dispatch(ctx, &cli.Program{Out: w, Diag: p, NetNS: h.File()}, args)
			return nil
		})
		w.CloseWithError(err)
	}()
	p.read(r)
	t.Cleanup(func() { p.stop(t) })
	return p
}

// read makes lines of standard output.
func (p *process) read(out io.Reader) {
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
}

// verb runs a verb of nodeproxy to its end in this process, in a host.
func verb(t *testing.T, h *netlab.Host, args ...string) (code int, out []string, log string) {
	t.Helper()
	p := embed(t, h, args...)
	code, out = p.exit(t)
	return code, out, p.log()
}

// start runs nodeproxy in a host, and kills it at the end of the test.
func start(t *testing.T, h *netlab.Host, args ...string) *process {
	t.Helper()
	return startWith(t, h, nil, args...)
}

// asKubeProxyEnv makes startWith call the program as kubeadm's DaemonSet does.
const asKubeProxyEnv = "NODEPROXY_TEST_AS_KUBE_PROXY"

// startWith is start with additional environment variables.
func startWith(t *testing.T, h *netlab.Host, env []string, args ...string) *process {
	t.Helper()
	return startProgram(t, h, "/proc/self/exe", env, args...)
}

// startProgram is startWith for another build of nodeproxy.
func startProgram(t *testing.T, h *netlab.Host, path string, env []string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(path, args...), lines: make(chan string, 1000)}
	p.Env = append(append(os.Environ(), programEnv+"=1"), env...)
	p.Stderr = p
	if slices.Contains(env, asKubeProxyEnv+"=1") {
		p.Args[0] = "/usr/local/bin/kube-proxy"
	}
	if slices.Contains(env, readOnlyEnv+"=1") {
		p.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	}
	if slices.Contains(env, otherUserEnv+"=1") {
		p.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
	}
	out := must.Get(p.StdoutPipe())(t)
	must.Do(t, h.Start(p.Cmd))
	t.Cleanup(func() { p.Process.Kill() })
	p.read(out)
	return p
}

// flavorPath returns a PATH on which iptables-restore and the like are programs of a
// flavor.
func flavorPath(t *testing.T, flavor string) string {
	t.Helper()
	dir := t.TempDir()
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, what := range []string{"", "-save", "-restore"} {
			path := must.Get(exec.LookPath(program + "-" + flavor + what))(t)
			must.Do(t, os.Symlink(path, filepath.Join(dir, program+what)))
		}
	}
	return dir + ":" + os.Getenv("PATH")
}

// Write stores standard error.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.diag.Write(b)
}

func (p *process) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.diag.String()
}

// line returns the next line of standard output.
func (p *process) line(t *testing.T) string {
	t.Helper()
	select {
	case l, ok := <-p.lines:
		if ok {
			return l
		}
		t.Fatalf("nodeproxy ended; log:\n%s", p.log())
	case <-time.After(3 * time.Minute):
		t.Fatalf("no line within three minutes; log:\n%s", p.log())
	}
	return ""
}

// synced waits for the next line, which must have the fields and a valid time.
func (p *process) synced(t *testing.T, fields string) {
	t.Helper()
	l := p.line(t)
	rest, ok := strings.CutPrefix(l, "synced "+fields+" took=")
	took, waited, both := strings.Cut(rest, " waited=")
	_, err := time.ParseDuration(took)
	_, err2 := time.ParseDuration(waited)
	if !ok || !both || err != nil || err2 != nil {
		t.Fatalf("line %q, want synced %s took=DURATION waited=DURATION; log:\n%s", l, fields, p.log())
	}
}

// errorLine matches the beginning of a line that logs an error, in klog's text format.
var errorLine = regexp.MustCompile(`(?m)^E[0-9]{4} `)

// loggedErrors reports whether the log has errors.
func (p *process) loggedErrors() bool { return errorLine.MatchString(p.log()) }

// logged waits until the log contains a text.
func (p *process) logged(t *testing.T, what string) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !strings.Contains(p.log(), what); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("log has no %q:\n%s", what, p.log())
		}
	}
}

// stop ends nodeproxy by SIGTERM, or by its context, as exit.
func (p *process) stop(t *testing.T) (int, []string) {
	t.Helper()
	p.terminate()
	return p.exit(t)
}

func (p *process) terminate() {
	if p.Cmd == nil {
		p.end()
	} else {
		p.Process.Signal(syscall.SIGTERM)
	}
}

// kill ends nodeproxy by SIGKILL.
func (p *process) kill(t *testing.T) {
	t.Helper()
	p.Process.Kill()
	p.exit(t)
}

// cleanup runs --cleanup in a host, which must succeed.
func cleanup(t *testing.T, h *netlab.Host) {
	t.Helper()
	if code, _, log := verb(t, h, "run", "--cleanup"); code != 0 {
		t.Errorf("--cleanup: exit status %d, log:\n%s", code, log)
	}
}

// status returns a condition: an address answers with a status.
func status(t *testing.T, h *netlab.Host, url string, want int) func() bool {
	return func() bool {
		code, _, _ := get(t, h, url)
		return code == want
	}
}

// exit waits for the end, and returns the exit status and the lines that the test has not
// read.
func (p *process) exit(t *testing.T) (int, []string) {
	t.Helper()
	var rest []string
	defer time.AfterFunc(3*time.Minute, func() { t.Errorf("nodeproxy does not end; log:\n%s", p.log()); p.terminate() }).Stop()
	for l := range p.lines {
		rest = append(rest, l)
	}
	if p.Cmd == nil {
		// A process that another test starts has copies of sockets until it executes its program.
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		return p.code, rest
	}
	if err := p.Wait(); err != nil && p.ProcessState == nil {
		t.Fatal(err)
	}
	return p.ProcessState.ExitCode(), rest
}
