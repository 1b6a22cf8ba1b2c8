package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// place is a set of namespaces that a command can run in: of a node, or of the control
// plane.
type place struct {
	name string
	proc string // the folder in /proc of its process 1
}

// place returns the place of a node, or of "control". pid is the PID of the control plane's
// process 1.
func (s settings) place(pid int, name string) (place, error) {
	proc := fmt.Sprintf("/proc/%d", pid)
	if name == "control" {
		return place{name: name, proc: proc}, nil
	}
	// The node's PID belongs to the cluster's PID namespace. control has that namespace's
	// /proc.
	b, err := os.ReadFile(s.state(name, "pid"))
	if err != nil {
		return place{}, fmt.Errorf("cluster %q has no node %q: %w", s.Name, name, err)
	}
	return place{name: name, proc: filepath.Join(proc, "root", "proc", string(b))}, nil
}

// process is a command that was started in a place.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // of cmd.Wait
}

// start starts a command in the place's namespaces. The command's path is a path in the
// place's mount namespace. The kernel kills the command when this process ends.
func (p place) start(cmd *exec.Cmd) (*process, error) {
	started := make(chan error)
	proc := &process{cmd: cmd, done: make(chan struct{})}
	// Role inside polls this pipe to check that this process still lives.
	lifeline, held, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer lifeline.Close()
	what := cmd.Path
	cmd.Args = append([]string{rolePrefix + "inside", cmd.Path}, cmd.Args...)
	cmd.Path, cmd.Dir, cmd.ExtraFiles = "/proc/self/exe", "/", []*os.File{lifeline}
	go func() {
		defer held.Close()
		// The thread is not unlocked and so ends with the goroutine. For the kernel its end is
		// the end of the command's parent, so the thread must live as long as the command.
		runtime.LockOSThread()
		err := p.enter()
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			proc.err = cmd.Wait()
			close(proc.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("cannot start %s in %s: %w", what, p.name, err)
	}
	return proc, nil
}

// insideFD is the pipe that role inside polls to check that its parent lives.
const insideFD = 3

// inside is the role of a process in the namespaces of a place. It asks the kernel to kill
// it when its parent ends, and then executes its command. Pdeathsig of Go's os/exec would
// do the same, but does not find a parent in another PID namespace and takes it for dead.
func inside() error {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	// The parent may have ended before.
	poll := []unix.PollFd{{Fd: insideFD}}
	if _, err := unix.Poll(poll, 0); err != nil {
		return os.NewSyscallError("poll", err)
	}
	if poll[0].Revents&unix.POLLHUP != 0 {
		return errors.New("the parent process has ended")
	}
	unix.CloseOnExec(insideFD)
	return fmt.Errorf("cannot run %s: %w", os.Args[1], unix.Exec(os.Args[1], os.Args[2:], os.Environ()))
}

// run runs a command to its end. It kills the command when ctx ends.
func (p place) run(ctx context.Context, cmd *exec.Cmd) error {
	proc, err := p.start(cmd)
	if err != nil {
		return err
	}
	select {
	case <-proc.done:
	case <-ctx.Done():
		cmd.Process.Kill()
		<-proc.done
		return ctx.Err()
	}
	return proc.err
}

// enter moves the calling thread into the place's namespaces. The PID namespace applies to
// the processes that the thread starts.
func (p place) enter() error {
	// A thread that shares its working directory with others cannot change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	namespaces := []string{"ipc", "uts", "net", "pid", "mnt"}
	var files []*os.File
	for _, n := range namespaces {
		f, err := os.Open(filepath.Join(p.proc, "ns", n))
		if err != nil {
			return err
		}
		defer f.Close()
		files = append(files, f)
	}
	for i, f := range files {
		if err := unix.Setns(int(f.Fd()), 0); err != nil {
			return fmt.Errorf("enter namespace %s: %w", namespaces[i], err)
		}
	}
	return nil
}

// environment returns the environment of commands in the cluster, with paths of the
// cluster's programs and kubeconfig. s must be the settings for the inside.
func (s settings) environment() []string {
	return []string{
		"PATH=" + s.bin() + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"KUBECONFIG=" + s.state("admin.conf"),
		"HOME=/tmp", // the cluster's own; kubectl has a cache in it
		"TERM=" + os.Getenv("TERM"),
	}
}

func runIn(ctx context.Context, o options, name string, args []string) error {
	s, pid, err := o.running()
	if err != nil {
		return err
	}
	p, err := s.place(pid, name)
	if err != nil {
		return err
	}
	// env searches the program in the PATH of the place.
	cmd := &exec.Cmd{Path: "/usr/bin/env", Args: append([]string{"env"}, args...), Env: s.inside().environment()}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return p.run(ctx, cmd)
}

// bounded is the role of a process that runs a command as process 1 of a PID namespace. The
// command's end ends every process that it started. bounded forwards SIGINT and SIGTERM.
func bounded() error {
	cmd := exec.Command(os.Args[1], os.Args[2:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		for sig := range signals {
			cmd.Process.Signal(sig)
		}
	}()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(os.Args[1:2], " "), err)
	}
	return nil
}
