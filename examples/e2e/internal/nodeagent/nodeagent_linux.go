// Package nodeagent runs nodeproxy in the network namespaces of package netlab, for the programs
// that test it for a long time.
package nodeagent

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Build builds nodeproxy from source. The variables are added to the environment of the go command.
func Build(ctx context.Context, file string, env ...string) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", file, "github.com/go-proxier/proxier/examples/nodeproxy")
	build.Env = append(os.Environ(), env...)
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot build nodeproxy: %w: %s", err, text)
	}
	return nil
}

// Find returns the absolute path of a program: of file or, if that is empty, of nodeproxy, which Find
// builds in the folder dir.
func Find(ctx context.Context, file, dir string) (string, error) {
	if file == "" {
		file = filepath.Join(dir, "nodeproxy")
		if err := Build(ctx, file); err != nil {
			return "", err
		}
	}
	return filepath.Abs(file)
}

// Main parses the flags of a program that takes no other arguments, and calls run with privileges
// over network namespaces: those of root or, for other users, in a user namespace of their own. In a
// user namespace iptables-nft may not enlarge its socket's buffer, so root stays outside. A
// signal ends the context of run. Main returns the exit status: 0 if run reports true, 1 after
// an error or false, 2 for invalid flags.
func Main(f *flag.FlagSet, args []string, diag io.Writer, run func(context.Context) (ok bool, err error)) int {
	f.SetOutput(diag)
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case f.NArg() != 0:
		fmt.Fprintf(diag, "%s: unexpected arguments %q\n", f.Name(), f.Args())
		return 2
	}
	ok, err := false, error(nil)
	if os.Geteuid() != 0 {
		inside, code, e := netlab.Reexec()
		if e == nil && !inside {
			return code
		}
		err = e
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		ok, err = run(ctx)
	}
	if err != nil {
		fmt.Fprintf(diag, "%s: %v\n", f.Name(), err)
	}
	if err != nil || !ok {
		return 1
	}
	return 0
}

// Agent runs one process nodeproxy after another on a host. Its methods must not be called
// concurrently.
type Agent struct {
	Host *netlab.Host
	// Bin is the program, and Args its arguments.
	Bin  string
	Args []string
	// Dir is the folder in which it runs, the present one if empty.
	Dir string
	// Log is the file to which the output of all processes is appended.
	Log string
	// Wrap, if not nil, returns the command to start in place of another one.
	Wrap func(*exec.Cmd) *exec.Cmd

	cmd  *exec.Cmd // nil before the first Start
	done chan struct{}
}

// Command starts nodeproxy with other arguments than Args. The caller must wait for it.
func (a *Agent) Command(args ...string) (*exec.Cmd, error) {
	log, err := os.OpenFile(a.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(a.Bin, args...)
	cmd.Dir = a.Dir
	if a.Wrap != nil {
		cmd = a.Wrap(cmd)
	}
	cmd.Stdout, cmd.Stderr = log, log
	return cmd, a.Host.Start(cmd)
}

// Start starts the agent. It does not wait until the agent is ready.
func (a *Agent) Start() error {
	cmd, err := a.Command(a.Args...)
	if err != nil {
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

// Process returns the process that Start started last.
func (a *Agent) Process() *os.Process { return a.cmd.Process }

// Ended returns an error if the process that Start started last has ended.
func (a *Agent) Ended() error {
	select {
	case <-a.done:
		return fmt.Errorf("the agent ended by itself: %v", a.cmd.ProcessState)
	default:
		return nil
	}
}

// stopTimeout is how long an agent may need to end after SIGTERM.
const stopTimeout = 30 * time.Second

// Stop continues the process, if it is stopped, and ends it with a signal. It returns an error if the
// process had ended before, or does not end within 30 seconds; then Stop kills it.
func (a *Agent) Stop(s syscall.Signal) error {
	if err := a.Ended(); err != nil {
		return err
	}
	a.cmd.Process.Signal(syscall.SIGCONT)
	a.cmd.Process.Signal(s)
	select {
	case <-a.done:
		return nil
	case <-time.After(stopTimeout):
		a.Kill()
		return fmt.Errorf("the agent did not end within %v after signal %v", stopTimeout, s)
	}
}

// Kill kills the process if one is running.
func (a *Agent) Kill() {
	if a.cmd != nil {
		a.cmd.Process.Kill()
		<-a.done
	}
}

// Get returns the answer of one of the agent's servers, such as "127.0.0.1:10256/healthz". A status
// other than 200 is an error.
func (a *Agent) Get(url string) ([]byte, error) {
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return a.Host.Dial(ctx, network, "", to)
		},
	}}
	resp, err := client.Get("http://" + url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, resp.Status)
	}
	return text, err
}
