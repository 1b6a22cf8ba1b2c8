package reset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// defaultDelay is the default of [Config].Delay. It only has to cover an EndpointSlice
	// that is written again: Kubernetes removes an endpoint of a failed node after its Pod
	// object is deleted, minutes after the node failed.
	defaultDelay = 10 * time.Second
	// lifetime is the time for which connections are ended: a little more than the 924 s in
	// which Linux gives up a connection (net.ipv4.tcp_retries2 = 15,
	// Documentation/networking/ip-sysctl.rst).
	lifetime     = 20 * time.Minute
	defaultLimit = 65_536
	// lineBurst lines about endpoints are logged one after the other, and then one in each
	// lineEvery.
	lineBurst = 20
	lineEvery = 10 * time.Second
)

// Config is the configuration of a [Resetter]. The zero value is useful: it selects the
// defaults, in the network namespace of the calling thread.
type Config struct {
	// NetNS is an open file of the network namespace to work in; nil is the namespace of
	// the thread that calls [New]. New duplicates the file.
	NetNS *os.File
	// Delay is the time between an endpoint's disappearance and the end of its
	// connections. 0 means 10 seconds. Connections are ended for 20 minutes afterwards.
	// While endpoints keep vanishing, Run treats them in groups, one in each Delay, so an
	// endpoint may wait twice as long.
	Delay time.Duration
	// Limit is the greatest number of pairs of a Service's address and an endpoint that are
	// kept. 0 means 65,536. A further pair replaces the oldest pair of the namespace with
	// the most pairs. Connections of a replaced pair are left alone.
	Limit int
	// Exists, if not nil, reports whether a Service has the TCP endpoint: connections to
	// such an endpoint stay. [Resetter.Run] calls it from its own goroutine. Implement it
	// with [ruleset.Cursor.LookupEndpoint].
	Exists func(netip.AddrPort) bool
	// DestroySockets ends the connections of processes in the network namespace immediately,
	// even if they send nothing (SOCK_DESTROY, CONFIG_INET_DIAG_DESTROY). It reads the list of the
	// namespace's sockets once for each group of endpoints that vanished, and looks up the sockets
	// connected to a Service's address in connection tracking. If the kernel does not support it,
	// Run logs that once.
	DestroySockets bool
	// Hooks holds hooks; nil means none.
	Hooks *Hooks
	// Log receives a line for each group of endpoints whose connections end, at most 20 in a
	// row and then one in 10 seconds, and for errors; nil discards them.
	Log *slog.Logger
}

// Hooks is a set of hooks that a [Resetter] calls. A hook may be nil.
type Hooks struct {
	// Ended is called by [Resetter.Run] for each group of endpoints whose connections end from then on, with the number
	// of local sockets that were destroyed. It must not call the Resetter.
	Ended func(endpoints, sockets int)
	// Limited is called by [Resetter.Run] with the number of pairs replaced since the
	// last call because of [Config].Limit. It must not call the Resetter.
	Limited func(n int)
}

// Resetter ends connections to endpoints that vanished. [New] makes one; the zero value must
// not be used. Its methods but Close may be called concurrently.
type Resetter struct {
	config Config
	log    *slog.Logger
	wake   chan struct{}

	// lines bounds the lines about endpoints, and limitLines those about the limit. notBefore is the earliest time of the
	// next group. Only Run uses them.
	lines, limitLines complaint.Bucket
	notBefore         time.Time

	mu    sync.Mutex
	table table
	plan  *plan
}

// table is the kernel's part. Its methods are not called concurrently, except for destroy with the others but close.
type table interface {
	// add writes pairs that the kernel removes after the lifetime.
	add(ctx context.Context, pairs []pair) error
	// remove deletes pairs. A pair that is missing is no error.
	remove(ctx context.Context, pairs []pair) error
	// list returns all pairs, each with the time for which it stays.
	list(ctx context.Context) (map[pair]time.Duration, error)
	// destroy ends the connections of local sockets for one of whose pairs wanted returns true, and
	// returns their number. It ignores sockets for whose destination to returns false. The error
	// wraps unix.EOPNOTSUPP if the kernel cannot.
	destroy(ctx context.Context, to func(netip.AddrPort) bool, wanted func(pair) bool) (int, error)
	close() error
}

// New returns a Resetter. It creates the table, or reads an earlier process's table. The error
// wraps [ruleset.ErrConfig] if a field of c is negative, and is a [*dataplane.UnsupportedError]
// if the system lacks a feature. New starts no goroutine.
func New(ctx context.Context, c Config) (*Resetter, error) {
	if c.Delay < 0 || c.Limit < 0 {
		return nil, fmt.Errorf("reset: %w: a field is negative", ruleset.ErrConfig)
	}
	t, err := open(c.NetNS)
	if err != nil {
		return nil, err
	}
	r, err := newResetter(ctx, c, t)
	if err != nil {
		return nil, errors.Join(err, t.close())
	}
	return r, nil
}

func newResetter(ctx context.Context, c Config, t table) (*Resetter, error) {
	c.Delay, c.Limit, c.Hooks = cmp.Or(c.Delay, defaultDelay), cmp.Or(c.Limit, defaultLimit), cmp.Or(c.Hooks, &Hooks{})
	if c.Exists == nil {
		c.Exists = func(netip.AddrPort) bool { return false }
	}
	r := &Resetter{
		config: c, log: backendconf.Log(c.Log), wake: make(chan struct{}, 1), table: t,
		lines:      complaint.Bucket{Burst: lineBurst, Every: lineEvery},
		limitLines: complaint.Bucket{Burst: lineBurst, Every: lineEvery},
		plan:       newPlan(c.Delay, c.Limit),
	}
	pairs, err := t.list(ctx)
	if err != nil {
		return nil, fmt.Errorf("reset: cannot read the table: %w", err)
	}
	now := time.Now()
	for _, w := range slices.SortedFunc(maps.Keys(pairs), func(a, b pair) int { return cmp.Compare(pairs[a], pairs[b]) }) {
		r.plan.add(&entry{pair: w, written: true, at: now.Add(pairs[w])})
	}
	return r, nil
}

// Close closes the Resetter's sockets, after Run has returned and when no delta is applied any more. The table
// stays, so that connections end while no process runs; [Cleanup] removes it.
func (r *Resetter) Close() error { return r.table.close() }

// Wrap returns a backend that applies deltas with b, records the endpoints that vanish,
// and has b's limits. Before an endpoint gets connections again, its pairs are removed
// from the table. If that fails, b is not called, and Apply returns the error.
func (r *Resetter) Wrap(b ruleset.Backend) ruleset.Backend { return &wrapped{b, r} }

// wrapped is the backend that [Resetter.Wrap] returns.
type wrapped struct {
	ruleset.Backend
	resetter *Resetter
}

func (w *wrapped) Limits(f tracker.Family) ruleset.Limits { return ruleset.LimitsOf(w.Backend, f) }

func (w *wrapped) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := w.resetter.revive(ctx, d); err != nil {
		return err
	}
	err := w.Backend.Apply(ctx, d)
	w.resetter.record(d, err)
	return err
}

// revive removes the pairs of endpoints that d has again.
func (r *Resetter) revive(ctx context.Context, d *ruleset.Delta) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	back := r.plan.returning(d)
	pairs := slices.Clip(r.plan.leaving)
	for _, e := range back {
		if e.written {
			pairs = append(pairs, e.pair)
		}
	}
	if err := r.table.remove(ctx, pairs); err != nil {
		return fmt.Errorf("reset: cannot remove endpoints that returned: %w", err)
	}
	r.plan.leaving = nil
	for _, e := range back {
		r.plan.remove(e)
	}
	return nil
}

// record notes the endpoints that vanished with d. err is the result of applying d.
func (r *Resetter) record(d *ruleset.Delta, err error) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	next := r.plan.next()
	for i := range d.Changes {
		if c := &d.Changes[i]; c.Acknowledged(err) {
			r.plan.record(c, now)
		}
	}
	if r.plan.gaveWay != 0 || !r.plan.next().Equal(next) {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
}

// Run writes the pairs whose delay has passed, until ctx ends, and returns ctx's error. It logs errors of the kernel and
// tries again after [Config].Delay. It must be called once.
func (r *Resetter) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.wake:
		case <-timer.C:
		}
		timer.Reset(r.step(ctx))
	}
}

// step writes what is due and returns the time until the next step.
func (r *Resetter) step(ctx context.Context) time.Duration {
	r.mu.Lock()
	var pairs []pair
	wait := time.Until(r.notBefore)
	if wait <= 0 {
		pairs, wait = r.writeDue(ctx)
	}
	limited, loser := r.plan.gaveWay, r.plan.loser
	r.plan.gaveWay = 0
	r.mu.Unlock()

	if limited != 0 {
		if f := r.config.Hooks.Limited; f != nil {
			f(limited)
		}
		r.report(&r.limitLines, slog.LevelWarn, "too many addresses of vanished endpoints: connections to the oldest do not end",
			"limit", r.config.Limit, "pairs", limited, "namespace", loser)
	}
	if len(pairs) == 0 {
		return wait
	}
	r.notBefore = time.Now().Add(r.config.Delay)
	sockets, endpoints := r.destroySockets(ctx, pairs), map[netip.AddrPort]struct{}{}
	for _, w := range pairs {
		endpoints[w.endpoint] = struct{}{}
	}
	if f := r.config.Hooks.Ended; f != nil {
		f(len(endpoints), sockets)
	}
	r.report(&r.lines, slog.LevelInfo, "ending connections to vanished endpoints",
		"endpoints", len(endpoints), "addresses", len(pairs), "first", pairs[0].endpoint, "sockets", sockets)
	return wait
}

// report writes a line, if the bucket allows it.
func (r *Resetter) report(lines *complaint.Bucket, level slog.Level, message string, args ...any) {
	suppressed, ok := lines.Take(time.Now())
	if suppressed > 0 {
		args = append(args, "suppressed", suppressed)
	}
	if ok {
		r.log.Log(context.Background(), level, message, args...)
	}
}

// writeDue writes the pairs that are due and returns them, with the time until the next step. The caller holds r.mu.
func (r *Resetter) writeDue(ctx context.Context) ([]pair, time.Duration) {
	if err := r.table.remove(ctx, r.plan.leaving); err != nil {
		r.log.Error("cannot remove pairs of vanished endpoints beyond the limit", "error", err)
		return nil, r.config.Delay
	}
	r.plan.leaving = nil
	now := time.Now()
	due := r.plan.due(now, r.config.Exists)
	pairs := make([]pair, len(due))
	for i, e := range due {
		pairs[i] = e.pair
	}
	if err := r.table.add(ctx, pairs); err != nil {
		for _, e := range due {
			r.plan.change(e, true, now.Add(r.config.Delay))
		}
		r.log.Error("cannot end connections to vanished endpoints", "error", err)
		return nil, r.config.Delay
	}
	next := r.plan.next()
	if next.IsZero() {
		return pairs, lifetime
	}
	return pairs, max(time.Until(next), time.Millisecond)
}

// destroySockets destroys the local sockets of pairs, if the configuration says so, and returns
// their number. Deltas are applied while it runs. It spares endpoints that return.
func (r *Resetter) destroySockets(ctx context.Context, pairs []pair) int {
	if !r.config.DestroySockets {
		return 0
	}
	list, frontends := make(map[pair]bool, len(pairs)), make(map[netip.AddrPort]bool, len(pairs))
	for _, w := range pairs {
		list[w], frontends[w.frontend] = true, true
	}
	to := func(dst netip.AddrPort) bool {
		return frontends[dst] || frontends[netip.AddrPortFrom(anyAddr(dst.Addr()), dst.Port())]
	}
	n, err := r.table.destroy(ctx, to, func(w pair) bool {
		if !list[w] {
			return false
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.plan.endpoints[w.endpoint] != nil
	})
	switch {
	case errors.Is(err, syscall.EOPNOTSUPP):
		r.config.DestroySockets = false
		r.log.Warn("the kernel cannot destroy sockets (CONFIG_INET_DIAG_DESTROY): connections of local processes to vanished endpoints end when the processes send", "error", err)
	case err != nil:
		r.log.Error("cannot destroy sockets of vanished endpoints", "error", err)
	}
	return n
}

// Cleanup removes the table from the network namespace of c. It returns nil if the table is missing, and
// an error if the kernel refuses.
func Cleanup(ctx context.Context, c Config) error { return cleanup(ctx, c.NetNS) }
