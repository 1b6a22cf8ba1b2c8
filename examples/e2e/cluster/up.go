package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A cluster's processes, which "up" starts, run this program in two roles:
//
//	control   process 1 of the cluster; starts the control plane and the nodes
//	node      process 1 of a node; starts containerd and kubelet
//
// The kernel kills control when "up" ends (Pdeathsig). It kills every process of the
// cluster when control ends, because control is process 1 of their PID namespace.
var roles map[string]func() error

func init() { roles = map[string]func() error{"control": control, "node": node} }

// rolePrefix and a role's name form the name of a process, which ps shows.
const rolePrefix = "proxier-cluster-"

// inRole returns a command that runs this program in a role, with namespaces of its own.
func inRole(role string, args ...string) *exec.Cmd {
	return &exec.Cmd{Path: "/proc/self/exe", Args: append([]string{rolePrefix + role}, args...), SysProcAttr: &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}}
}

// settings are the settings of a cluster. Its processes receive them as JSON.
type settings struct {
	Dir, Version string
	Nodes        int
	// Up and Control are the PIDs of "up" and of the cluster's process 1. Only the file has them.
	Up, Control int
}

// cacheInside is the path of the cache folder in the cluster's mount namespace, in which
// mounts cover other folders.
const cacheInside = "/mnt"

// inside returns the settings for processes in the cluster's mount namespace.
func (s settings) inside() settings {
	s.Dir = cacheInside
	return s
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

func (s settings) json() string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // all fields can be encoded
	}
	return string(b)
}

func parseSettings(text string) (s settings, err error) {
	return s, json.Unmarshal([]byte(text), &s)
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
	if err := errors.Join(os.MkdirAll(s.state(), 0o755), os.RemoveAll(s.log("")), os.MkdirAll(s.log(""), 0o755)); err != nil {
		return err
	}
	log, err := os.Create(s.log("control.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := inRole("control", s.json())
	cmd.Stdout, cmd.Stderr = os.Stdout, log
	if err := cmd.Start(); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { cmd.Process.Kill() })()
	s.Up, s.Control = os.Getpid(), cmd.Process.Pid
	if err := os.WriteFile(s.state("settings.json"), []byte(s.json()), 0o644); err != nil {
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
	if err := os.RemoveAll(s.state()); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*" + cgroup) // version 1
	for _, g := range append(groups, "/sys/fs/cgroup"+cgroup) {
		var dirs []string
		filepath.WalkDir(g, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, dir := range slices.Backward(dirs) { // subfolders come after the folder
			if err := os.Remove(dir); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
	}
}

// down stops a cluster.
func down(o options) error {
	s, err := o.running()
	for err == nil {
		if err = syscall.Kill(s.Up, syscall.SIGTERM); errors.Is(err, syscall.ESRCH) {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

// running returns the settings of a cluster that is up.
func (o options) running() (settings, error) {
	b, err := os.ReadFile(settings{Dir: o.dir}.state("settings.json"))
	if err != nil {
		return settings{}, fmt.Errorf("no cluster is up: %w", err)
	}
	return parseSettings(string(b))
}

// command returns a command that runs in the namespaces of a node, or of "control". The kernel kills
// the command when this process ends: first nsenter, and then its child. Pdeathsig of Go's os/exec alone
// would not reach the child.
func (s settings) command(ctx context.Context, place string, args ...string) *exec.Cmd {
	proc := filepath.Join("/proc", strconv.Itoa(s.Control))
	if place != "control" {
		// The node's PID belongs to the cluster's PID namespace. control has that namespace's /proc.
		pid, _ := os.ReadFile(s.state(place, "pid")) // without a node, nsenter finds no namespaces
		proc = filepath.Join(proc, "root/proc", string(pid))
	}
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{
		"--ipc=" + proc + "/ns/ipc", "--uts=" + proc + "/ns/uts", "--net=" + proc + "/ns/net", "--pid=" + proc + "/ns/pid", "--mount=" + proc + "/ns/mnt",
		"setpriv", "--pdeathsig", "KILL",
	}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Dir, cmd.Env = "/", s.inside().environment()
	return cmd
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
