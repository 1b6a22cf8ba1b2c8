//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// build builds nodeproxy from source. The variables are added to the environment of the go command.
func build(ctx context.Context, file string, env ...string) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", file, "github.com/go-proxier/proxier/examples/nodeproxy")
	build.Env = append(os.Environ(), env...)
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot build nodeproxy: %w: %s", err, text)
	}
	return nil
}

// find returns the absolute path of a program: of file or, if that is empty, of nodeproxy, which it
// builds in the folder dir.
func find(ctx context.Context, file, dir string) (string, error) {
	if file == "" {
		file = filepath.Join(dir, "nodeproxy")
		if err := build(ctx, file); err != nil {
			return "", err
		}
	}
	return filepath.Abs(file)
}

// agent runs one process nodeproxy after another on a node. Its methods must not be called
// concurrently.
type agent struct {
	host *netlab.Host
	// bin is the program, and args its arguments.
	bin  string
	args []string
	// dir is the folder in which it runs.
	dir string
	// log is the file to which the output of all processes is appended.
	log string
	// wrap returns the command to start in place of another one.
	wrap func(*exec.Cmd) *exec.Cmd

	cmd  *exec.Cmd // nil before the first start
	done chan struct{}
}

// command starts nodeproxy with other arguments than args. The caller must wait for it.
func (a *agent) command(args ...string) (*exec.Cmd, error) {
	log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := a.wrap(exec.Command(a.bin, args...))
	cmd.Stdout, cmd.Stderr = log, log
	return cmd, a.host.Start(cmd)
}

// start starts the agent. It does not wait until the agent is ready.
func (a *agent) start() error {
	cmd, err := a.command(a.args...)
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

// process returns the process that start started last.
func (a *agent) process() *os.Process { return a.cmd.Process }

// ended returns an error if the process that start started last has ended.
func (a *agent) ended() error {
	select {
	case <-a.done:
		return fmt.Errorf("the agent ended by itself: %v", a.cmd.ProcessState)
	default:
		return nil
	}
}

// stopTimeout is how long an agent may need to end after SIGTERM.
const stopTimeout = 30 * time.Second

// stop continues the process, if it is stopped, and ends it with a signal. It returns an error if the
// process had ended before, or does not end within 30 seconds; then stop kills it.
func (a *agent) stop(s syscall.Signal) error {
	if err := a.ended(); err != nil {
		return err
	}
	a.cmd.Process.Signal(syscall.SIGCONT)
	a.cmd.Process.Signal(s)
	select {
	case <-a.done:
		return nil
	case <-time.After(stopTimeout):
		a.kill()
		return fmt.Errorf("the agent did not end within %v after signal %v", stopTimeout, s)
	}
}

// kill kills the process if one is running.
func (a *agent) kill() {
	if a.cmd != nil {
		a.cmd.Process.Kill()
		<-a.done
	}
}

// get returns the answer of one of the agent's servers, such as "127.0.0.1:10256/healthz". A status
// other than 200 is an error.
func (a *agent) get(page string) (string, error) { return a.getWithin(page, time.Minute) }

func (a *agent) getWithin(page string, limit time.Duration) (string, error) {
	code, text, _ := a.host.Get(page, limit)
	if code != 200 {
		return text, fmt.Errorf("%s: status %d: %s", page, code, text)
	}
	return text, nil
}
