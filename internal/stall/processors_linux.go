package stall

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// processors returns a function for each processor that this process may use. The function binds
// the calling goroutine to a thread and the thread to the processor, for ever: the thread ends
// with the goroutine.
func processors() (pins []func()) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return []func(){func() {}}
	}
	for i := range 64 * len(all) {
		if all.IsSet(i) {
			pins = append(pins, func() {
				runtime.LockOSThread()
				var one unix.CPUSet
				one.Set(i)
				_ = unix.SchedSetaffinity(0, &one) // without it, the goroutine polls anywhere
			})
		}
	}
	return pins
}
