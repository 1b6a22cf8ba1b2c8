package stall

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// most is the number of processors up to which each is polled. Every world of packets has a
// Detector, and a thread of each for each processor of a large machine would be a load of its own.
const most = 4

// processors returns a function for each processor that this process may use. The function binds
// the calling goroutine to a thread and the thread to the processor, for ever: the thread ends
// with the goroutine. If there are many processors, it returns one function that does nothing.
func processors() (pins []func()) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil || all.Count() == 0 || all.Count() > most {
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
