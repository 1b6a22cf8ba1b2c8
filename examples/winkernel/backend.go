package winkernel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Backend programs Services into Windows' Host Networking Service. It is a
// [ruleset.Backend] for both families. Its methods are safe for concurrent use.
type Backend struct {
	config Config
	open   context.Context // done when the backend is closed
	end    context.CancelFunc

	mu sync.Mutex
	// state is what the service has, or nil if that is unknown. started is set by the first Apply.
	state   *state
	started bool
	// replaces is set once the service turned out to be unable to modify load balancers.
	replaces   bool
	complaints *complaint.Log
}

// New returns a Backend. It calls [Probe], and writes nothing.
func New(ctx context.Context, c Config) (*Backend, error) {
	c, err := c.withDefaults(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.probe(); err != nil {
		return nil, err
	}
	b := &Backend{config: c, complaints: complaint.NewLog(c.Log)}
	b.open, b.end = context.WithCancel(context.Background())
	return b, nil
}

var _ dataplane.Backend = (*Backend)(nil)

// Close ends Watch. What was programmed stays in effect. Further calls of Apply and Check
// return [os.ErrClosed]. It returns nil.
func (b *Backend) Close() error {
	b.end()
	return nil
}

// Limits returns the features that HNS lacks, which the package documentation lists.
func (b *Backend) Limits(tracker.Family) ruleset.Limits {
	return ruleset.Limits{Lacks: ruleset.LacksSourceRanges | ruleset.LacksAffinityTimeout | ruleset.LacksWeights |
		ruleset.LacksHash | ruleset.LacksEndpointPorts}
}

// Traffic returns no counters: the service has none.
func (b *Backend) Traffic(context.Context) (*dataplane.Traffic, error) {
	if b.open.Err() != nil {
		return nil, os.ErrClosed
	}
	return &dataplane.Traffic{Services: map[tracker.Key]dataplane.Counters{}}, nil
}

// Apply implements [ruleset.Backend]. It writes load balancers and endpoints one by one.
// A failed write fails its Service alone; the Service's other load balancers still
// change. If the service is not running, Apply fails as a whole and forgets nothing.
//
// A Service whose pod has no endpoint yet is programmed without the pod and reported in the
// *PartialError with a *[WaitingError], so that it is offered again.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open.Err() != nil {
		return os.ErrClosed
	}
	b.started = true
	if d.Full {
		b.state = nil
		s, err := b.config.read()
		if err == nil {
			err = b.config.forNetwork(&s.network)
		}
		if err != nil {
			return err
		}
		b.state = s
	}
	if b.state == nil {
		return ruleset.ErrNeedFull
	}
	a := &apply{state: b.state, backend: b, ctx: ctx, full: d.Full, failed: map[tracker.Key]error{}}
	err := a.run(d.Changes)
	switch {
	case err != nil && errors.Is(err, ErrNotFound):
		return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	case err == nil && len(a.failed) != 0:
		return &ruleset.PartialError{Failed: a.failed}
	}
	return err
}

// WaitingError means that a Service is in effect without some of its endpoints, because the
// node's network plugin has not yet made their HNS endpoints, or not yet deleted old ones.
type WaitingError struct {
	// Addrs holds the endpoints' addresses, sorted.
	Addrs []netip.Addr
}

// Error returns a message with the addresses, at most eight of them.
func (e *WaitingError) Error() string {
	text := "network plugin has no endpoint yet for " + strings.Trim(fmt.Sprint(e.Addrs[:min(len(e.Addrs), 8)]), "[]")
	if n := len(e.Addrs) - 8; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// Check compares the service with the backend's writes. It returns a *[dataplane.DriftError]
// if another process changed a load balancer or an endpoint, if the network was replaced, or
// if the network plugin made an endpoint that a Service waits for. The next delta must then
// be a full one, which Apply requests. Other errors mean that the check failed.
//
// It lists all endpoints and load balancers. Before the first Apply it returns nil.
func (b *Backend) Check(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open.Err() != nil {
		return os.ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	switch {
	case !b.started:
		return nil
	case b.state == nil:
		return fmt.Errorf("winkernel: %w: the state of the service is unknown", ruleset.ErrNeedFull)
	}
	now, err := b.config.read()
	if err != nil {
		return err
	}
	what, family := b.state.differs(now)
	if what == "" {
		return nil
	}
	b.state = nil
	return &dataplane.DriftError{Backend: "winkernel", Family: family, What: what}
}

// Watch calls Check at the interval until ctx is done or the backend is closed, and drifted
// with each of its errors. It returns ctx's error or [os.ErrClosed]. The function drifted
// should request a full delta from the cursor and a sync.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	open, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.open, cancel)()
	err := dataplane.Watch(open, interval, b.Check, drifted)
	if b.open.Err() != nil && ctx.Err() == nil {
		return os.ErrClosed
	}
	return err
}
