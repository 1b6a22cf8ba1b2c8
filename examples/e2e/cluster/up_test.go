package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if dir, ok := strings.CutPrefix(os.Args[0], "enter "); ok {
		enter(dir)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// enter runs a shell with a child in the namespaces of a "cluster", as command "test" runs Ginkgo. dir is
// the cluster's folder.
func enter(dir string) {
	cmd := settings{Dir: dir}.command(context.Background(), "control", "unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "hostname; sleep 1000 & wait")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// A killed command "test" must leave neither tests nor a test's processes running.
func TestKilledStarterEndsItsCommands(t *testing.T) {
	first := newNamespaces(t)
	s := settings{Dir: t.TempDir()}
	if err := errors.Join(os.Mkdir(s.state(), 0o755), s.writePID("control", first)); err != nil {
		t.Fatal(err)
	}
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: []string{"enter " + s.Dir}, Stderr: os.Stderr}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "inside\n" {
		t.Fatalf("the host's name is %q, error %v; want %q", line, err, "inside")
	}
	var pids []int
	for pid := cmd.Process.Pid; len(pids) < 4; pids = append(pids, pid) {
		pid = child(t, pid) // nsenter, unshare, sh, sleep
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	for i, pid := range pids {
		for deadline := time.Now().Add(10 * time.Second); alive(pid); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("process %d of nsenter, unshare, sh and sleep outlives its starter", i)
			}
		}
	}
	if !alive(first) {
		t.Error("the cluster ended too")
	}
}

// newNamespaces starts a process with namespaces of its own until the end of the test, whose host's
// name is "inside", and returns the PID of their process 1.
func newNamespaces(t *testing.T) int {
	t.Helper()
	cluster := exec.Command("unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
		"sh", "-c", "hostname inside; echo $$; exec sleep 1000")
	cluster.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cluster.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cluster.Process.Kill()
		cluster.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		if os.Getenv("PROXIER_REQUIRE_ALL") != "" || os.Geteuid() == 0 {
			t.Fatalf("cannot make namespaces: %v", err)
		}
		t.Skip("making namespaces needs root")
	}
	return child(t, cluster.Process.Pid)
}

// child waits until a process has a child, and returns the child's PID.
func child(t *testing.T, pid int) int {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d has no child", pid)
		}
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, path := range stats {
			b, _ := os.ReadFile(path)
			_, rest, _ := strings.Cut(string(b), ") ") // after the program's name: state, parent
			if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) {
				n, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
		}
	}
}

// alive reports whether a process runs. A zombie does not.
func alive(pid int) bool {
	if errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}
