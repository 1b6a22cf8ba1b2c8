package conntrack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// pauseFactor is the pause of [Cleaner.Run] after a clean-up, in multiples of its duration:
	// clean-ups take at most a fifth of the time. maxPause is the longest pause.
	pauseFactor = 4
	maxPause    = time.Minute
	// lineBurst lines about failed clean-ups are logged one after the other, and then one in each
	// lineEvery.
	lineBurst = 20
	lineEvery = 10 * time.Second
	// deleteBatch is the number of deletions to send in one call. Their acknowledgements must fit into a socket's
	// default receive buffer, about 200. A delta waits for one batch.
	deleteBatch = 64
)

// Config is the configuration of a [Cleaner]. The zero value selects the kernel's table in
// the network namespace of the calling thread.
type Config struct {
	// NetNS is an open file of the network namespace to work in; nil is the namespace of the thread that calls [New].
	// New duplicates the file. A namespace other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Table, if not nil, replaces the kernel's table, and NetNS is not used. To wrap the kernel's table, see
	// [OpenKernelTable].
	Table FlowTable
	// Zones lists the conntrack zones whose flows are judged. Empty means zone 0, the default zone, alone. A data
	// plane with zones of its own, such as Open vSwitch, lists these.
	Zones []uint16
	// NodePortAddrs lists further addresses at which NodePorts answer, even if [ruleset.Node.NodePorts] does not
	// select them and no interface has them: a virtual address to which the host's rules translate NodePort traffic,
	// or an address of a local route. A flow to a NodePort that was only translated to one of these addresses, with
	// the same port, is not stale while the NodePort exists, because the data plane has a flow of its own for it. Nil
	// means no further addresses.
	NodePortAddrs []netip.Addr
	// Filter, if not nil, reports whether a stale flow may be deleted. The Service is the one that has or last had
	// the flow's frontend, as acknowledged. A flow that Filter spares is judged again only after a change of its
	// frontend, or by the next full delta. The goroutine that flushes calls Filter, possibly twice for a flow. Filter
	// must be quick and must not call the Cleaner.
	Filter func(*ruleset.Port, Flow) bool
	// Log receives a line for each clean-up of [Cleaner.Run] that failed, at most 20 in a row and
	// then one in 10 seconds; nil discards them.
	Log *slog.Logger
	// Hooks has hooks for each clean-up. It may be nil.
	Hooks *Hooks
}

// Cleaner deletes stale UDP flows. The methods are safe for concurrent use. For each frontend of a UDP Service, a
// Cleaner holds a pointer to the Service.
//
// [New] makes one; the zero value must not be used.
type Cleaner struct {
	trace  *Hooks
	table  FlowTable
	close  func() error // closes the table that New opened
	runner *runner.Runner
	// open ends when Close is called.
	open    context.Context
	endOpen context.CancelFunc

	// flushing is held while the table is read. It is locked before mu.
	flushing sync.Mutex
	// mu is held while a delta is applied, for each flow that is judged, and while a batch of flows is judged again
	// and deleted: no flow is deleted while a change of its Service is partly in effect, and no delta waits for a
	// dump.
	mu      sync.Mutex
	stale   [2]*staleFlows // IPv4, IPv6
	pending atomic.Bool
}

// New returns a Cleaner. Unless cfg.Table is set, New opens netlink sockets, which needs CAP_NET_ADMIN in the
// namespace's user namespace. The error is a [*dataplane.UnsupportedError] if the system has no such table or no
// access to it over netlink (CONFIG_NF_CT_NETLINK). New starts no goroutine.
func New(ctx context.Context, cfg Config) (*Cleaner, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for _, a := range cfg.NodePortAddrs {
		if !a.IsValid() {
			return nil, errors.New("conntrack: NodePortAddrs has an invalid address")
		}
	}
	c := &Cleaner{
		trace: cfg.Hooks,
		table: cfg.Table,
		close: func() error { return nil },
		stale: [2]*staleFlows{newStaleFlows(tracker.IPv4), newStaleFlows(tracker.IPv6)},
	}
	for _, p := range c.stale {
		p.configure(cfg)
	}
	var err error
	if c.runner, err = newRunner(c.Flush, backendconf.Log(cfg.Log)); err != nil {
		return nil, err
	}
	if c.table == nil {
		k, err := OpenKernelTable(cfg)
		if err != nil {
			return nil, err
		}
		c.table, c.close = k, k.Close
	}
	c.open, c.endOpen = context.WithCancel(context.Background())
	return c, nil
}

func newRunner(flush func(context.Context) error, log *slog.Logger) (*runner.Runner, error) {
	lines := complaint.Bucket{Burst: lineBurst, Every: lineEvery}
	return runner.New(runner.Config{
		Pace: runner.Pace{Factor: pauseFactor, Most: maxPause},
		Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) {
			if i.Err == nil || errors.Is(i.Err, context.Canceled) {
				return
			}
			suppressed, ok := lines.Take(time.Now())
			if !ok {
				return
			}
			args := []any{"error", i.Err}
			if suppressed > 0 {
				args = append(args, "suppressed", suppressed)
			}
			log.Warn("cannot delete stale UDP flows, trying again", args...)
		}},
	}, flush)
}

// Close closes what New opened, but not a [Config.Table], and ends Run. Afterwards the backends of Wrap only apply
// deltas, and Flush returns an error that wraps [os.ErrClosed].
func (c *Cleaner) Close() error {
	c.endOpen()
	c.flushing.Lock()
	defer c.flushing.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending.Store(false)
	err := c.close()
	c.close = func() error { return nil }
	return err
}

// Wrap returns a backend that applies deltas with b and notes the flows that they may have made stale, if b
// acknowledges them. It has the limits of b ([ruleset.Limiter]) and returns b's errors. The Cleaner follows one
// backend, of one [ruleset.Cursor]. Noting takes time proportional to the changes of UDP Services.
func (c *Cleaner) Wrap(b ruleset.Backend) ruleset.Backend { return &wrapped{b, c} }

type wrapped struct {
	ruleset.Backend
	cleaner *Cleaner
}

func (w *wrapped) Limits(f tracker.Family) ruleset.Limits { return ruleset.LimitsOf(w.Backend, f) }

func (w *wrapped) Apply(ctx context.Context, d *ruleset.Delta) error {
	c := w.cleaner
	err := c.apply(ctx, w.Backend, d)
	if (err != nil || !d.More) && c.Pending() {
		c.runner.Trigger()
	}
	return err
}

var errUnfinished = errors.New("Apply did not return")

func (c *Cleaner) apply(ctx context.Context, b ruleset.Backend, d *ruleset.Delta) (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err = errUnfinished
	defer func() { c.record(d, err) }()
	err = b.Apply(ctx, d)
	return err
}

// record notes a delta and the error of its Apply. The caller holds c.mu.
func (c *Cleaner) record(d *ruleset.Delta, err error) {
	if c.open.Err() != nil {
		return
	}
	for i := range d.Changes {
		ch := &d.Changes[i]
		for _, p := range c.stale {
			switch {
			case !p.concerns(ch.Key):
			case ch.Acknowledged(err):
				p.record(ch)
			default:
				p.recordFailure(ch)
			}
		}
	}
	for _, p := range c.stale {
		if ruleset.InEffect(err) {
			p.setNode(d.Node)
			if d.Full {
				p.examineAll()
			}
		}
	}
	c.updatePending()
}

func (c *Cleaner) updatePending() {
	c.pending.Store(c.stale[0].pending() || c.stale[1].pending())
}

// Pending reports whether Flush would examine the table: a change that needs it was
// noted since the last Flush began, or the last Flush failed.
func (c *Cleaner) Pending() bool { return c.pending.Load() }

// Run calls Flush after each Sync that may have left stale flows, until ctx ends or the Cleaner is closed. It returns
// ctx's error or [os.ErrClosed]. After a Flush it pauses for four times as long as the Flush took, at most for a
// minute. It logs errors and tries again. Only one Run may be in progress.
func (c *Cleaner) Run(ctx context.Context) error {
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.open, cancel)()
	err := c.runner.Run(both)
	if ctx.Err() == nil && c.open.Err() != nil {
		return fmt.Errorf("conntrack: %w", os.ErrClosed)
	}
	return err
}

// Flush reads the table once for each family with flows to examine, and deletes those that are stale. Deltas are
// applied while it reads. If reading or deleting fails, or may be incomplete, the family stays pending for the next
// Flush. After an error that wraps [ErrIncomplete], the next Flush may succeed. An agent that does not call Run calls
// Flush after each Sync, and again after an error.
func (c *Cleaner) Flush(ctx context.Context) error {
	c.flushing.Lock()
	defer c.flushing.Unlock()
	if c.open.Err() != nil {
		return fmt.Errorf("conntrack: %w", os.ErrClosed)
	}
	info, start := FlushInfo{}, time.Now()
	for _, p := range c.stale {
		one, begun := FlushInfo{}, time.Now()
		examined, err := c.flush(ctx, p, &one)
		if !examined {
			continue
		}
		if err != nil {
			one.Err = fmt.Errorf("conntrack: %s: %w", p.family, err)
		}
		one.Duration = time.Since(begun)
		c.trace.flushedFamily(p.family, one)
		info.add(one)
	}
	if info.Dumps != 0 || info.Err != nil {
		info.Duration = time.Since(start)
		c.trace.flushed(info)
	}
	return info.Err
}

// flush cleans up one family. examined is false if there is nothing to examine.
func (c *Cleaner) flush(ctx context.Context, p *staleFlows, info *FlushInfo) (examined bool, err error) {
	c.mu.Lock()
	if !p.pending() {
		c.mu.Unlock()
		return false, nil
	}
	q := p.take()
	c.updatePending()
	c.mu.Unlock()
	err = errUnfinished
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			p.giveBack(q)
		}
		c.updatePending()
	}()
	err = c.clean(ctx, p, q, info)
	return true, err
}

func (c *Cleaner) clean(ctx context.Context, p *staleFlows, q *queue, info *FlushInfo) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	local, err := c.table.LocalAddrs(ctx, p.family)
	if err != nil {
		return err
	}
	stale := p.judge(q, local)
	isStale := func(f Flow) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return stale(&f)
	}
	var doomed []Flow
	info.Dumps++
	err = c.table.Dump(ctx, p.family, func(f *Flow) {
		info.Seen++
		if isStale(*f) {
			doomed = append(doomed, *f)
		}
	})
	// Flows from an incomplete dump are stale, too.
	for batch := range slices.Chunk(doomed, deleteBatch) {
		errDelete := c.remove(ctx, batch, stale, info)
		if errDelete != nil {
			err = errors.Join(err, errDelete)
			break
		}
	}
	return err
}

// remove deletes the flows of batch that are still stale: Services may have changed since the dump.
func (c *Cleaner) remove(ctx context.Context, batch []Flow, stale func(*Flow) bool, info *FlushInfo) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	batch = slices.DeleteFunc(batch, func(f Flow) bool { return !stale(&f) })
	if len(batch) == 0 {
		return nil
	}
	info.Stale += len(batch)
	n, err := c.table.Delete(ctx, batch)
	info.Deleted += n
	return err
}

// Hooks is a set of hooks that a [Cleaner] calls. Any hook, and the *Hooks itself, may be nil. The goroutine that
// flushes calls the hooks, which must not call the Cleaner.
type Hooks struct {
	// Flushed is called after each clean-up that examined any family.
	Flushed func(FlushInfo)
	// FlushedFamily is called for each examined family, before Flushed.
	FlushedFamily func(tracker.Family, FlushInfo)
}

// FlushInfo describes one clean-up.
type FlushInfo struct {
	// Dumps is the number of dumps of the table, one for each examined family.
	Dumps int
	// Seen is the number of flows in the dumps.
	Seen int
	// Stale is the number of stale flows that [Config.Filter] did not spare. Deleted is the number of deleted flows;
	// others may have ended by themselves.
	Stale, Deleted int
	// Duration is how long the clean-up took.
	Duration time.Duration
	// Err is the error after which the next Flush repeats the clean-up, or nil.
	Err error
}

func (t *Hooks) flushed(i FlushInfo) {
	if t != nil && t.Flushed != nil {
		t.Flushed(i)
	}
}

func (t *Hooks) flushedFamily(f tracker.Family, i FlushInfo) {
	if t != nil && t.FlushedFamily != nil {
		t.FlushedFamily(f, i)
	}
}

func (i *FlushInfo) add(o FlushInfo) {
	i.Dumps += o.Dumps
	i.Seen += o.Seen
	i.Stale += o.Stale
	i.Deleted += o.Deleted
	i.Err = errors.Join(i.Err, o.Err)
}
