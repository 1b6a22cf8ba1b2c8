package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
)

const (
	// fullSyncPeriod is how often everything is compared and repaired, as by
	// kube-proxy.
	fullSyncPeriod = time.Hour
	// watchInterval is how often to look whether somebody altered the tables, at
	// the price of one question to the kernel.
	watchInterval = 250 * time.Millisecond
)

// agent keeps a network namespace in agreement with the manifests.
type agent struct {
	*world
	out io.Writer // gets a line for each change that is in effect

	reader  *manifests.Reader
	watcher *manifests.Watcher
	nft     *nftables.Backend
	udp     *conntrack.Cleaner // nil if the system has no such thing
	cursor  *ruleset.Cursor
	runner  *runner.Runner
	closers []io.Closer

	// mu makes what a change of the manifests brings one step: it is held while
	// objects are handed in, and while they are synced.
	mu sync.Mutex
	// due: a line is to be written once what was handed in last, at fed, is in
	// effect.
	due bool
	fed time.Time
	// What the last Apply did.
	applied time.Time
	changed int
	// And what the last Sync came to.
	synced ruleset.SyncInfo
}

// newAgent makes an agent for the network namespace of the calling thread. It
// needs that thread no more when it returns.
func newAgent(opts options, out io.Writer, log *slog.Logger) (_ *agent, err error) {
	a := &agent{out: out, reader: manifests.NewReader(opts.manifests)}
	defer func() {
		if err != nil {
			a.close()
		}
	}()

	// Watch before reading, so that no change goes unnoticed.
	if a.watcher, err = manifests.NewWatcher(opts.manifests); err != nil {
		return nil, err
	}
	a.closers = append(a.closers, a.watcher)
	first, err := a.reader.Read()
	if err != nil {
		return nil, err
	}

	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	a.closers = append(a.closers, closeFunc(nl.Close))
	own := func() ([]netip.Addr, error) { return ownAddresses(nl) }

	// All that may fail for want of privileges or kernel features comes first.
	if a.nft, err = nftables.New(nftables.Config{Log: log}); err != nil {
		return nil, err
	}
	a.closers = append(a.closers, a.nft)
	var backend ruleset.Backend = ruleset.BackendFunc(a.apply)
	if udp, err := conntrack.New(conntrack.Config{Log: log}); err != nil {
		log.Warn("stale UDP flows will not be cleaned up", "error", err)
	} else {
		a.udp = udp
		a.closers = append(a.closers, udp)
		backend = conntrack.After(backend, udp)
	}

	if a.world, err = newWorld(opts, first, own, log); err != nil {
		return nil, err
	}
	a.due, a.fed = true, time.Now()
	a.cursor = a.engine.Attach("nftables", backend)
	a.cursor.OnSync(func(i ruleset.SyncInfo) { a.synced = i })
	a.runner, err = runner.New(runner.Config{
		Min:    opts.minSyncPeriod,
		Retry:  opts.syncPeriod,
		Max:    max(fullSyncPeriod, opts.minSyncPeriod),
		Resync: a.cursor.Resync,
		Log:    log,
	}, a.sync)
	if err != nil {
		return nil, err
	}
	// An agent fed by an API server has the engine tell the runner of each change
	// (engine.Notify(runner.Trigger)). This one knows when it has handed in all that
	// belongs together.
	a.runner.Trigger()
	checkForwarding(log)
	return a, nil
}

type closeFunc func()

func (f closeFunc) Close() error { f(); return nil }

// close gives up everything but the rules.
func (a *agent) close() {
	for _, c := range a.closers {
		c.Close()
	}
}

// run keeps the kernel in agreement until parent ends or something fails that
// cannot be tried again. The rules stay.
func (a *agent) run(parent context.Context) error {
	defer a.close()
	ctx, stop := context.WithCancelCause(parent)
	defer stop(nil)
	var wg sync.WaitGroup
	for _, f := range []func(context.Context) error{
		a.runner.Run, a.followManifests, a.followNode, a.watchTables,
	} {
		wg.Go(func() { stop(f(ctx)) })
	}
	wg.Wait()
	if parent.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// sync brings the kernel up to date. An error makes the runner call it again.
func (a *agent) sync(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.applied, a.changed = time.Time{}, 0
	err := a.cursor.Sync(ctx)
	failed := 0
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) {
		failed = len(p.Failed)
	}
	if a.due && (err == nil || failed != 0) {
		a.due = false
		a.report(failed)
	}
	if a.udp != nil {
		err = errors.Join(err, a.udp.Flush(ctx)) // if it failed before
	}
	return err
}

// report writes the line about the change of the manifests that is in effect.
func (a *agent) report(failed int) {
	if a.applied.IsZero() {
		a.applied = time.Now() // there was nothing to do
	}
	line := fmt.Sprintf("synced services=%d endpoints=%d changed=%d took=%v",
		a.synced.Services, a.synced.Endpoints, a.changed, a.applied.Sub(a.fed))
	if failed != 0 {
		line += fmt.Sprintf(" failed=%d", failed)
	}
	fmt.Fprintln(a.out, line)
}

// apply has the kernel take over a delta, and notes when that was and how much of
// it was new.
func (a *agent) apply(ctx context.Context, d *ruleset.Delta) error {
	err := a.nft.Apply(ctx, d)
	a.applied, a.changed = time.Now(), 0
	for i := range d.Changes {
		if d.Changes[i].What != 0 {
			a.changed++
		}
	}
	return err
}

// followManifests hands in what changes in the manifests.
func (a *agent) followManifests(ctx context.Context) error {
	last := ""
	for {
		if err := a.watcher.Wait(ctx); err != nil {
			return err
		}
		c, err := a.reader.Read()
		if err != nil {
			// What was read before goes on being served.
			if err.Error() != last {
				a.log.Error("cannot read the manifests", "error", err)
			}
			last = err.Error()
			continue
		}
		last = ""
		if !c.Any {
			continue
		}
		if err := a.handIn(c); err != nil {
			return err
		}
	}
}

func (a *agent) handIn(c manifests.Changes) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.feed(c); err != nil {
		return err
	}
	a.due, a.fed = true, time.Now()
	a.runner.Trigger() // also if it makes no difference, for the line
	return nil
}

// followNode keeps up with the node's addresses where no Node object does.
func (a *agent) followNode(ctx context.Context) error {
	tick := time.NewTicker(max(a.opts.syncPeriod, time.Second))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			a.mu.Lock()
			if a.tracker.SetNode(a.nodeInfo()) {
				a.runner.Trigger()
			}
			a.mu.Unlock()
		}
	}
}

// watchTables has the tables written anew when somebody else altered them.
func (a *agent) watchTables(ctx context.Context) error {
	var last time.Time
	return a.nft.Watch(ctx, watchInterval, func(err error) {
		d := (*nftables.DriftError)(nil)
		if errors.Is(err, ruleset.ErrNeedFull) && !errors.As(err, &d) {
			return // a sync failed, and will be tried again
		}
		a.log.Warn("repairing the tables", "error", err)
		if time.Since(last) < 10*time.Second {
			a.log.Warn("somebody keeps altering the tables: does another agent run in this network namespace?")
		}
		last = time.Now()
		a.cursor.Resync()
		a.runner.Trigger()
	})
}

// checkForwarding warns if the kernel of the calling thread's namespace does not
// forward packets: that is left to the operator, as kube-proxy's nftables mode
// does.
func checkForwarding(log *slog.Logger) {
	for _, path := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		value, err := os.ReadFile("/proc/sys/" + path)
		if err == nil && strings.TrimSpace(string(value)) == "0" {
			log.Warn("the kernel does not forward packets, which is needed to reach pods and other nodes from outside", "sysctl", path)
		}
	}
}
