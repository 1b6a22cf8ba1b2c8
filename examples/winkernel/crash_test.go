package winkernel_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
)

// TestKilledProcessIsContinued plays worlds up to each step, ends the process after each number
// of writes in that step, and lets a new process continue. The state must be the expected one.
func TestKilledProcessIsContinued(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(*worlds, "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no worlds in %s: %v", *worlds, err)
	}
	killed := errors.New("the process was killed")
	for _, file := range files {
		w, err := readWorld(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(w.Name, func(t *testing.T) {
			t.Parallel()
			kills := 0
			for last := range w.Steps {
				if w.Steps[last].Expect == nil || len(w.Steps[last].HNS) != 0 && w.Steps[last].HNS[0].Fail != nil {
					continue
				}
				for allowed := 0; ; allowed++ {
					r := newReplay(t, w)
					for i := range last {
						r.step(t, &w.Steps[i])
					}
					r.play(t, &w.Steps[last])
					left := allowed
					r.hns.Before = func(fakehns.Call) error {
						if left == 0 {
							return killed
						}
						left--
						return nil
					}
					err := r.cursor.Sync(t.Context())
					r.hns.Before = nil
					if !errors.Is(err, killed) {
						break // the step needs no more writes
					}
					kills++
					r.start(t)
					r.sync(t, false)
					r.compare(t, &w.Steps[last])
					if t.Failed() {
						t.Fatalf("after %d writes of step %q", allowed, w.Steps[last].Name)
					}
				}
			}
			t.Logf("%d kills", kills)
		})
	}
}
