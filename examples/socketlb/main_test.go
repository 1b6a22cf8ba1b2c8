//go:build linux

package socketlb

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// privileged reports whether this process may load programs, which takes rights in the
// initial user namespace.
var privileged = sync.OnceValue(func() error {
	dir, closeDir, err := TemporaryDir()
	if err != nil {
		return err
	}
	defer closeDir()
	return Probe(context.Background(), Config{Dir: dir})
})

func TestMain(m *testing.M) {
	confine.Roles{"probe": func() error {
		return Probe(context.Background(), Config{Dir: os.Getenv("PROBE_DIR"), Cgroup: os.Getenv("PROBE_CGROUP")})
	}}.Enter()
	if privileged() == nil {
		// In the user namespace that conformance.Main makes, nobody may load programs.
		os.Setenv(netlab.InsideEnv, "1")
		code := m.Run()
		if err := leaveTestCgroup(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
		os.Exit(code)
	}
	conformance.Main(m)
}

// need skips the test without privileges.
func need(tb testing.TB) {
	tb.Helper()
	err := privileged()
	netlab.Need(tb, err == nil, fmt.Sprintf("the right to load BPF programs: %v", err))
	netlab.Require(tb)
}

// node is the cgroup of a world's processes, and the place of its maps.
type node struct {
	dir, cgroup string
	work        chan func()
	workers     sync.WaitGroup
}

// maxWorkers is how many threads of a node connect at a time.
const maxWorkers = 16

// newNode makes a threaded cgroup, to which single threads of this process can be moved.
func newNode(tb testing.TB) *node {
	tb.Helper()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	bpffs, closeDir, err := TemporaryDir()
	must(err)
	parent, err := testCgroup()
	must(err)
	cgroup, err := os.MkdirTemp(parent, "node-")
	must(err)
	must(os.WriteFile(filepath.Join(cgroup, "cgroup.type"), []byte("threaded"), 0))
	n := &node{dir: bpffs, cgroup: cgroup, work: make(chan func())}
	tb.Cleanup(func() {
		close(n.work)
		n.workers.Wait()
		if err := errors.Join(Cleanup(context.Background(), n.config()), closeDir()); err != nil {
			tb.Error(err)
		}
		if err := os.Remove(cgroup); err != nil {
			tb.Error(err)
		}
	})
	for range maxWorkers {
		n.workers.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			enter := func(cgroup string) {
				if err := os.WriteFile(filepath.Join(cgroup, "cgroup.threads"), fmt.Append(nil, unix.Gettid()), 0); err != nil {
					tb.Error(err)
				}
			}
			enter(cgroup)
			defer enter(parent)
			for f := range n.work {
				f()
			}
		})
	}
	return n
}

func (n *node) config() Config { return Config{Cgroup: n.cgroup, Dir: n.dir} }

// do calls f on a thread of the node.
func (n *node) do(f func() error) error {
	done := make(chan error)
	n.work <- func() { done <- f() }
	return <-done
}

// testCgroup is the cgroup of this process's own for all nodes.
var testCgroup = sync.OnceValues(func() (string, error) {
	root, err := cgroupRoot()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, fmt.Sprint("proxier-socketlb-test-", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	return dir, os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, os.Getpid()), 0)
})

// leaveTestCgroup moves this process back and deletes testCgroup.
func leaveTestCgroup() error {
	dir, err := testCgroup()
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.procs"), fmt.Append(nil, os.Getpid()), 0),
		os.Remove(dir))
}
