// Package netns runs functions inside a network namespace.
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

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
func Do(ns *os.File, f func() error) (err error) {
	runtime.LockOSThread()
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
	here, err := os.Stat(own)
	if err != nil {
		return err
	}
	if there, err := ns.Stat(); err != nil || os.SameFile(here, there) {
		return err
	}
	return os.NewSyscallError("setns", unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET))
}
