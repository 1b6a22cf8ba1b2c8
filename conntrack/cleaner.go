package conntrack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Config is the configuration of a [Cleaner]. The zero value selects the kernel's table in
// the network namespace of the calling thread.
type Config struct {
	// NetNS is an open file of the network namespace to work in; nil is the namespace of
	// the thread that calls [New]. New duplicates the file, and working in a namespace
	// other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Table, if not nil, replaces the kernel's table, and NetNS is not used. A caller
	// that wraps the kernel's table opens it with [OpenKernelTable].
	Table Table
	// Zones lists the conntrack zones whose flows are judged. Empty means zone 0, the
	// default zone, alone. A data plane that tracks connections in its own zones, such
	// as Open vSwitch, lists these.
	Zones []uint16
	// NodePortAddrs lists further addresses at which NodePorts answer, even if
	// [ruleset.Node.NodePorts] does not select them and no interface has them: a virtual
	// address to which the host's rules translate NodePort traffic before the data
	// plane sees it, or an address of a local route. A flow to a NodePort that was
	// only translated to one of these addresses, with the same port, is not stale while
	// the NodePort exists, because the data plane has a flow of its own for it. Nil means
	// no further addresses.
	NodePortAddrs []netip.Addr
	// Filter, if not nil, reports whether a stale flow may be deleted. The Service is the
	// one that has the flow's frontend or, if no Service has it, the one that last had it,
	// as last acknowledged. A flow that Filter spares is judged again only after a change
	// of its frontend, or by the next full delta. The goroutine that flushes calls Filter,
	// which must be quick and must not call the Cleaner.
	Filter func(*ruleset.Service, Flow) bool
	// Log receives one line for each clean-up that failed inside [After]; nil discards them.
	Log *slog.Logger
	// Trace has hooks for each clean-up. It may be nil.
	Trace *Trace
}

// Cleaner deletes stale UDP flows. [Cleaner.Record] takes the changes of one
// [ruleset.Cursor], and [Cleaner.Flush] examines the table. [After] calls both. The methods are
// safe for concurrent use. For each frontend of a UDP Service, a Cleaner holds a pointer to the
// Service.
//
// [New] makes one; the zero value must not be used.
type Cleaner struct {
	log   *slog.Logger
	trace *Trace
	table Table
	close func() error // closes the table that New opened

	mu      sync.Mutex // held while flushing
	closed  bool
	stale   [2]*staleFlows // IPv4, IPv6
	pending atomic.Bool
}

// New returns a Cleaner. Unless cfg.Table is set, New opens netlink sockets, which needs
// CAP_NET_ADMIN in the namespace's user namespace. The error is a
// [*dataplane.UnsupportedError] if the system has no such table or no access to it over
// netlink (CONFIG_NF_CT_NETLINK). New starts no goroutine.
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
		log:   backendconf.Log(cfg.Log),
		trace: cfg.Trace,
		table: cfg.Table,
		close: func() error { return nil },
		stale: [2]*staleFlows{newStaleFlows(tracker.IPv4), newStaleFlows(tracker.IPv6)},
	}
	for _, p := range c.stale {
		p.configure(cfg)
	}
	if c.table == nil {
		k, err := OpenKernelTable(cfg)
		if err != nil {
			return nil, err
		}
		c.table, c.close = k, k.Close
	}
	return c, nil
}

// Close closes what New opened, but not a [Config.Table]. Afterwards Record does nothing
// and Flush returns an error that wraps [os.ErrClosed].
func (c *Cleaner) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	c.pending.Store(false)
	return c.close()
}

// Record takes a delta and the error of its Apply. If err is nil, all of d is in effect. If
// err is a [*ruleset.PartialError], all of d except the failed Services is in effect. After
// any other error the state is unknown. The next Flush examines the flows that d may have
// made stale. Record takes time proportional to the changes of UDP Services and keeps only
// the Services of d.
func (c *Cleaner) Record(d *ruleset.Delta, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	failures, acked := outcome(err)
	for _, p := range c.stale {
		for i := range d.Changes {
			ch := &d.Changes[i]
			if !p.concerns(ch.Key) {
				continue
			}
			if _, failed := failures[ch.Key]; failed || !acked {
				p.recordFailure(ch)
			} else {
				p.record(ch)
			}
		}
		if acked {
			p.setNode(d.Node)
			if d.Full {
				p.examineAll()
			}
		}
	}
	c.updatePending()
}

// outcome reports whether an Apply with the error acknowledged its delta. failed holds the
// Services that are excepted.
func outcome(err error) (failed map[tracker.Key]error, acked bool) {
	if err == nil {
		return nil, true
	}
	var p *ruleset.PartialError
	if !errors.As(err, &p) || p == nil || errors.Is(err, ruleset.ErrNeedFull) {
		return nil, false
	}
	return p.Failed, true
}

func (c *Cleaner) updatePending() {
	c.pending.Store(c.stale[0].pending() || c.stale[1].pending())
}

// Pending reports whether Flush would examine the table: a change that needs it was
// recorded since the last Flush, or the last Flush failed.
func (c *Cleaner) Pending() bool { return c.pending.Load() }

// Flush reads the table once for each family with flows to examine, and deletes those
// that are stale. Without such a family it makes no request. If reading or deleting fails, or
// may be incomplete, the family stays pending for the next Flush. After an error that wraps
// [ErrIncomplete], the next Flush may succeed.
func (c *Cleaner) Flush(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("conntrack: %w", os.ErrClosed)
	}
	if !c.pending.Load() {
		return nil
	}
	defer c.updatePending()
	info, start := Info{}, time.Now()
	for _, p := range c.stale {
		if !p.pending() {
			continue
		}
		one, begun := Info{}, time.Now()
		if err := c.flush(ctx, p, &one); err != nil {
			one.Err = fmt.Errorf("conntrack: %s: %w", p.family, err)
		} else {
			p.clear()
		}
		one.Duration = time.Since(begun)
		c.trace.flushedFamily(p.family, one)
		info.add(one)
	}
	info.Duration = time.Since(start)
	c.trace.flushed(info)
	return info.Err
}

// flush cleans up one family.
func (c *Cleaner) flush(ctx context.Context, p *staleFlows, info *Info) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var local []netip.Addr
	if p.needsLocal() {
		var err error
		if local, err = c.table.LocalAddrs(ctx, p.family); err != nil {
			return err
		}
	}
	stale := p.judge(local)
	var doomed []Flow
	info.Dumps++
	err := c.table.Dump(ctx, p.family, func(f *Flow) {
		info.Seen++
		if stale(f) {
			doomed = append(doomed, *f)
		}
	})
	info.Stale += len(doomed)
	if len(doomed) == 0 {
		return err
	}
	// Flows from an incomplete dump are stale, too.
	n, errDelete := c.table.Delete(ctx, doomed)
	info.Deleted += n
	return errors.Join(err, errDelete)
}

// After returns a backend that applies b and then flushes c with the changes that b
// acknowledged. So no flow is deleted before its packets would meet the new rules. The
// result's Apply returns the error of b's Apply, even if the clean-up fails. A failed
// clean-up is logged, reported to [Trace], and kept for the next Apply or c.Flush. The
// package documentation shows how to retry it soon. If b's Apply fails altogether, there
// is no clean-up. The result has the limits of b ([ruleset.Limiter]). Neither b nor c may
// be nil.
func After(b ruleset.Backend, c *Cleaner) ruleset.Backend { return &follower{b, c} }

// follower is the backend that [After] returns.
type follower struct {
	ruleset.Backend
	cleaner *Cleaner
}

func (f *follower) Limits(family tracker.Family) ruleset.Limits {
	return ruleset.LimitsOf(f.Backend, family)
}

func (f *follower) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := f.Backend.Apply(ctx, d)
	f.cleaner.Record(d, err)
	if _, acked := outcome(err); !acked {
		return err
	}
	if err := f.cleaner.Flush(ctx); err != nil && ctx.Err() == nil {
		f.cleaner.log.LogAttrs(ctx, slog.LevelWarn, "conntrack: cannot delete stale UDP flows, the next sync tries again", slog.Any("error", err))
	}
	return err
}

// Trace is a set of hooks that a [Cleaner] calls. Any hook, and the *Trace itself, may be
// nil. The goroutine that flushes calls the hooks, which must not call the Cleaner.
type Trace struct {
	// Flushed is called after each clean-up that examined any family.
	Flushed func(Info)
	// FlushedFamily is called for each examined family, before Flushed.
	FlushedFamily func(tracker.Family, Info)
}

// Info describes one clean-up.
type Info struct {
	// Dumps is the number of dumps of the table, one for each examined family.
	Dumps int
	// Seen is the number of flows in the dumps.
	Seen int
	// Stale is the number of stale flows that [Config.Filter] did not spare. Deleted is
	// the number of deleted flows. Some stale flows may have ended by themselves.
	Stale, Deleted int
	// Duration is how long the clean-up took.
	Duration time.Duration
	// Err is the error after which the next Flush repeats the clean-up, or nil.
	Err error
}

func (t *Trace) flushed(i Info) {
	if t != nil && t.Flushed != nil {
		t.Flushed(i)
	}
}

func (t *Trace) flushedFamily(f tracker.Family, i Info) {
	if t != nil && t.FlushedFamily != nil {
		t.FlushedFamily(f, i)
	}
}

// add adds the counts and the error of one family.
func (i *Info) add(o Info) {
	i.Dumps += o.Dumps
	i.Seen += o.Seen
	i.Stale += o.Stale
	i.Deleted += o.Deleted
	i.Err = errors.Join(i.Err, o.Err)
}
