package conformance

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Churn is what became of the connections of [World.Churn].
type Churn struct {
	// Opened is how many connections and UDP requests were answered.
	Opened int
	// Failures has an entry for each one that was not: refused, reset, without an
	// answer, or answered only because TCP repeated a packet that had been lost. Packets
	// repeated, and UDP requests lost, while the machine stood still are excused, see
	// [NewWorld].
	Failures []error
}

// lossTime is how long after a request was sent a stall can have lost it or its answer: the
// kernel drops packets that wait for the address of a neighbour that does not answer three
// times, once a second (ip-sysctl, neigh/default/mcast_solicit and retrans_time_ms).
const lossTime = 4 * time.Second

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
		begun := time.Now()
		o := h.probe(ctx, t.Protocol, t.Addr, timeout)
		if t.Protocol == v1.ProtocolUDP {
			h.excuses.connections.Add(1)
		}
		switch {
		case o.kind == reached:
			opened++
		case o.kind == silent && t.Protocol == v1.ProtocolUDP && h.stalls.Within(begun, begun.Add(lossTime)):
			h.excuses.excused.Add(1)
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
