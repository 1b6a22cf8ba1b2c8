//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// state is the state of a [Backend].
type state struct {
	config Config
	// complaints receives Services that cannot be programmed.
	complaints *complaint.Log
	ns         *netns.Namespace
	// close cancels open when the backend is closed.
	open  context.Context
	close context.CancelFunc

	mu   sync.Mutex
	conn *nlbatch.Conn
	// writer holds the transaction that is being written. While the transaction of spare is
	// being committed, inFlight is not nil and receives the result.
	writer, spare *writer
	inFlight      chan error
	// whole is set while everything must go into one transaction, whatever its size.
	whole bool
	// name is the name of the tables in use: the configured name or that of the staging
	// tables.
	name string
	// tables holds the models of the tables in the kernel, nil while their state is unknown.
	tables  []*table
	watched watched
	// route lists the namespace's network interfaces. It is nil without Config.Offload.
	// staleInterfaces is set after syncInterfaces failed, until it succeeds.
	route           *netlink.Handle
	staleInterfaces bool
	// inGrace holds, by family, the endpoints that earlier tables kept only for their grace
	// period, and when the grace period began.
	inGrace [2]map[netip.Addr]time.Time
	// gracePeriod is how long an endpoint's connections to itself are still masqueraded after
	// the endpoint is gone.
	gracePeriod time.Duration
	limits      limits
}

// New returns a backend for the network namespace that c names. It opens a netlink
// socket and checks, without changing anything, that the kernel has every feature that
// the package uses. The error is a [*ruleset.UnsupportedError] that names what is missing,
// or wraps [ruleset.ErrConfig]. Any other error may be temporary. Apply writes the tables
// when it gets the first full delta. The tables stay in place when the backend is closed.
func New(ctx context.Context, c Config) (*Backend, error) {
	return newBackend(ctx, c, defaultLimits)
}

func newBackend(ctx context.Context, c Config, l limits) (*Backend, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c, conn, err := c.dial()
	if err != nil {
		return nil, err
	}
	b := &Backend{state{config: c, complaints: complaint.NewLog(c.Log), name: c.Table, conn: conn, writer: newWriter(c.Table), gracePeriod: time.Second, limits: l}}
	b.open, b.close = context.WithCancel(context.Background())
	if err = b.probe(); err == nil {
		b.ns, err = netns.Open(c.NetNS)
	}
	if err == nil && c.Offload != nil {
		err = b.ns.Do(func() (err error) {
			b.route, err = netlink.NewHandle(unix.NETLINK_ROUTE)
			return err
		})
		if err != nil {
			err = fmt.Errorf("nftables: cannot open route socket: %w", err)
		}
	}
	if err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// Close waits for a running [Backend.Apply], closes the backend's socket and leaves its
// tables in place. Closing it again does nothing and returns nil.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tables = nil
	b.close()
	if b.route != nil {
		b.route.Close()
	}
	if b.ns != nil {
		b.ns.Close()
	}
	return b.conn.Close()
}

// chunk is the number of elements in one transaction, if a delta may be divided. Larger
// transactions are no faster and take more memory.
const chunk = 10000

// Apply makes the tables agree with d, as [ruleset.Backend] requires.
//
// A delta is committed in one transaction for both families, so a packet meets the rules
// from before or after it. A very large delta takes several transactions of whole Services
// each. A full delta replaces the tables' contents in one transaction, even if another
// process wrote them, and keeps the remembered clients of Services with affinity. So a new
// process takes over from an earlier one. If no table exists, Apply writes one in several
// transactions of whole Services each. If the transaction is larger than this process can
// send, Apply fills a staging table in several transactions and then swaps it in.
//
// A [*ruleset.PartialError] names Services that cannot be programmed. Such a Service stays
// as it was last acknowledged, also in a full delta, except for frontends and endpoints that
// it has no more (see [ruleset.Service.Remaining]). "Limits" in the package documentation
// lists the reasons. Apply returns [ruleset.ErrNeedFull] if the kernel refused a transaction
// because the tables were not as the backend left them. If the kernel refuses a full delta,
// the error wraps an [*Error] and the tables are unchanged.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := b.lock(ctx); err != nil {
		return err
	}
	defer b.mu.Unlock()
	switch {
	case d.Full:
		return b.replace(ctx, d)
	case b.tables == nil || needsRewrite(b.tables[0].node, d.Node):
		return ruleset.ErrNeedFull
	}
	began := time.Now()
	failed, err := b.update(ctx, d)
	switch {
	case err == nil:
		b.logLacking()
		return partial(failed)
	case ctx.Err() == nil:
		b.config.Log.Warn("nftables: cannot apply change, a full sync is needed", slog.Any("error", err))
		err = fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	}
	b.discardModel(began)
	return err
}

// lock locks b.mu, unless ctx is done or the backend is closed.
func (b *Backend) lock(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	if b.conn.Closed() {
		b.mu.Unlock()
		return errClosed
	}
	return nil
}

// table returns the model of the family's table, or nil.
func (b *Backend) table(f tracker.Family) *table {
	for _, t := range b.tables {
		if t.family == f {
			return t
		}
	}
	return nil
}

// discardModel discards the models after a failure that left the kernel state unknown. What
// was written from the given time on may be missing from the kernel.
func (b *Backend) discardModel(from time.Time) {
	for _, t := range b.tables {
		b.inGrace[index(t.family)] = t.hairpin.inGrace(from)
	}
	b.tables = nil
}

// update applies a delta that is not full.
func (b *Backend) update(ctx context.Context, d *ruleset.Delta) (map[tracker.Key]error, error) {
	b.writer.begin()
	b.writer.structural, b.spare, b.whole = false, nil, false
	for _, t := range b.tables {
		if t.node != d.Node {
			t.setNode(d.Node, b.writer)
		}
		t.collectSticky(b.writer)
	}
	failed, err := b.writeServices(ctx, d.Changes)
	if err == nil {
		err = b.retryLacking(ctx, d.Changes)
	}
	for _, t := range b.tables {
		for err == nil && t.expireGrace(b.gracePeriod, b.writer) {
			err = b.makeRoom(ctx, hairpinSize(t.family)+messageSize)
		}
	}
	if err != nil {
		return nil, errors.Join(err, b.waitCommit())
	}
	if err := b.commit(); err != nil {
		return nil, err
	}
	for _, t := range b.tables {
		b.deleteLost(t)
		b.deleteGarbage(t)
	}
	if b.writer.structural {
		// Changes that another process made before or during the transaction must not pass
		// for the backend's own. If the tables cannot be read now, Check reads them later.
		return failed, ignoreInterrupted(b.examine(false))
	}
	return failed, nil
}

// writeServices writes changes for the next commit. It returns the Services that cannot be
// programmed. After an error the models differ from the kernel. A commit may be running when
// writeServices returns.
func (b *Backend) writeServices(ctx context.Context, changes []ruleset.Change) (failed map[tracker.Key]error, err error) {
	for i := range changes {
		c := &changes[i]
		t := b.table(c.Key.Family)
		if t == nil {
			continue
		}
		refused, err := b.writeService(ctx, t, c)
		if err != nil {
			return nil, err
		}
		if refused != nil {
			if failed == nil {
				failed = map[tracker.Key]error{}
			}
			failed[c.Key] = refused
			backendconf.Complain(b.complaints, slog.LevelError, c.Key, "nftables: cannot program service, it stays as it was but for what is gone", refused)
		}
	}
	return failed, nil
}

// writeService writes one change. If the Service cannot be programmed, refused is the reason. What
// remains of a Service that was programmed is written instead.
func (b *Backend) writeService(ctx context.Context, t *table, c *ruleset.Change) (refused, err error) {
	refused, err = b.tryService(ctx, t, c.ID(), t.fitted(c.New))
	if refused == nil || err != nil {
		return nil, err
	}
	last := c.Old
	if old := t.service(c.ID()); last == nil && old != nil {
		last = old.rule // another Backend than this one acknowledged it
	}
	if left := last.Remaining(c.New); left != nil {
		_, err = b.tryService(ctx, t, c.ID(), t.fitted(left))
	}
	return refused, err
}

// tryService replaces the Service with the ID by s, unless it returns the reason why it cannot.
func (b *Backend) tryService(ctx context.Context, t *table, id uint32, s *ruleset.Service) (refused, err error) {
	if s != nil {
		if refused := t.check(s); refused != nil {
			return refused, nil
		}
	}
	if !b.whole {
		bytes := t.bytes(s)
		if old := t.service(id); old != nil {
			bytes += t.bytes(old.rule)
		} else if limit := b.conn.Limit() - emptySize; bytes > limit {
			// The change of an existing Service may be small enough.
			return fmt.Errorf("%w: %d bytes, at most %d", errServiceTooLarge, bytes, limit), nil
		}
		if t.recalled != nil {
			bytes += t.recallClients(b.config.Clients, s, b.conn.Limit()-emptySize-bytes)
		}
		if err := b.makeRoom(ctx, bytes); err != nil {
			return nil, err
		}
	}
	refused = t.apply(id, s, b.writer)
	if errors.Is(refused, errOverflow) {
		return nil, refused
	}
	return refused, nil
}

// emptySize is the size of an empty writer.
const emptySize = 4 * messageSize

// makeRoom commits what was written if the transaction lacks room for the given number of
// bytes or has a chunk of elements, unless b.whole is set.
func (b *Backend) makeRoom(ctx context.Context, bytes int) error {
	if b.whole || b.writer.pending < chunk && b.writer.size()+bytes <= b.conn.Limit() || b.writer.empty() {
		return nil
	}
	if err := b.commitInBackground(); err != nil {
		return err
	}
	return ctx.Err()
}

// commit waits for the running commit, if any, and commits what was written.
func (b *Backend) commit() error {
	batch, err := b.finish()
	if err := errors.Join(err, b.waitCommit()); err != nil {
		return err
	}
	return b.conn.Commit(batch)
}

func (b *Backend) finish() (*nlbatch.Batch, error) {
	for _, t := range b.tables {
		if t.overflows() {
			return nil, errOverflow
		}
	}
	return b.writer.finish()
}

// commitInBackground starts to commit what was written and returns at once, so that the
// caller writes the next transaction at the same time. That nearly halves the time for many
// Services. Its error may be that of the previous commit; [Backend.waitCommit] returns the
// error of the last.
func (b *Backend) commitInBackground() error {
	batch, err := b.finish()
	if err := errors.Join(err, b.waitCommit()); err != nil {
		return err
	}
	b.inFlight = make(chan error, 1)
	go func(done chan<- error) { done <- b.conn.Commit(batch) }(b.inFlight)
	next := b.spare
	if next == nil {
		next = newWriter(b.writer.table)
	}
	next.structural = next.structural || b.writer.structural
	next.begin()
	b.writer, b.spare = next, b.writer
	return nil
}

// waitCommit waits for the commit that is running, if any, and returns its error.
func (b *Backend) waitCommit() error {
	if b.inFlight == nil {
		return nil
	}
	err := <-b.inFlight
	b.inFlight = nil
	return err
}

func partial(failed map[tracker.Key]error) error {
	if len(failed) == 0 {
		return nil
	}
	return &ruleset.PartialError{Failed: failed}
}

var (
	// errServiceTooLarge is the error of a Service that no transaction has room for.
	errServiceTooLarge = fmt.Errorf("service does not fit into one transaction: %w", ErrTooLarge)
	// errClosed is the error of a closed backend.
	errClosed = fmt.Errorf("nftables: backend: %w", os.ErrClosed)
)
