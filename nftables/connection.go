package nftables

import (
	"context"
	"time"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// connection is a connection to nf_tables of one network namespace: Linux's, or in tests one in memory. It is not
// safe for concurrent use, except for NewWriter, Limit, WatchCommits and WatchLinks.
type connection interface {
	committer
	lister
	watcher
	// Close closes the connection. Closing it again does nothing.
	Close() error
	Closed() bool
}

type committer interface {
	// NewWriter returns a writer for tables of a name. rules renders the chains of the families'
	// tables.
	NewWriter(table string, rules ...kernel.Rules) writer
	// Commit commits all that w has or, if it returns an error, nothing. It calls Finish, unless
	// that was called. An empty transaction does nothing.
	Commit(w writer) error
	// Limit returns the largest transaction in bytes.
	Limit() int
	// WaitForPackets waits until every packet that is in a netfilter hook has left it.
	WaitForPackets()
}

// lister reads tables. Errors about a missing object wrap [syscall.ENOENT], and those of reads
// that transactions of other processes interrupt wrap [nfnl.ErrInterrupted].
type lister interface {
	// Table reads a table without its contents.
	Table(name string, f tracker.Family) (nft.Head, error)
	// Sets, Chains, Flowtables and Rules return the objects of a table, all but rules by name.
	Sets(table string, f tracker.Family) (map[string]nft.Set, error)
	Chains(table string, f tracker.Family) (map[string]nft.Chain, error)
	Flowtables(table string, f tracker.Family) (map[string]nft.Flowtable, error)
	Rules(table string, f tracker.Family) ([]nft.Rule, error)
	// HasBaseChain reports whether the table exists and has the base chain of a name.
	HasBaseChain(table string, f tracker.Family, chain string) (bool, error)
	// Elements calls fn with each element of a set, which is valid only during the call.
	Elements(table string, f tracker.Family, s layout.Set, fn func(nft.Element)) error
}

type watcher interface {
	// Commits returns how many transactions this connection has committed. Each adds one to
	// Generation, and so do those of other processes.
	Commits() uint32
	Generation() (uint32, error)
	// WatchCommits calls check as [nfnl.WatchCommits] does.
	WatchCommits(ctx context.Context, interval time.Duration, check func(context.Context) error, failed func(error)) error
	// Links returns the index of each network interface by name. Links and WatchLinks work only with
	// Config.Offload.
	Links() (map[string]int, error)
	WatchLinks() (linkEvents, error)
}

// writer encodes transactions as one: objects in their order, then the elements to delete and the elements to add. It
// may encode while its connection commits what another one has.
type writer interface {
	// Add adds a transaction. It does not keep tx.
	Add(tx *model.Tx)
	model.Meter
	// AddElements and DeleteElements encode elements now, instead of after all objects. Adding an element that exists
	// does nothing.
	AddElements(f tracker.Family, s layout.Set, list *nft.Elements)
	DeleteElements(f tracker.Family, s layout.Set, list *nft.Elements)
	// Finish encodes the elements that Add got. What is added afterwards must be objects.
	Finish() error
	// Use makes what is encoded from now on be about tables of another name.
	Use(table string)
	Empty() bool
	// Reset empties the writer, which keeps its memory.
	Reset()
}

type linkEvents interface {
	// Next blocks until interfaces change, or after Close returns an error. It returns no changes if
	// notifications were lost.
	Next() ([]linkChange, error)
	Close()
}

type linkChange struct {
	name  string
	index int
	gone  bool
}

// dial returns c with defaults, and a connection to its network namespace.
func (c Config) dial() (Config, connection, error) {
	c, err := c.withDefaults()
	if err != nil {
		return c, nil, err
	}
	conn, err := dial(c)
	return c, conn, err
}
