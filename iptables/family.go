//go:build linux

package iptables

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/iptables/internal/nfacct"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// family programs one family's tables.
type family struct {
	*settings
	tool tool
	log  *slog.Logger
	// complaints receives what is wrong with Services.
	complaints *complaint.Log
	// accounts creates the objects that rules count into. can selects the counters that
	// work on this system if the objects exist.
	accounts *nfacct.Conn
	can      []string
	// model holds the state of the tables, nil while it is unknown.
	model *model
	// canary is the rule in each table's canary.
	canary [tables]string
	// missed is set if Check last reported that a compared rule is missing. jumpsOnly is set
	// once iptables-restore has reported that of rules that were there: then Check does not
	// compare rules.
	missed, jumpsOnly bool
	// countTraffic carries counters over when chains are written. kept holds the counters of
	// pools without a chain.
	countTraffic bool
	kept         map[string]connections
	// limit is about the most lines of one input. The time that nf_tables takes to commit
	// grows faster than the number of lines. ip_tables writes the whole table for any
	// number.
	limit int
	// divisible reports whether the input that failed last has several chains.
	divisible bool
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
			family: f, mark: uint32(c.MasqueradeMark),
			localhost:        c.LocalhostNodePorts && f == tracker.IPv4,
			endpointComments: c.EndpointComments,
			refuseHash:       c.Hash == HashRefused,
		},
		tool:       t,
		log:        c.Log.With(slog.String("family", f.String())),
		complaints: complaint.NewLog(c.Log),
		accounts:   accounts, countTraffic: c.CountTraffic,
		limit: firstLimit(t),
	}
	return out, out.probe(ctx)
}

// firstLimit returns the limit to begin with.
func firstLimit(t tool) int {
	if t.NFT() {
		return nftLimit
	}
	return legacyLimit
}

// unknown discards the model after a failure that left the state of the tables
// unknown. It returns the error to report.
func (f *family) unknown(err error) error {
	f.model = nil
	f.log.Warn("iptables: state of the tables is unknown, a full sync will repair them", slog.Any("error", err))
	return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
}

// write applies inputs, in order. wrote reports whether something may be in effect
// after an error.
func (f *family) write(ctx context.Context, inputs []*input) (wrote bool, err error) {
	for _, in := range inputs {
		if err := f.tool.apply(ctx, in); err != nil {
			f.divisible = in.chains > 1
			return wrote || killed(err), err
		}
		f.written[in.table] += in.rules
		wrote = true
	}
	return wrote, nil
}

// writeTable writes one table of a batch: its chains, then the commands, and the canary.
func (f *family) writeTable(ctx context.Context, b *batch, t table, commands []string) (wrote bool, err error) {
	var canary canaryRule
	wrote, err = f.write(ctx, b.inputs(t, commands, f.limit, canary.next))
	if wrote && err == nil {
		f.canary[t] = canary.last
	}
	return wrote, err
}

// writeBatch writes the filter table before nat, so that an address refuses packets
// before they are no longer forwarded.
func (f *family) writeBatch(ctx context.Context, b *batch, commands [tables][]string) (wrote bool, err error) {
	kept := f.carry(ctx, b)
	for t := range tables {
		w, err := f.writeTable(ctx, b, t, commands[t])
		wrote = wrote || w
		if err != nil {
			return wrote, err
		}
	}
	f.kept = kept
	return wrote, nil
}

// smaller halves the limit after an input that was too large, and reports whether
// another attempt makes sense.
func (f *family) smaller(err error) bool {
	if !tooLarge(err) || !f.divisible || f.limit <= leastLimit {
		return false
	}
	f.limit = max(leastLimit, min(f.limit, nftLimit)/2)
	return true
}
