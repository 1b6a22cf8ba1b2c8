// Package process runs programs, such as nodeproxy, in the network namespaces of a lab, for tests and
// benchmarks. It runs on Linux only.
package process

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Main is the main function of a program that needs hosts: unless it is root, it runs in new user and network
// namespaces. ctx ends with SIGINT and SIGTERM. After an error the exit status is 1.
func Main(name string, run func(ctx context.Context) error) {
	log.SetFlags(0)
	log.SetPrefix(name + ": ")
	if os.Geteuid() != 0 {
		if inside, code, err := netlab.Reexec(); err != nil {
			log.Fatal(err)
		} else if !inside {
			os.Exit(code)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// Nodeproxy returns the absolute path of file or, if that is empty, of nodeproxy in the folder dir, which it
// builds from source. env is added to the environment of the go command.
func Nodeproxy(ctx context.Context, file, dir string, env ...string) (string, error) {
	if file == "" {
		file = filepath.Join(dir, "nodeproxy")
		build := exec.CommandContext(ctx, "go", "build", "-o", file, "github.com/go-proxier/proxier/examples/nodeproxy")
		build.Env = append(os.Environ(), env...)
		if text, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("cannot build nodeproxy: %w: %s", err, text)
		}
	}
	return filepath.Abs(file)
}

// Process is a program that was started. Its methods may be called concurrently.
type Process struct {
	*exec.Cmd
	done chan struct{}
}

// Start starts a command on a host. It appends the output to the file log, unless log is empty. The caller
// must end the process.
func Start(h *netlab.Host, cmd *exec.Cmd, log string) (*Process, error) {
	if log != "" {
		f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		cmd.Stdout, cmd.Stderr = f, f
	}
	if err := h.Start(cmd); err != nil {
		return nil, err
	}
	p := &Process{cmd, make(chan struct{})}
	go func() {
		defer close(p.done)
		cmd.Wait()
	}()
	return p, nil
}

// Ended returns an error if the process has ended.
func (p *Process) Ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended by itself: %v", filepath.Base(p.Path), p.ProcessState)
	default:
		return nil
	}
}

// stopTimeout is how long a process may need to end after a signal.
const stopTimeout = 30 * time.Second

// Stop continues the process, if it is stopped, and ends it with a signal. It returns an error if the process
// had ended before, or does not end within 30 seconds; then Stop kills it.
func (p *Process) Stop(s syscall.Signal) error {
	if err := p.Ended(); err != nil {
		return err
	}
	p.Process.Signal(syscall.SIGCONT)
	p.Process.Signal(s)
	select {
	case <-p.done:
		return nil
	case <-time.After(stopTimeout):
		p.Kill()
		return fmt.Errorf("%s did not end within %v after signal %v", filepath.Base(p.Path), stopTimeout, s)
	}
}

// Kill kills the process and waits until it has ended. It does nothing if p is nil.
func (p *Process) Kill() {
	if p != nil {
		p.Process.Kill()
		<-p.done
	}
}
