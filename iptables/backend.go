package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Backend keeps kube-proxy's chains, in the tables filter and nat of both families, in agreement with a ruleset. It
// is a [dataplane.Backend]. Its methods are safe for concurrent use. [New] makes one; the zero value must not be
// used.
type Backend struct {
	mu       sync.Mutex
	config   Config
	kernel   kernel
	families []*family
	closed   atomic.Bool // set while mu is held
	// open is done when the backend is closed, which close does.
	open  context.Context
	close context.CancelFunc
	// accounts reads and creates the objects that rules count into, nil if none do; counting has their names.
	accounts accounts
	counting []string
	// If known is set, checked is the generation in which Check last found everything in
	// place, and ran the time at which it did.
	checked generation
	ran     time.Time
	known   bool
	// started is set once a full delta was applied.
	started bool
}

var _ dataplane.Backend = (*Backend)(nil)

// New returns a backend, after it has checked, as [Probe] does, that the programs and the kernel support every rule
// that Services need. The error is a [*dataplane.UnsupportedError] if they do not, and wraps [ruleset.ErrConfig] if c
// is invalid. The first full delta writes the chains, and closing the backend leaves them in place. New creates the
// objects of [Backend.Counters], which stay, too.
func New(ctx context.Context, c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	k, err := openKernel(c)
	if err != nil {
		return nil, err
	}
	return newBackend(ctx, c, k)
}

// newBackend returns a backend of a kernel, which the backend closes. c has its defaults.
func newBackend(ctx context.Context, c Config, k kernel) (*Backend, error) {
	b := &Backend{config: c, kernel: k}
	b.open, b.close = context.WithCancel(context.Background())
	var err error
	if b.accounts, err = openAccounts(c, k); err != nil {
		c.Log.Info(notCounted, slog.Any("reason", err))
	}
	for _, f := range c.Families {
		fam, err := newFamily(ctx, c, f, k, b.accounts)
		if err != nil {
			b.Close()
			return nil, err
		}
		b.families = append(b.families, fam)
	}
	for _, name := range countersFor(true) {
		if slices.ContainsFunc(b.families, func(f *family) bool { return slices.Contains(f.can, name) }) {
			b.counting = append(b.counting, name)
		}
	}
	return b, nil
}

// Close releases the backend's resources; chains stay in place. Afterwards every other method returns an error that
// wraps [os.ErrClosed]. Closing a closed backend does nothing.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Swap(true) {
		return nil
	}
	b.families = nil
	b.close()
	var err error
	if b.accounts != nil {
		err = b.accounts.Close()
	}
	return errors.Join(err, b.kernel.Close())
}

var errClosed = fmt.Errorf("iptables: backend: %w", os.ErrClosed)

// Limits returns the limits of rules for one Service, which are the same in both families.
func (b *Backend) Limits(tracker.Family) ruleset.Limits {
	return ruleset.Limits{Affinity: maxAffinity}
}

// Apply makes the chains agree with d: see [ruleset.Backend]. It names no Service in its errors. The error wraps
// [ruleset.ErrNeedFull] if the state of the tables is unknown. After any other error, such as [ErrLocked], the
// backend knows which part of d is in effect.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return errClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, f := range b.families {
		f.written = [tables]int{}
		changes := changesOf(d.Changes, f.family)
		err := ruleset.ErrNeedFull
		switch {
		case d.Full:
			err = f.replace(ctx, d.Node, changes)
		case f.model != nil:
			err = f.update(ctx, d.Node, changes)
		}
		if err != nil {
			return err
		}
		f.trace(b.config.Hooks)
	}
	b.started = b.started || d.Full
	return nil
}

func changesOf(all []ruleset.Change, f tracker.Family) (out []ruleset.Change) {
	for _, c := range all {
		if c.Key.Family == f {
			out = append(out, c)
		}
	}
	return out
}

func (f *family) trace(t *Hooks) {
	if t == nil || t.Applied == nil {
		return
	}
	size := f.model.size()
	for table := range tables {
		t.Applied(WriteInfo{Family: f.family, Table: table.String(), Rules: size[table], Written: f.written[table]})
	}
}

// logIgnored logs what Services begin to ask for and the rules do not do.
func (f *family) logIgnored(changes []ruleset.Change) {
	for _, c := range changes {
		if c.New == nil {
			continue
		}
		now, old := f.ignored(c.New), ""
		if c.Old != nil {
			old = f.ignored(c.Old)
		}
		if now != "" && now != old {
			backendconf.Complain(f.complaints, slog.LevelWarn, c.Key, "iptables: "+now, nil)
		}
	}
}
