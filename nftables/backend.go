package nftables

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Backend programs one network namespace's nf_tables. It implements [dataplane.Backend]. Its methods are safe for
// concurrent use. After [Backend.Close], methods change nothing and return an error that wraps [os.ErrClosed]. [New]
// makes one; the zero value must not be used.
type Backend struct {
	config     Config
	layout     model.Config
	complaints *complaint.Log
	// close cancels open when the backend is closed.
	open  context.Context
	close context.CancelFunc

	mu   sync.Mutex
	conn connection
	// name is the name of the tables in use: the configured name or that of the staging
	// tables.
	name string
	// tables is the model of the tables in the kernel, nil while their state is unknown. sink commits its
	// transactions.
	tables  *model.Tables
	sink    *streamSink
	watched watched
	// started is set once a full delta was applied.
	started bool
	// staleInterfaces is set after syncInterfaces failed, until it succeeds.
	staleInterfaces bool
	// inGrace holds, by family, the endpoints that earlier tables kept only for their grace period, and when that
	// began.
	inGrace map[tracker.Family]map[netip.Addr]time.Time
	// unused holds, by family, the chains of an earlier table that could not be deleted.
	unused map[tracker.Family]map[string]bool
}

var _ dataplane.Backend = (*Backend)(nil)

// New returns a backend for the network namespace that c names. It checks, without changing anything, that the kernel
// has every feature that the package uses. The error is a [*dataplane.UnsupportedError] that names what is missing,
// or wraps [ruleset.ErrConfig]. Any other error may be temporary. The first full delta writes the tables, and closing
// the backend leaves them in place.
func New(ctx context.Context, c Config) (*Backend, error) { return open(ctx, c, model.DefaultConfig) }

// open is New with limits other than those of the encoding.
func open(ctx context.Context, c Config, l model.Config) (*Backend, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c, conn, err := c.dial()
	if err != nil {
		return nil, err
	}
	return newBackend(c, l, conn)
}

// newBackend returns a backend that uses conn, and closes conn if it returns an error. c has its defaults.
func newBackend(c Config, l model.Config, conn connection) (*Backend, error) {
	b := &Backend{config: c, layout: c.model(l), complaints: complaint.NewLog(c.Log), name: c.Table, conn: conn}
	b.open, b.close = context.WithCancel(context.Background())
	if err := b.probe(); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// Close waits for a running [Backend.Apply], closes the backend's socket and leaves its tables in place. Closing it
// again does nothing and returns nil.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tables = nil
	b.close()
	return b.conn.Close()
}

// Limits returns the limits of one Service, which are the same in both families.
func (b *Backend) Limits(tracker.Family) ruleset.Limits { return model.Limits() }
