//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// within runs f on a thread inside a network namespace, or where it is if that is
// 0. Programs that f starts run inside.
func within(netns int, f func() error) (err error) {
	if netns == 0 {
		return f()
	}
	runtime.LockOSThread()
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("own network namespace: %w", err)
	}
	defer func() {
		back := unix.Setns(home, unix.CLONE_NEWNET)
		unix.Close(home)
		if back != nil {
			// The thread stays locked and ends with its goroutine.
			err = errors.Join(err, fmt.Errorf("return to own network namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()
	if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	return f()
}
