package iptables

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

type family struct {
	// Renderer renders the rules. Its model is nil while the state of the tables is unknown.
	*Renderer
	programs
	kernel     kernel
	log        *slog.Logger
	complaints *complaint.Log
	// accounts creates the objects that rules count into. can selects the counters that
	// work on this system if the objects exist.
	accounts accounts
	can      []string
	canaries [tables]canary
	// unreadable is the reason for which iptables-save could not print a table last.
	unreadable [tables]string
	// missed is set if Check last reported a missing rule. jumpsOnly is set once iptables-restore has reported rules
	// that were there: then Check compares only jumps.
	missed, jumpsOnly bool
	// countTraffic carries counters over when chains are written. kept holds those of pools without a chain.
	countTraffic bool
	kept         map[string]keptConnections
	// limit is the approximate maximum number of lines of one input. nf_tables commits large inputs in superlinear
	// time. ip_tables writes the whole table for any number.
	limit int
	// written is how many rules the last Apply has written into each table.
	written [tables]int
}

const (
	nftLimit    = 3000
	legacyLimit = 1 << 30
	leastLimit  = 50
)

func newFamily(ctx context.Context, c Config, f tracker.Family, k kernel, a accounts) (*family, error) {
	p, err := k.Programs(ctx, f)
	if err != nil {
		return nil, err
	}
	out := &family{
		Renderer:   &Renderer{settings: newSettings(c, f)},
		kernel:     k,
		programs:   p,
		log:        c.Log.With(slog.String("family", f.String())),
		complaints: complaint.NewLog(c.Log),
		accounts:   a, countTraffic: c.CountTraffic,
		limit: firstLimit(p),
	}
	return out, out.probe(ctx)
}

func firstLimit(p programs) int {
	if p.NFT() {
		return nftLimit
	}
	return legacyLimit
}

// discard discards the model after a failure that left the tables' state unknown, and returns the error to report.
func (f *family) discard(err error) error {
	f.model = nil
	f.log.Warn("iptables: state of the tables is unknown, a full sync will repair them", slog.Any("error", err))
	return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
}

func (f *family) write(ctx context.Context, inputs ...*input) outcome {
	for i, in := range inputs {
		if f.log.Enabled(ctx, dataplane.LevelTransaction) {
			f.log.Log(ctx, dataplane.LevelTransaction, "iptables: transaction", "table", in.table.String(), "input", string(in.Bytes()))
		}
		out := outcomeOf(f.Restore(ctx, in.Bytes()))
		if out.result != done {
			if i != 0 {
				out.result = unsure
			}
			return out
		}
		f.written[in.table] += in.rules
	}
	return outcome{}
}

// writeBatch writes a batch's chains, then commands, and the canaries, filter before nat, so that an address refuses
// packets before they are no longer forwarded.
func (f *family) writeBatch(ctx context.Context, b *batch, commands [tables][]string) outcome {
	kept := f.carry(ctx, b)
	var inputs []*input
	canaries := f.canaries
	for t := range tables {
		inputs = append(inputs, b.inputs(t, commands[t], f.limit, &canaries[t])...)
	}
	out := f.write(ctx, inputs...)
	if out.result != done {
		return out
	}
	f.canaries, f.kept = canaries, kept
	return out
}

// shrink halves the limit after an input that was too large, and reports whether another attempt makes sense.
func (f *family) shrink(o outcome) bool {
	if o.result != tooLarge || f.limit <= leastLimit {
		return false
	}
	f.limit = max(leastLimit, min(f.limit, nftLimit)/2)
	return true
}
