// Package threadcgroup runs functions on threads in a cgroup of their own. One process can
// thus own sockets of a node and sockets of other machines, which programs attached to the
// cgroup tell apart. It needs the right to create cgroups. The package exists on Linux only.
package threadcgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Parent is a cgroup for this process. Threads can move only between cgroups below the one
// that holds the process.
type Parent struct{ outer, path string }

// NewParent creates a cgroup below outer, a folder of a cgroup2 file system, and moves this
// process into it. The caller must call Close.
func NewParent(outer string) (*Parent, error) {
	p := &Parent{outer, filepath.Join(outer, fmt.Sprint("proxier-", os.Getpid()))}
	if err := os.Mkdir(p.path, 0o755); err != nil {
		return nil, err
	}
	if err := move(p.path, "cgroup.procs", os.Getpid()); err != nil {
		return nil, errors.Join(err, os.Remove(p.path))
	}
	return p, nil
}

// Close moves this process back and deletes the cgroup.
func (p *Parent) Close() error {
	return errors.Join(move(p.outer, "cgroup.procs", os.Getpid()), os.Remove(p.path))
}

func move(cgroup, file string, id int) error {
	return os.WriteFile(filepath.Join(cgroup, file), fmt.Append(nil, id), 0)
}

const threads = 16

// Group is a cgroup with a few threads of this process. Its methods are safe for concurrent
// use.
type Group struct {
	path    string
	work    chan func()
	threads errgroup.Group
}

// New creates a cgroup and starts its threads. The caller must call Close.
func (p *Parent) New() (*Group, error) {
	path, err := os.MkdirTemp(p.path, "node-")
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(path, "cgroup.type"), []byte("threaded"), 0); err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	g := &Group{path: path, work: make(chan func())}
	for range threads {
		g.threads.Go(func() error {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			err := move(path, "cgroup.threads", unix.Gettid())
			for f := range g.work {
				f()
			}
			return errors.Join(err, move(p.path, "cgroup.threads", unix.Gettid()))
		})
	}
	return g, nil
}

// Path returns the cgroup's folder.
func (g *Group) Path() string { return g.path }

// Do calls f on one of the threads and returns its error.
func (g *Group) Do(f func() error) error {
	done := make(chan error)
	g.work <- func() { done <- f() }
	return <-done
}

// Close ends the threads and deletes the cgroup. Do must not be called afterwards.
func (g *Group) Close() error {
	close(g.work)
	return errors.Join(g.threads.Wait(), os.Remove(g.path))
}
