package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Target is an address of a Service with endpoints.
type Target struct {
	// Addr is the address of a frontend, or a NodePort at one of the node's addresses.
	Addr netip.AddrPort
	// Protocol is TCP or UDP.
	Protocol v1.Protocol
}

// Churn is the result of [World.Churn].
type Churn struct {
	// Opened is the number of successful connections and UDP requests.
	Opened int
	// Failures has an entry for each failed connection: refused, reset, without a reply, or successful only because
	// TCP retransmitted a lost packet, unless the machine stalled (see [NewWorld]).
	Failures []error
}

// lossTime is the time after a request in which a stall can lose it or its reply: the kernel drops packets that wait
// for the address of a neighbor that does not answer three times, once a second (ip-sysctl,
// neigh/default/mcast_solicit and retrans_time_ms).
const lossTime = 4 * time.Second

// maxFailures bounds the failures stored for one kind of connection.
const maxFailures = 100

// maxEnded is the number of sockets of a client that the data plane may end one after the other.
const maxEnded = 3

// Churn opens connections continuously while f runs: from an external client and from a local pod to each target, one
// after another for each of these pairs. Each pair connects once before f and once after it. A UDP connection is one
// request with its reply, from a new port.
func (w *World) Churn(to []Target, f func()) Churn {
	ctx, l := w.tb.Context(), w.lab()
	var (
		mu          sync.Mutex
		out         Churn
		started, wg sync.WaitGroup
		done        = make(chan struct{})
	)
	for _, from := range []host{l.net.hosts["client1"], l.net.hosts["pod1"]} {
		for _, t := range to {
			started.Add(1)
			wg.Go(func() {
				opened, failures := from.churn(ctx, t, l.timeout(), l.options.EndsSockets, done, started.Done)
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

// churn connects until done is closed, and calls started after the first connection. ends is
// Options.EndsSockets.
func (h host) churn(ctx context.Context, t Target, timeout time.Duration, ends bool, done <-chan struct{}, started func()) (opened int, failures []error) {
	ended := 0 // sockets one after the other
	for first, last := true, false; ; first = false {
		begun := time.Now()
		o := h.probe(ctx, t.Protocol, t.Addr, timeout)
		if t.Protocol == v1.ProtocolUDP {
			h.excuses.connections.Add(1)
		}
		switch {
		case o.Kind == netlab.Reached:
			opened++
			ended = 0
		case ends && t.Protocol == v1.ProtocolUDP && errors.Is(o.Err, unix.ECONNABORTED) && ended < maxEnded:
			ended++
		case o.Kind == netlab.Silent && t.Protocol == v1.ProtocolUDP && h.stalls.Within(begun, begun.Add(lossTime)):
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
