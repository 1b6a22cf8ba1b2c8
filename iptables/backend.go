//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/iptables/internal/nfacct"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Backend keeps kube-proxy's chains, in the tables filter and nat of both
// families, in agreement with the ruleset: a [ruleset.Backend]. Its methods may be
// called concurrently; one works at a time.
type Backend struct {
	mu       sync.Mutex
	config   Config
	ns       *netns.Namespace
	families []*family
	closed   atomic.Bool // set while mu is held
	// accounts leads to the objects that rules count into, nil if they do not;
	// counting is the names of the objects.
	accounts *nfacct.Conn
	counting []string
}

// New returns a backend. It finds the programs and tries, with a chain that is in
// use nowhere and goes again at once, whether they and the kernel can do what is
// needed: an [ErrUnsupported] says what they cannot. Chains are first written
// when a full delta is applied, and stay as they are when the backend is closed.
// The objects of [Backend.Counters] are made at once, and stay, too.
func New(ctx context.Context, c Config) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Backend{config: c}
	if b.ns, err = netns.Open(c.NetNS); err != nil {
		return nil, fmt.Errorf("iptables: %w", err)
	}
	if b.accounts, err = openAccounts(c, b.ns); err != nil {
		c.Log.Info(notCounted, slog.Any("reason", err))
	}
	for _, f := range c.Families {
		fam, err := newFamily(ctx, c, f, b.ns, b.accounts)
		if err != nil {
			b.Close()
			return nil, err
		}
		b.families = append(b.families, fam)
	}
	for _, name := range allCounters.names() {
		if slices.ContainsFunc(b.families, func(f *family) bool { return slices.Contains(f.can.names(), name) }) {
			b.counting = append(b.counting, name)
		}
	}
	return b, nil
}

// Close ends the use of the backend; chains stay in place. Afterwards every method
// returns [os.ErrClosed], but for Close, which does nothing.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Swap(true) {
		return nil
	}
	b.families = nil
	var err error
	if b.accounts != nil {
		err = b.accounts.Close()
	}
	return errors.Join(err, b.ns.Close())
}

// Apply makes the chains agree with d, as [ruleset.Backend] says.
//
// Of a delta, the chains that differ are written by one call of iptables-restore
// a table, which the kernel takes as a whole; very many by several, chains before
// what leads to them, so that each state in between is right. A full delta reads
// what the kernel has, once, and writes what differs, whoever wrote it.
//
// A [*ruleset.PartialError] names the Services that were refused, each with a
// [*CommandError]; they stay as they were last acknowledged, also after a full
// delta, but for what is another Service's by now.
// [ruleset.ErrNeedFull] comes with a failure after which it is not known what the
// kernel has, or that is not a Service's fault. [ErrLocked], and errors of the
// context that came before anything was done, leave everything as it was.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return os.ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	failed := map[tracker.Key]error{}
	for _, f := range b.families {
		var changes []ruleset.Change
		for _, c := range d.Changes {
			if c.Key.Family == f.family {
				changes = append(changes, c)
			}
		}
		f.announce(changes)
		f.written = [tables]int{}
		var bad map[tracker.Key]error
		var err error
		switch {
		case d.Full:
			bad, err = f.replace(ctx, d.Node, changes)
		case f.model == nil:
			err = ruleset.ErrNeedFull
		default:
			bad, err = f.update(ctx, d.Node, changes)
		}
		if err != nil {
			return err
		}
		maps.Copy(failed, bad)
		b.config.Trace.applied(f)
	}
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// family is one family's tables.
type family struct {
	*settings
	tool tool
	log  *slog.Logger
	// accounts leads to the objects that rules count into. can is what rules can
	// count here, if the objects are there.
	accounts *nfacct.Conn
	can      counters
	// model is what the tables hold, nil while that is not known.
	model *model
	// canary is what each table's canary says.
	canary [tables]string
	// limit is about how many lines the programs are given at once. nf_tables
	// commits in a time that grows faster than their number, and ip_tables writes
	// the whole table for any number.
	limit int
	// written is how many rules the last Apply has written into each table.
	written [tables]int
}

const (
	nftLimit    = 3000
	legacyLimit = 1 << 30
	leastLimit  = 50
)

func newFamily(ctx context.Context, c Config, f tracker.Family, ns *netns.Namespace, accounts *nfacct.Conn) (*family, error) {
	t, err := findTool(ctx, c, f, ns)
	if err != nil {
		return nil, err
	}
	out := &family{
		settings: &settings{
			family: f, mark: 1 << *c.MasqueradeBit,
			localhost:        c.LocalhostNodePorts && f == tracker.IPv4,
			randomFully:      true,
			endpointComments: c.EndpointComments,
			refuseHash:       c.Hash == HashRefused,
		},
		tool:     t,
		log:      c.Log.With(slog.String("family", f.String())),
		accounts: accounts,
	}
	out.limit = legacyLimit
	if t.NFT() {
		out.limit = nftLimit
	}
	return out, out.probe(ctx)
}

// forget is for after a failure that leaves it open what the kernel has. It
// returns the error for it.
func (f *family) forget(err error) error {
	f.model = nil
	f.log.Warn("iptables: all is read and repaired", slog.Any("reason", err))
	return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
}

// write has inputs applied, in order. wrote tells whether something may be in
// effect after an error.
func (f *family) write(ctx context.Context, inputs []*input) (wrote bool, err error) {
	for _, in := range inputs {
		if err := f.tool.apply(ctx, in); err != nil {
			return wrote || killed(err), err
		}
		f.written[in.table] += in.rules
		wrote = true
	}
	return wrote, nil
}

// smaller halves the limit after an input that was too large, and reports whether
// that is worth another attempt.
func (f *family) smaller(err error) bool {
	var e *CommandError
	if !tooLarge(err) || !errors.As(err, &e) || e.indivisible || f.limit <= leastLimit {
		return false
	}
	f.limit = max(leastLimit, min(f.limit, nftLimit)/2)
	return true
}
