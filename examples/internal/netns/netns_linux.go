// Package netns runs functions inside a network namespace, and reads its lists.
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Whole calls list again if the kernel reports that the list changed while it was read.
func Whole[T any](list func() ([]T, error)) (out []T, err error) {
	for range 10 {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// own is the network namespace of the calling thread.
const own = "/proc/thread-self/ns/net"

// Open opens the namespace that f is an open file of, or that of the calling thread if f is nil.
func Open(f *os.File) (*os.File, error) {
	path := own
	if f != nil {
		path = fmt.Sprintf("/proc/thread-self/fd/%d", f.Fd())
	}
	file, err := os.Open(path)
	runtime.KeepAlive(f)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	return file, nil
}

// Do calls f on a thread in the namespace that ns is an open file of. No other goroutine uses the
// thread until f returns. Do needs CAP_SYS_ADMIN unless the calling thread is in the namespace.
//
// The thread is not the first one of the process: other programs take its namespace for that of the
// process (/proc/PID/ns/net).
func Do(ns *os.File, f func() error) (err error) {
	runtime.LockOSThread()
	if inside, err := isInside(ns); unix.Gettid() != unix.Getpid() || inside || err != nil {
		return do(ns, f)
	}
	// While the first thread is locked, another goroutine runs on another one.
	defer runtime.UnlockOSThread()
	var panicked any
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
			}
		}()
		runtime.LockOSThread()
		err = do(ns, f)
	}()
	<-done
	if panicked != nil {
		panic(panicked)
	}
	return err
}

// do is Do on the calling thread, which is locked, and unlocks it.
func do(ns *os.File, f func() error) (err error) {
	home, err := Open(nil)
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	defer func() {
		if back := enter(home); back != nil {
			// The thread stays locked to this goroutine and ends with it.
			err = errors.Join(err, fmt.Errorf("return to the calling thread's network namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()
	if err := enter(ns); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	return f()
}

// enter moves the calling thread into a namespace, unless it is there.
func enter(ns *os.File) error {
	if inside, err := isInside(ns); err != nil || inside {
		return err
	}
	return os.NewSyscallError("setns", unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET))
}

// isInside reports whether the calling thread is in a namespace.
func isInside(ns *os.File) (bool, error) {
	here, err := os.Stat(own)
	if err != nil {
		return false, err
	}
	there, err := ns.Stat()
	return err == nil && os.SameFile(here, there), err
}
