package holdings

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testtime"
)

// Process is what a process has.
type Process struct {
	Goroutines int
	// Files is how many file descriptors are open, 0 where there is no /proc/self/fd.
	Files int
	// Heap is what [Heap] returns.
	Heap int
}

// Now returns what this process has.
func Now() Process {
	p := Process{Heap: Heap(), Goroutines: runtime.NumGoroutine()}
	if list, err := os.ReadDir("/proc/self/fd"); err == nil {
		p.Files = len(list)
	}
	return p
}

// Keep fails the test if this process has more than before: goroutines, files, or
// heap by more than slack bytes. What is about to end gets time to: a goroutine has
// told its result before it is gone, and closes files even after that. Tests that
// are not over must not run beside it.
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
			tb.Errorf("something is left: before %+v, after %+v, where %d bytes more are allowed; goroutines:\n%s", before, now, slack, buf[:runtime.Stack(buf, true)])
			return
		}
	}
}
