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

// Config says what a [Cleaner] works on. The zero value is the kernel's table in
// the network namespace of the calling thread.
type Config struct {
	// NetNS is an open file of the network namespace to work in; nil is the namespace of
	// the thread that calls [New]. New duplicates the file, and working in a namespace
	// other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Table, if not nil, is worked on in place of the kernel's. NetNS is not used
	// then. A caller that wraps the kernel's table opens it with [OpenKernelTable].
	Table Table
	// Zones is the conntrack zones whose flows are judged. Empty means zone 0, the
	// default zone, alone. A data plane that tracks connections in zones of its own,
	// such as Open vSwitch, names those.
	Zones []uint16
	// NodePortAddrs is further addresses at which NodePorts answer, whatever
	// [ruleset.Node.NodePorts] selects, and though no interface has them: a virtual
	// address to which the host's rules translate NodePort traffic before the data
	// plane sees it, or an address of a local route. A flow to a NodePort that was
	// only translated to one of these, with the same port, is not stale while the
	// NodePort exists: the data plane's own flow decides. Nil means none.
	NodePortAddrs []netip.Addr
	// Filter, if not nil, is asked about each stale flow and reports whether it may be
	// deleted. The Service is the one that has the flow's frontend or, if no Service
	// has it, the one that last had it, as last acknowledged. A flow that Filter
	// spares is judged again only when something changes for its frontend, or by the
	// next full delta. Filter is called by the goroutine that flushes; it must be
	// quick and must not call the Cleaner.
	Filter func(*ruleset.Service, Flow) bool
	// Log gets one line for each clean-up that failed inside [After]. Nil discards.
	Log *slog.Logger
	// Trace is told of each clean-up. It may be nil.
	Trace *Trace
}

// Cleaner deletes stale UDP flows. It learns from [Cleaner.Record] what changed,
// for one [ruleset.Cursor] (or the two sides of a [ruleset.ByFamily] under one),
// and looks at the table in [Cleaner.Flush]; [After] does both. Its methods may be
// called by several goroutines. It holds, for each frontend of a UDP Service, a
// pointer to the Service.
type Cleaner struct {
	log   *slog.Logger
	trace *Trace
	table Table
	close func() error // what Close does, if the table is our own

	mu      sync.Mutex // held while flushing
	closed  bool
	plans   [2]*plan // IPv4, IPv6
	pending atomic.Bool
}

// New returns a Cleaner. Unless cfg.Table is set, New opens the netlink sockets, which
// needs CAP_NET_ADMIN in the namespace's user namespace, and fails with a
// [*ruleset.UnsupportedError] if the system has no such table or netlink does not reach
// it (CONFIG_NF_CT_NETLINK). If another part of the process closes a socket, Flush
// returns an error that wraps [os.ErrClosed], and the caller needs a new Cleaner. New
// starts no goroutine.
func New(cfg Config) (*Cleaner, error) {
	for _, a := range cfg.NodePortAddrs {
		if !a.IsValid() {
			return nil, errors.New("conntrack: invalid address in NodePortAddrs")
		}
	}
	c := &Cleaner{
		log:   backendconf.Log(cfg.Log),
		trace: cfg.Trace,
		table: cfg.Table,
		close: func() error { return nil },
		plans: [2]*plan{newPlan(tracker.IPv4), newPlan(tracker.IPv6)},
	}
	for _, p := range c.plans {
		p.configure(cfg)
	}
	if c.table == nil {
		k, err := openKernel(cfg.NetNS, cfg.Zones...)
		if err != nil {
			return nil, err
		}
		c.table, c.close = k, k.Close
	}
	return c, nil
}

// Close gives up what New opened; a [Config.Table] is left open. Record and Flush
// do nothing afterwards, and Flush returns an error that wraps [os.ErrClosed].
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

// Record notes how an Apply of d ended, err being what it returned: everything is
// in effect if it is nil, all but the Services that failed if it is a
// [*ruleset.PartialError], nothing for certain otherwise. What flows have to be
// looked at for it is left to Flush. It takes time proportional to the changes of
// UDP Services and keeps nothing of d but the Services.
func (c *Cleaner) Record(d *ruleset.Delta, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	failures, acked := outcome(err)
	for _, p := range c.plans {
		for i := range d.Changes {
			ch := &d.Changes[i]
			if !p.concerns(ch.Key) {
				continue
			}
			if _, failed := failures[ch.Key]; failed || !acked {
				p.unsettle(ch)
			} else {
				p.record(ch)
			}
		}
		if acked {
			p.setNode(d.Node)
			if d.Full {
				p.lookAtAll()
			}
		}
	}
	c.note()
}

// outcome reads the error of an Apply: whether the delta was acknowledged, and
// but for which Services.
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

// note updates pending.
func (c *Cleaner) note() {
	c.pending.Store(c.plans[0].pending() || c.plans[1].pending())
}

// Pending reports whether there is something that Flush would do: something was
// recorded since the last, or the last failed.
func (c *Cleaner) Pending() bool { return c.pending.Load() }

// Flush reads the table, once for each family in which something has to be looked
// at, and deletes what is stale. It does nothing, and asks nothing of the kernel,
// if that is no family. What could not be done, or not for certain, is kept for
// the next Flush; the error may be [ErrIncomplete], which may well be gone then.
func (c *Cleaner) Flush(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("conntrack: %w", os.ErrClosed)
	}
	if !c.pending.Load() {
		return nil
	}
	defer c.note()
	info, start := Info{}, time.Now()
	for _, p := range c.plans {
		if !p.pending() {
			continue
		}
		one, begun := Info{}, time.Now()
		if err := c.flush(ctx, p, &one); err != nil {
			one.Err = fmt.Errorf("conntrack: %s: %w", p.family, err)
		} else {
			p.done()
		}
		one.Duration = time.Since(begun)
		c.trace.flushedFamily(p.family, one)
		info.add(one)
	}
	info.Duration = time.Since(start)
	c.trace.flushed(info)
	return info.Err
}

// flush does the work of one family.
func (c *Cleaner) flush(ctx context.Context, p *plan, info *Info) error {
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
	// Though a dump that failed will be made again, what it has found is certain.
	n, errDelete := c.table.Delete(ctx, doomed)
	info.Deleted += n
	return errors.Join(err, errDelete)
}
