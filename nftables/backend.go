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

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// state is the state of a [Backend].
type state struct {
	config Config

	mu     sync.Mutex
	conn   *nlbatch.Conn
	writer *writer
	// inFlight gives the result of a commit that is not waited for yet, of what
	// spare holds.
	inFlight chan error
	spare    *writer
	// name is the name of the tables in use: the configured one, or its shadow.
	name string
	// tables is what is in the kernel, by family, or nil while that is not known.
	tables  []*table
	watched watched
	// inGrace is, by family, which endpoints of the tables before were only lingering,
	// and since when.
	inGrace [2]map[netip.Addr]time.Time
	// linger is how long an endpoint that is gone is still masqueraded to.
	gracePeriod time.Duration
}

// New returns a backend for the network namespace that c names. It opens a netlink
// socket and checks, without changing anything, that the kernel has every feature that
// the package uses: a [*ruleset.UnsupportedError] names what is missing. Apply writes
// the tables when it gets the first full delta. They stay in place when the backend is
// closed.
func New(ctx context.Context, c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	conn, err := nlbatch.Dial(c.NetNS)
	if err != nil {
		return nil, unsupportedSocket(err)
	}
	b := &Backend{state{config: c, name: c.Table, conn: conn, gracePeriod: time.Second}}
	b.writer = newWriter(c.Table, b.mark())
	if err := b.probe(); err != nil {
		conn.Close()
		return nil, err
	}
	return b, nil
}

// Close waits for an [Backend.Apply] under way, closes the backend's socket and
// leaves its tables in place. To close it again is no error and does nothing.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tables = nil
	return b.conn.Close()
}

// chunk is how many elements go into one transaction where they may be divided:
// larger ones are no faster, and take more memory.
const chunk = 10000

// Apply makes the tables agree with d, as [ruleset.Backend] says.
//
// A delta is committed in one transaction, in both families at once, so that a
// packet meets the rules of before or of after it; very large ones in several, of
// whole Services each. A full delta replaces what the tables hold in one
// transaction, whoever wrote it, but for the clients that Services with affinity
// remember: a new process takes over from an earlier one by it. Where there was
// no table it is written in steps, of whole Services each. Where the transaction
// would be larger than this process may send, a shadow table is written in steps
// and takes the other's place.
//
// A [*ruleset.PartialError] names Services that cannot be programmed; they stay as
// they were last acknowledged, also in a full delta, but for what is another
// Service's by now. [ruleset.ErrNeedFull] comes with a transaction that the kernel
// refused because the tables were not as they were left. The kernel's refusal of a
// full delta is returned as an [*Error], with the tables unchanged.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.ready(); err != nil {
		return err
	}
	if d.Full {
		return b.replace(ctx, d)
	}
	if b.tables == nil {
		return ruleset.ErrNeedFull
	}
	return b.update(ctx, d)
}

// ready returns an error if the backend is closed.
func (b *Backend) ready() error {
	if b.conn.Closed() {
		return errClosed
	}
	return nil
}

// mark returns the packet mark that asks for masquerading.
func (b *Backend) mark() uint32 { return uint32(b.config.MasqueradeMark) }

func (b *Backend) table(f tracker.Family) *table {
	for _, t := range b.tables {
		if t.family == f {
			return t
		}
	}
	return nil
}

// discardModel notes that what is in the kernel is no longer known. What was written from
// the given time on may not be there.
func (b *Backend) discardModel(from time.Time) {
	for _, t := range b.tables {
		b.inGrace[index(t.family)] = t.inGrace(from)
	}
	b.tables = nil
}

// update applies a delta to tables that are as they were left.
func (b *Backend) update(ctx context.Context, d *ruleset.Delta) error {
	if needsRewrite(b.tables[0].node, d.Node) {
		return ruleset.ErrNeedFull
	}
	began := time.Now()
	failed, err := b.change(ctx, d)
	switch {
	case err == nil:
		return partial(failed)
	case ctx.Err() != nil:
		b.discardModel(began)
		return err
	}
	b.discardModel(began)
	b.config.Log.Warn("nftables: replacing all", slog.Any("reason", err))
	return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
}

func (b *Backend) change(ctx context.Context, d *ruleset.Delta) (map[tracker.Key]error, error) {
	b.writer.begin()
	b.writer.structural, b.spare = false, nil
	for _, t := range b.tables {
		if t.node != d.Node {
			t.setNode(d.Node, b.writer)
		}
	}
	failed, err := b.write(ctx, d.Changes, true)
	if err == nil && b.wasted(failed) {
		err = errTooManyHandlers // a full delta makes only those that are in use
	}
	if err == nil {
		err = b.expireGrace(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, b.waitCommit())
	}
	if err := b.commit(); err != nil {
		return nil, err
	}
	if b.writer.structural {
		// What somebody else altered before or during this must not be taken for what
		// was just written. If nothing can be read now, Check does it later.
		return failed, ignoreInterrupted(b.examine(false))
	}
	return failed, nil
}

// expireGrace has the endpoints that have lingered for long enough linger no more.
func (b *Backend) expireGrace(ctx context.Context) error {
	for _, t := range b.tables {
		for t.expireGrace(b.gracePeriod, b.writer) {
			if err := b.makeRoom(ctx, t.elementSize[setHairpin]+messageSize); err != nil {
				return err
			}
		}
	}
	return nil
}

// wasted reports whether some Service failed for want of a handler and many that
// there are have fallen out of use. Right after a full delta none have.
func (b *Backend) wasted(failed map[tracker.Key]error) bool {
	for k, err := range failed {
		if errors.Is(err, errTooManyHandlers) && b.table(k.Family).handlers.wasted() {
			return true
		}
	}
	return false
}

// write writes changes for the next commit and, if divide is set, commits in
// between when there is much. It returns the Services that cannot be programmed.
// After an error the tables are not what they were thought to be. A commit may be
// under way when it returns.
func (b *Backend) write(ctx context.Context, changes []ruleset.Change, divide bool) (failed map[tracker.Key]error, err error) {
	for i := range changes {
		c := &changes[i]
		t := b.table(c.Key.Family)
		if t == nil {
			continue
		}
		cannot, err := b.writeService(ctx, t, c, divide)
		if err != nil {
			return nil, err
		}
		if cannot != nil {
			if failed == nil {
				failed = map[tracker.Key]error{}
			}
			failed[c.Key] = cannot
			b.config.Log.Error("nftables: service left as it was", slog.String("service", c.Key.String()), slog.Any("error", cannot))
		}
	}
	return failed, nil
}

// writeService writes one change. Cannot is why the Service cannot be programmed:
// it is left as it was then.
func (b *Backend) writeService(ctx context.Context, t *table, c *ruleset.Change, divide bool) (cannot, err error) {
	if c.New != nil {
		if cannot := t.check(c.New); cannot != nil {
			return cannot, nil
		}
	}
	if divide {
		switch err := b.divide(ctx, t, c); {
		case errors.Is(err, errServiceTooLarge):
			return err, nil
		case err != nil:
			return nil, err
		}
	}
	return t.apply(c.ID(), c.New, b.writer), nil
}

// divide makes room in the transaction for a change. Its error is
// errServiceTooLarge if no transaction has room for the Service; one that is
// there already may still be changed little enough.
func (b *Backend) divide(ctx context.Context, t *table, c *ruleset.Change) error {
	bytes := t.bytes(c.New)
	if old := t.service(c.ID()); old != nil {
		bytes += t.bytes(old.rule)
	} else if bytes > b.conn.Limit()-emptySize {
		return fmt.Errorf("%w: %d bytes, at most %d", errServiceTooLarge, bytes, b.conn.Limit()-emptySize)
	}
	return b.makeRoom(ctx, bytes)
}

// emptySize is what a writer says of a transaction with nothing in it.
const emptySize = 4 * messageSize

// makeRoom commits what was written if there is not room for so many bytes more,
// or there is much.
func (b *Backend) makeRoom(ctx context.Context, bytes int) error {
	if b.writer.pending < chunk && b.writer.size()+bytes <= b.conn.Limit() || b.writer.empty() {
		return nil
	}
	if err := b.commitBehind(); err != nil {
		return err
	}
	return ctx.Err()
}

// commit commits what was written, and waits for what is being committed.
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
	return b.writer.finish(b.tables)
}

// commitBehind commits what was written while more is being written, which is
// half of the time that many Services take. Its error may be that of the call
// before; [Backend.waitCommit] waits for the last.
func (b *Backend) commitBehind() error {
	batch, err := b.finish()
	if err := errors.Join(err, b.waitCommit()); err != nil {
		return err
	}
	b.inFlight = make(chan error, 1)
	go func(done chan<- error) { done <- b.conn.Commit(batch) }(b.inFlight)
	next := b.spare
	if next == nil {
		next = newWriter(b.writer.table, b.mark())
	}
	next.structural = next.structural || b.writer.structural
	next.begin()
	b.writer, b.spare = next, b.writer
	return nil
}

// waitCommit waits for the commit behind, if there is one.
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

// errServiceTooLarge is the error of a Service that no transaction has room for.
var errServiceTooLarge = fmt.Errorf("service alone: %w", ErrTooLarge)

// errClosed is the error of a closed backend.
var errClosed = fmt.Errorf("nftables: backend: %w", os.ErrClosed)

// errOverflow asks for a full delta, which gives the sets more room.
var errOverflow = errors.New("a set has grown beyond the size it was made with")
