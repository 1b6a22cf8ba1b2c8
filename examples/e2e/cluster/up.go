package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// inNamespaces returns a command that runs this program with namespaces of its own:
//
//	control   process 1 of the cluster; starts the control plane and the nodes
//	node      process 1 of a node; starts containerd and kubelet
//
// The kernel kills control when "up" ends (Pdeathsig). It kills every process of the
// cluster when control ends, because control is process 1 of their PID namespace.
func inNamespaces(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	return cmd
}

// settings are the settings of a cluster. Its processes read them from a file, settings.json.
type settings struct {
	Dir, Version string
	Nodes        int
}

func (s settings) bin(name ...string) string {
	return filepath.Join(append([]string{s.Dir, s.Version}, name...)...)
}
func (s settings) imageArchive() string { return s.bin("images.tar") }
func (s settings) rootfs() string       { return s.bin("rootfs") }

// state returns the path of a file that exists as long as the cluster.
func (s settings) state(name ...string) string {
	return filepath.Join(append([]string{s.Dir, "state"}, name...)...)
}
func (s settings) log(name string) string { return filepath.Join(s.Dir, "logs", name) }

// cgroup is the parent of the control groups of the cluster's containers, in the form
// that kubelet's configuration uses.
const cgroup = "/proxier-cluster"

// running returns the settings of a cluster that is up.
func running(dir string) (s settings, err error) {
	b, err := os.ReadFile(settings{Dir: dir}.state("settings.json"))
	if err != nil {
		return s, fmt.Errorf("no cluster is up: %w", err)
	}
	return s, json.Unmarshal(b, &s)
}

// writePID stores the PID of process 1 of a node or of "control", as the PID namespace around it counts.
func (s settings) writePID(place string, pid int) error {
	return os.WriteFile(s.state(place+".pid"), []byte(strconv.Itoa(pid)), 0o644)
}

// up runs a cluster until ctx ends.
func up(ctx context.Context, o options) error {
	s, err := build(ctx, o)
	if err != nil {
		return err
	}
	lock, err := os.Create(s.state() + ".lock")
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("a cluster is up already: lock %s: %w", lock.Name(), err)
	}
	s.remove()
	defer s.remove()
	text, err := json.Marshal(s)
	err = errors.Join(err, os.MkdirAll(s.state(), 0o755), os.RemoveAll(s.log("")), os.MkdirAll(s.log(""), 0o755),
		os.WriteFile(s.state("settings.json"), text, 0o644))
	if err != nil {
		return err
	}
	log, err := os.Create(s.log("control.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := inNamespaces("control", s.Dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, log
	if err := cmd.Start(); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { cmd.Process.Kill() })()
	if err := s.writePID("control", cmd.Process.Pid); err != nil {
		cmd.Process.Kill()
	}
	// Wait returns when every process of the PID namespace has ended.
	if err := cmd.Wait(); ctx.Err() == nil {
		return fmt.Errorf("the cluster ended (see %s): %w", s.log(""), err)
	}
	return nil
}

// remove removes the files and control groups of a cluster that has no processes.
func (s settings) remove() {
	// In either version of control groups.
	const script = `for g in /sys/fs/cgroup$0 /sys/fs/cgroup/*$0; do [ ! -d $g ] || find $g -type d -delete; done`
	_, err := output(context.Background(), "sh", "-c", script, cgroup)
	if err := errors.Join(err, os.RemoveAll(s.state())); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// command returns a command that runs in the namespaces of a node, or of "control". The kernel kills
// the command when this process ends: first nsenter, and then each child. Pdeathsig of Go's os/exec alone
// would not reach the children.
func (s settings) command(ctx context.Context, place string, command ...string) *exec.Cmd {
	var args []string
	for _, p := range slices.Compact([]string{"control", place}) { // control sees the PIDs of nodes
		pid, _ := os.ReadFile(s.state(p + ".pid")) // without a process, nsenter fails
		args = append(args, "nsenter", "--all", "--target", string(pid), "setpriv", "--pdeathsig", "KILL")
	}
	cmd := exec.CommandContext(ctx, args[0], append(args[1:], command...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Dir, cmd.Env = "/", s.environment()
	return cmd
}

// environment returns the environment of commands in the cluster, with paths of the
// cluster's programs and kubeconfig.
func (s settings) environment() []string {
	return []string{
		"PATH=" + s.bin() + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"KUBECONFIG=" + s.state("admin.conf"),
		"HOME=/tmp", // the cluster's own; kubectl has a cache in it
		"TERM=" + os.Getenv("TERM"),
	}
}
