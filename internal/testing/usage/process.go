// Package usage measures the resource usage of tests: goroutines, files, the heap, and the
// lengths of the maps and slices of a structure.
package usage

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// Process is the resource usage of a process.
type Process struct {
	Goroutines int
	// Files is the number of open file descriptors, 0 on systems without /proc/self/fd.
	Files int
	// Heap is the result of [Heap].
	Heap int
}

// Now returns the resource usage of this process.
func Now() Process {
	p := Process{Heap: Heap(), Goroutines: runtime.NumGoroutine()}
	if list, err := os.ReadDir("/proc/self/fd"); err == nil {
		p.Files = len(list)
	}
	return p
}

// Heap returns the number of bytes of the heap in use after a collection.
func Heap() int {
	for range 3 { // for finalizers, and for objects that finalizers release
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// Keep fails the test if this process uses more resources than before: more goroutines or
// files, or more than slack bytes more of the heap. It waits for goroutines that are about
// to end: a goroutine may exist, and have open files, after it has sent its result. No other
// test may run at the same time.
func (before Process) Keep(tb testing.TB, slack int) {
	tb.Helper()
	before.keep(tb, slack, testtime.Timeout)
}

func (before Process) keep(tb testing.TB, slack int, timeout time.Duration) {
	tb.Helper()
	for deadline := time.Now().Add(timeout); ; time.Sleep(10 * time.Millisecond) {
		now := Now()
		if now.Goroutines <= before.Goroutines && now.Files <= before.Files && now.Heap <= before.Heap+slack {
			tb.Logf("before %+v, after %+v", before, now)
			return
		}
		if time.Now().After(deadline) {
			buf := make([]byte, 64<<10)
			tb.Errorf("resource usage has grown: before %+v, after %+v, with %d more bytes allowed; goroutines:\n%s", before, now, slack, buf[:runtime.Stack(buf, true)])
			return
		}
	}
}
