package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A cluster's processes run this program in different roles:
//
//	monitor   outside of the cluster's namespaces; enforces the time limit, and removes the
//	          cluster's files and control groups at the end
//	control   process 1 of the cluster; starts the control plane and the nodes
//	node      process 1 of a node; starts containerd and kubelet
//	inside    becomes a command that another process runs in the cluster's namespaces
//	bounded   runs a command so that all its processes end with it
//
// The kernel kills control when monitor ends (Pdeathsig). It kills every process of the
// cluster when control ends, because control is process 1 of their PID namespace.
var roles map[string]func() error

func init() {
	roles = map[string]func() error{
		"monitor": monitor, "control": control, "node": node, "inside": inside, "bounded": bounded,
	}
}

// rolePrefix and a role's name form the name of a process, which ps shows.
const rolePrefix = "proxier-cluster-"

// inRole returns a command that runs this program in a role.
func inRole(role string, args ...string) *exec.Cmd {
	return &exec.Cmd{Path: "/proc/self/exe", Args: append([]string{rolePrefix + role}, args...)}
}

// settings are the settings of a cluster. Its processes receive them as JSON.
type settings struct {
	Dir, Name, Version string
	Nodes              int
	Limit              time.Duration
	Images             []string // more archives to import
}

// cacheInside is the path of the cache folder in the cluster's mount namespace, in which
// mounts cover other folders.
const cacheInside = "/mnt"

func (o options) settings() (settings, error) {
	version, err := kubernetesVersion()
	return settings{Dir: o.dir, Name: o.name, Version: version, Nodes: o.nodes, Limit: o.limit}, err
}

// inside returns the settings for processes in the cluster's mount namespace.
func (s settings) inside() settings {
	s.Dir = cacheInside
	return s
}

func (s settings) bin(name ...string) string {
	return filepath.Join(append([]string{s.Dir, s.Version}, name...)...)
}
func (s settings) imageArchive() string { return s.bin("images.tar") }

// state returns the path of a file that exists as long as the cluster.
func (s settings) state(name ...string) string {
	return filepath.Join(append([]string{s.Dir, "clusters", s.Name}, name...)...)
}
func (s settings) log(name string) string { return filepath.Join(s.Dir, "logs", s.Name, name) }

// lockFile returns the path of the lock file. The monitor locks the file as long as it
// runs, and writes its PID to it.
func (s settings) lockFile() string { return s.state() + ".lock" }

// cgroup returns the parent of the control groups of the cluster's containers, in the form
// that kubelet's configuration uses.
func (s settings) cgroup() string { return "/proxier-" + s.Name }

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

// lock locks the cluster's lock file. If a monitor has locked the file, lock returns no file
// and the monitor's PID.
func (s settings) lock() (f *os.File, holder int, err error) {
	if err := os.MkdirAll(filepath.Dir(s.lockFile()), 0o755); err != nil {
		return nil, 0, err
	}
	f, err = os.OpenFile(s.lockFile(), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, 0, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, 0, nil
	}
	defer f.Close()
	if err != unix.EWOULDBLOCK {
		return nil, 0, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, 0, err
	}
	// 0 if the monitor has locked the file but not yet written its PID.
	holder, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	return nil, holder, nil
}

// up starts a cluster in the background and returns when it is ready.
func up(ctx context.Context, o options) error {
	s, err := build(ctx, o)
	if err != nil {
		return err
	}
	lock, holder, err := s.lock()
	if err != nil {
		return err
	}
	if lock == nil {
		return fmt.Errorf("cluster %q is already up (process %d)", s.Name, holder)
	}
	s.remove()
	if err := os.MkdirAll(s.state(), 0o755); err != nil {
		return err
	}
	for i, from := range o.images {
		name := fmt.Sprintf("images-%d.tar", i)
		if err := copyFile(s.state(name), from, 0o644); err != nil {
			return err
		}
		s.Images = append(s.Images, name)
	}
	if err := os.RemoveAll(s.log("")); err != nil {
		return err
	}
	if err := os.MkdirAll(s.log(""), 0o755); err != nil {
		return err
	}
	monitorLog, err := os.Create(s.log("monitor.log"))
	if err != nil {
		return err
	}
	defer monitorLog.Close()
	progress, progressWriter, err := os.Pipe()
	if err != nil {
		return err
	}
	defer progress.Close()
	cmd := inRole("monitor", s.json())
	cmd.Stdout, cmd.Stderr = monitorLog, monitorLog
	cmd.ExtraFiles = []*os.File{lock, progressWriter}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// The monitor ends the cluster if this pipe is closed before a byte was written to it.
	// The end of this process closes the pipe.
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lock.Close()
	progressWriter.Close()
	stop := context.AfterFunc(ctx, func() { lifeline.Close() })
	defer stop()
	ready := false
	for lines := bufio.NewScanner(progress); lines.Scan(); {
		if ready = lines.Text() == readyLine; ready {
			break
		}
		fmt.Println(lines.Text())
	}
	if !ready {
		cmd.Wait()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("cluster %q did not start; see %s", s.Name, s.log("control.log"))
	}
	if _, err := lifeline.Write([]byte{1}); err != nil {
		return fmt.Errorf("cluster %q ended early: %w", s.Name, err)
	}
	fmt.Printf("cluster %q is up and ends in %s; logs are in %s\n", s.Name, s.Limit, s.log(""))
	return cmd.Process.Release()
}

// Open files that the monitor and control inherit from the process that starts them.
const (
	lockFD     = 3 // monitor
	progressFD = 4 // monitor
	controlFD  = 3 // control: for progress
)

// readyLine is the last line of progress.
const readyLine = "ready"

// monitor is the role of a cluster's outermost process.
func monitor() (err error) {
	s, err := parseSettings(os.Args[1])
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	ctx, cancelLimit := context.WithTimeout(ctx, s.Limit)
	defer cancelLimit()
	lock, progress := os.NewFile(lockFD, "lock"), os.NewFile(progressFD, "progress")
	syscall.CloseOnExec(lockFD)
	defer lock.Close() // the reference also keeps the garbage collector from closing it
	if err := lock.Truncate(0); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(lock, os.Getpid()); err != nil {
		return err
	}
	go func() {
		if _, err := io.ReadFull(os.Stdin, make([]byte, 1)); err != nil {
			cancel()
		}
	}()
	log, err := os.Create(s.log("control.log"))
	if err != nil {
		return err
	}
	cmd := inRole("control", s.json())
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{progress}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	defer s.remove()
	if err := cmd.Start(); err != nil {
		return err
	}
	progress.Close()
	defer context.AfterFunc(ctx, func() {
		fmt.Printf("%s stopping the cluster: %v\n", time.Now().Format(time.TimeOnly), ctx.Err())
		cmd.Process.Kill()
	})()
	if err := os.WriteFile(s.state("control.pid"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o644); err != nil {
		cmd.Process.Kill()
	}
	// Wait returns when every process of the PID namespace has ended.
	return cmd.Wait()
}

// remove removes the files and control groups of a cluster that has no processes.
func (s settings) remove() {
	if err := os.RemoveAll(s.state()); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*" + s.cgroup()) // version 1
	for _, g := range append(groups, "/sys/fs/cgroup"+s.cgroup()) {
		var dirs []string
		filepath.WalkDir(g, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for i := len(dirs) - 1; i >= 0; i-- { // subfolders come after the folder
			if err := os.Remove(dirs[i]); err != nil && !errors.Is(err, fs.ErrNotExist) {
				fmt.Fprintln(os.Stderr, err)
			}
		}
	}
}

// down stops a cluster. It also removes the remains of a killed cluster.
func down(o options) error {
	s, err := o.settings()
	if err != nil {
		return err
	}
	asked := false
	for {
		lock, holder, err := s.lock()
		if err != nil {
			return err
		}
		if lock != nil {
			defer lock.Close()
			break
		}
		if !asked && holder != 0 {
			if err := syscall.Kill(holder, syscall.SIGTERM); err != nil {
				return fmt.Errorf("cannot stop process %d: %w", holder, err)
			}
			asked = true
		}
		time.Sleep(100 * time.Millisecond)
	}
	s.remove()
	return nil
}

// running returns the settings of a cluster that is up, and the PID of its role control.
func (o options) running() (s settings, pid int, err error) {
	if s, err = o.settings(); err != nil {
		return s, 0, err
	}
	lock, _, err := s.lock()
	if err != nil {
		return s, 0, err
	}
	if lock != nil {
		lock.Close()
		return s, 0, fmt.Errorf("cluster %q is not up", s.Name)
	}
	b, err := os.ReadFile(s.state("settings.json"))
	if err != nil {
		return s, 0, fmt.Errorf("cluster %q is not ready: %w", s.Name, err)
	}
	dir := s.Dir
	if s, err = parseSettings(string(b)); err != nil {
		return s, 0, err
	}
	s.Dir = dir
	b, err = os.ReadFile(s.state("control.pid"))
	if err != nil {
		return s, 0, err
	}
	pid, err = strconv.Atoi(string(b))
	return s, pid, err
}
