package usage

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// report is a testing.TB that records errors.
type report struct {
	testing.TB
	errors []string
}

func (r *report) Helper()             {}
func (r *report) Logf(string, ...any) {}
func (r *report) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

// TestKeepReportsWhatIsLeft leaves one resource at a time, for good or for a while.
func TestKeepReportsWhatIsLeft(t *testing.T) {
	var kept []byte
	var file *os.File
	stop := make(chan struct{})
	for _, c := range []struct {
		what        string
		leave, undo func()
	}{
		{"Goroutines", func() { go func() { <-stop }() }, func() { close(stop) }},
		{"Files", func() {
			var err error
			if file, err = os.Open(os.DevNull); err != nil {
				t.Fatal(err)
			}
		}, func() { file.Close() }},
		{"Heap", func() { kept = make([]byte, 4<<20) }, func() { kept = nil }},
	} {
		before := Now()
		if c.what == "Files" && before.Files == 0 {
			continue // this system does not list them
		}
		c.leave()
		r := &report{}
		before.keep(r, 1<<20, 0)
		runtime.KeepAlive(kept)
		if len(r.errors) != 1 || !strings.Contains(r.errors[0], c.what) {
			t.Errorf("%s: %q", c.what, r.errors)
		}
		time.AfterFunc(20*time.Millisecond, c.undo)
		r = &report{}
		before.keep(r, 1<<20, testtime.Timeout)
		if len(r.errors) != 0 {
			t.Errorf("%s that were about to end: %q", c.what, r.errors)
		}
	}
}

func TestHeapFollowsAllocations(t *testing.T) {
	before := Heap()
	b := make([]byte, 1<<20)
	// The collection may free other objects.
	if grown := Heap() - before; grown < 1<<20-1<<16 || grown > 2<<20 {
		t.Errorf("a megabyte takes %d bytes", grown)
	}
	runtime.KeepAlive(b)
	if left := Heap() - before; left > 1<<19 {
		t.Errorf("%d bytes are left", left)
	}
}
