// Package netns runs functions inside a network namespace.
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// own is the network namespace of the calling thread.
const own = "/proc/thread-self/ns/net"

// Namespace is a network namespace. Its methods may be called concurrently, except
// Close.
type Namespace struct {
	file *os.File
	info os.FileInfo // identifies the namespace
}

// Open returns the namespace that f is an open file of, or that of the calling
// thread if f is nil. The caller may close f afterwards and must call Close.
func Open(f *os.File) (*Namespace, error) {
	n := &Namespace{}
	var err error
	if f == nil {
		n.file, err = os.Open(own)
	} else {
		n.file, err = dup(f)
	}
	if err == nil {
		n.info, err = n.file.Stat()
	}
	if err != nil {
		n.file.Close()
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	return n, nil
}

// New creates a network namespace. The calling thread stays in its own.
func New() (*Namespace, error) {
	home, err := Open(nil)
	if err != nil {
		return nil, err
	}
	defer home.Close()
	var made *Namespace
	err = home.leave(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create network namespace: %w", os.NewSyscallError("unshare", err))
		}
		made, err = Open(nil)
		return err
	})
	return made, err
}

func dup(f *os.File) (file *os.File, err error) {
	err = control(f, func(old int) error {
		fd, err := unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return os.NewSyscallError("fcntl", err)
		}
		file = os.NewFile(uintptr(fd), f.Name())
		return nil
	})
	return file, err
}

// control calls f with the descriptor of an open file, which stays open until f
// returns.
func control(file *os.File, f func(fd int) error) error {
	c, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if c.Control(func(fd uintptr) { result = f(int(fd)) }) != nil {
		return os.ErrClosed // SyscallConn returns no other error
	}
	return result
}

// File returns the open file of the namespace, which Close closes.
func (n *Namespace) File() *os.File { return n.file }

// Close releases the namespace. Do fails afterwards.
func (n *Namespace) Close() error { return n.file.Close() }

// Do calls f on a thread in the namespace, which no other goroutine uses until f returns. Processes that f starts and
// sockets that f opens are in the namespace. Do needs CAP_SYS_ADMIN unless the calling thread is in the namespace
// already.
func (n *Namespace) Do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread() // leave locks it a second time
	home, err := Open(nil)
	if err != nil {
		return err
	}
	defer home.Close()
	if os.SameFile(home.info, n.info) {
		return f()
	}
	return home.leave(func() error {
		if err := n.enter(); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// In calls f as [Namespace.Do] does, in the namespace that file is an open file of, or in that of the calling thread
// if file is nil. The first thread of the process stays in its namespace, which other programs take for that of the
// process (/proc/PID/ns/net).
func In(file *os.File, f func() error) error {
	n, err := Open(file)
	if err != nil {
		return err
	}
	defer n.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if unix.Gettid() != unix.Getpid() {
		return n.Do(f)
	}
	// While the first thread is locked, another goroutine runs on another one.
	var panicked any
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
			}
		}()
		err = n.Do(f)
	}()
	<-done
	if panicked != nil {
		panic(panicked)
	}
	return err
}

// leave calls f, which may move the calling thread to another namespace, and brings
// the thread back to n.
func (n *Namespace) leave(f func() error) (err error) {
	runtime.LockOSThread()
	defer func() {
		if back := n.enter(); back != nil {
			// The thread stays locked to this goroutine and ends with it, so that no other
			// goroutine runs in the wrong namespace.
			err = errors.Join(err, fmt.Errorf("return to the calling thread's network namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}

func (n *Namespace) enter() error {
	return control(n.file, func(fd int) error {
		return os.NewSyscallError("setns", unix.Setns(fd, unix.CLONE_NEWNET))
	})
}
