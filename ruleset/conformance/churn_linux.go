package conformance

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Churn is what became of the connections of [World.Churn].
type Churn struct {
	// Opened is how many connections and UDP requests were answered.
	Opened int
	// Failures has an entry for each one that was not: refused, reset, without an
	// answer, or answered only because TCP repeated a packet that had been lost. Packets
	// repeated while the machine stood still are excused, see [NewWorld].
	Failures []error
}

// maxFailures is how many failures of one kind of connection are kept.
const maxFailures = 100

// Churn opens connections all the while that f runs: from a client outside and
// from a local pod to each target, one after the other for each of these pairs. f
// is called when every pair has connected once, and each connects once more after
// it has returned. UDP connections are one request and its answer, from a new
// port.
func (w *World) Churn(to []Target, f func()) Churn {
	ctx := w.tb.Context()
	var (
		mu          sync.Mutex
		out         Churn
		started, wg sync.WaitGroup
		done        = make(chan struct{})
	)
	for _, from := range []host{w.net.hosts["client1"], w.net.hosts["pod1"]} {
		for _, t := range to {
			started.Add(1)
			wg.Go(func() {
				opened, failures := from.churn(ctx, t, w.timeout(), done, started.Done)
				mu.Lock()
				defer mu.Unlock()
				out.Opened += opened
				out.Failures = append(out.Failures, failures...)
			})
		}
	}
	stop := sync.OnceFunc(func() {
		close(done)
		wg.Wait()
	})
	defer stop() // f may end the test
	started.Wait()
	f()
	stop()
	return out
}

// churn connects until done, and calls started after the first time.
func (h host) churn(ctx context.Context, t Target, timeout time.Duration, done <-chan struct{}, started func()) (opened int, failures []error) {
	for first, last := true, false; ; first = false {
		o := h.probe(ctx, t.Protocol, t.Addr, timeout)
		switch {
		case o.kind == reached:
			opened++
		case len(failures) < maxFailures:
			failures = append(failures, fmt.Errorf("%s from %s to %s: %s", t.Protocol, h.name, t.Addr, o))
		}
		if first {
			started()
		}
		if last {
			return opened, failures
		}
		select {
		case <-done:
			last = true
		default:
		}
	}
}
