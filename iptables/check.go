package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Check returns a [*dataplane.DriftError] if the tables were flushed, restored to an earlier state, or lost a jump to
// the backend's chains or a rule of the chains that every node has. If the state of the tables is unknown after a
// failure, and no jump is missing, the error wraps [ruleset.ErrNeedFull] as a DriftError does. Check returns nil
// before the first full delta. [ErrLocked], [os.ErrClosed] and other errors mean that the check failed.
//
// Check calls iptables-restore once for each table, which changes nothing. It does not detect a reordered chain,
// alterations of the chains of Services and endpoints (KUBE-SVC-…, KUBE-SEP-…), a rule for a Service that was
// replaced by another one, and, with iptables-legacy, rules that were added. Full deltas at long intervals repair
// those.
//
// With iptables-nft, Check runs no program while nf_tables is unchanged since Check last found everything in place.
// With iptables-legacy it runs none while the number and the total size of each table's rules are the same, for at
// most five minutes.
func (b *Backend) Check(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return errClosed
	}
	if !b.started {
		return nil
	}
	// This comes first, so that the next call detects transactions from here on.
	gen, ok := b.generation(ctx)
	if ok && b.unchanged(gen) && !b.stateUnknown() {
		return nil
	}
	b.known = false
	counted := true
	for _, f := range b.families {
		if err := f.check(ctx); err != nil {
			return err
		}
		if f.NFT() && ok {
			switch err := f.countRules(ctx); {
			case errors.Is(err, nfnl.ErrInterrupted):
				counted = false // the next call counts again
			case err != nil:
				return err
			}
		}
	}
	b.checked, b.ran, b.known = gen, time.Now(), ok && counted
	return nil
}

// legacyRecheck is how long Check relies on [generation].legacy.
const legacyRecheck = 5 * time.Minute

func (b *Backend) unchanged(g generation) bool {
	return b.known && g == b.checked && (g.legacy == "" || time.Since(b.ran) < legacyRecheck)
}

func (b *Backend) generation(ctx context.Context) (g generation, ok bool) {
	var legacy []tracker.Family
	for _, f := range b.families {
		if !f.NFT() {
			legacy = append(legacy, f.family)
		}
	}
	return b.kernel.Generation(ctx, len(legacy) < len(b.families), legacy)
}

func (b *Backend) stateUnknown() bool {
	return slices.ContainsFunc(b.families, func(f *family) bool { return f.model == nil })
}

func (f *family) check(ctx context.Context) error {
	drift := &dataplane.DriftError{Backend: "iptables", Family: f.family}
	unknown := f.model == nil
	rules, jumps := (&model{settings: f.settings}).hooks(), [tables]int{}
	for _, h := range rules {
		jumps[h.table]++
	}
	if !f.jumpsOnly && !unknown {
		rules = append(rules, f.compared()...)
	}
	for t := range tables {
		in := &input{table: t}
		in.Begin(t.String())
		if !unknown {
			in.Expect(chainCanary, f.canaries[t].rule)
		}
		for _, h := range rules {
			if h.table == t {
				in.Expect(h.chain, h.rule)
			}
		}
		in.Commit()
		switch out := outcomeOf(f.Restore(ctx, in.Bytes())); out.result {
		case done:
		case refused:
			f.model = nil
			drift.What = "a rule is missing in table " + t.String()
			var e *CommandError
			if errors.As(out.err, &e) && e.Text != "" {
				f.missed = !unknown && e.Line > jumps[t]+2 // behind the table's name, the canary and the jumps
				drift.What += ": " + strings.TrimPrefix(e.Text, "-C ")
			}
			return drift
		default:
			return fmt.Errorf("iptables: cannot check table %s: %w", t, out.err)
		}
	}
	if unknown {
		return fmt.Errorf("iptables: %w: the state of the tables is unknown", ruleset.ErrNeedFull)
	}
	return nil
}

// Watch calls drifted with each error of [Backend.Check] until ctx is done or the backend is closed. It returns ctx's
// error, or one that wraps [os.ErrClosed]. drifted should request a full delta from the cursor and a sync.
//
// With iptables-nft, Watch calls Check after transactions that any process commits to nf_tables in the network
// namespace, at most once an interval, and every minute otherwise. With iptables-legacy, or without the kernel's
// notifications, it calls Check at the interval.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	open, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.open, func() { cancel(errClosed) })()
	var err error
	if b.allNFT() {
		err = b.kernel.Watch(open, interval, b.Check, drifted)
	} else if err = dataplane.Watch(open, interval, b.Check, drifted); b.open.Err() != nil {
		err = errClosed
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func (b *Backend) allNFT() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !slices.ContainsFunc(b.families, func(f *family) bool { return !f.NFT() })
}
