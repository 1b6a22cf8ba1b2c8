package conformance

import (
	"fmt"
	"io"
	"os"
	"sync"
	"testing"
	"time"
)

// progress reports worlds that end. It is safe for concurrent use.
type progress struct {
	out   io.Writer
	total int

	mu sync.Mutex
	n  int
}

// newProgress returns the progress of a number of worlds. With -v the testing package reports
// them, and progress writes nothing.
func newProgress(worlds int) *progress {
	p := &progress{out: os.Stderr, total: worlds}
	if testing.Verbose() {
		p.out = io.Discard
	}
	return p
}

// done reports the end of a world. Worlds run concurrently, so their times overlap.
func (p *progress) done(t testing.TB, world string, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n++
	result := "passed"
	switch {
	case t.Failed():
		result = "FAILED"
	case t.Skipped():
		result = "skipped"
	}
	fmt.Fprintf(p.out, "conformance: world %d of at most %d, %q, %s after %.1f s\n", p.n, p.total, world, result, took.Seconds())
}
