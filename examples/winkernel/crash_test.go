package winkernel_test

import (
	"flag"
	"sync/atomic"
	"testing"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
)

var killEvery = flag.Int("kill.every", 1, "TestKilledProcessIsContinued ends the process before every Nth write")

// TestKilledProcessIsContinued plays worlds up to each step, ends the process before each write of
// that step, and lets a new process continue. The state must be the expected one.
func TestKilledProcessIsContinued(t *testing.T) {
	var writes, kills atomic.Int64
	t.Run("world", func(t *testing.T) {
		for _, w := range readWorlds(t) {
			t.Run(w.Name, func(t *testing.T) {
				parallel(t)
				for last := range w.Steps {
					if w.Steps[last].Expect == nil || len(w.Steps[last].HNS) != 0 && w.Steps[last].HNS[0].Fail != nil {
						continue
					}
					n := killBefore(t, w, last, -1)
					if s := &w.Steps[last]; n == 0 && len(s.HNS) != 0 && len(s.Writes.Least) != 0 {
						t.Errorf("what happens to the service in step %q needs %v, and no write was made", s.Name, s.Writes.Least)
					}
					for allowed := range n {
						if writes.Add(1)%int64(*killEvery) == 0 {
							kills.Add(1)
							killBefore(t, w, last, allowed)
						}
						if t.Failed() {
							t.Fatalf("after %d writes of step %q", allowed, w.Steps[last].Name)
						}
					}
				}
			})
		}
	})
	t.Logf("%d kills of %d", kills.Load(), writes.Load())
}

// killBefore plays a world up to a step, and the step with a process that ends after so many
// writes. Then a new process must reach the step's state. killBefore returns the number of writes
// of the first process. If allowed is negative, the process does not end.
func killBefore(t *testing.T, w *world, last, allowed int) (writes int) {
	t.Helper()
	r := newReplay(t, w, allowed < 0) // to count writes, the DLLs are not needed
	r.hurried = true
	for i := range last {
		r.step(t, &w.Steps[i])
	}
	r.play(t, &w.Steps[last])
	r.hns.Before = func(fakehns.Call) error {
		if writes == allowed {
			return winkernel.Code(0x8007045b) // ERROR_SHUTDOWN_IN_PROGRESS; any would do
		}
		writes++
		return nil
	}
	r.sync(t, &w.Steps[last], true)
	r.hns.Before = nil
	if allowed < 0 {
		return writes
	}
	if writes != allowed {
		t.Errorf("the process made %d writes instead of %d", writes, allowed)
	}
	r.start(t)
	r.sync(t, &w.Steps[last], false)
	r.compare(t, &w.Steps[last])
	return writes
}
