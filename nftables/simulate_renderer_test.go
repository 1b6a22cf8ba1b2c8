package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// newVendorPlane returns the data plane of a vendor's backend: a Renderer for each family, and a committer of
// its text that fails. The rules are interpreted as they are written.
func newVendorPlane(tb testing.TB, env conformance.SimEnv) conformance.Fake {
	tables := fake.New()
	tables.Before = func(string) error { return env.Fail() }
	tables.After = func(string) { env.Look() }
	elsewhere := map[netip.Addr]bool{}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			b := rendererBackend{tables: tables, elsewhere: elsewhere}
			for _, f := range env.Families {
				r, err := NewRenderer(Config{Stages: Stages{DestinationNAT: -7, Filter: 3, SourceNAT: 9}}, f)
				if err != nil {
					tb.Fatal(err)
				}
				b.renderers = append(b.renderers, r)
			}
			return b
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { return handle(tables, p, elsewhere) },
	}
}

// rendererBackend is a vendor's backend.
type rendererBackend struct {
	tables    *fake.Tables
	renderers []*Renderer
	elsewhere map[netip.Addr]bool
}

func (rendererBackend) Limits(tracker.Family) ruleset.Limits { return model.Limits() }

func (b rendererBackend) Apply(_ context.Context, d *ruleset.Delta) error {
	noteElsewhere(d, b.elsewhere)
	refused := &ruleset.PartialError{Failed: map[tracker.Key]error{}, Pruned: true, Restored: true}
	for _, r := range b.renderers {
		tx, err := r.Render(d)
		var partial *ruleset.PartialError
		switch {
		case errors.As(err, &partial):
			maps.Copy(refused.Failed, partial.Failed)
		case err != nil:
			return err
		}
		text := tx.String()
		if table := map[tracker.Family]string{tracker.IPv4: "ip proxier", tracker.IPv6: "ip6 proxier"}[tx.Family()]; d.Full {
			text = fmt.Sprintf("add table %s\ndelete table %s\n%s", table, table, text)
		}
		if err := b.tables.Load(text); err != nil {
			tx.Revert()
			return errors.Join(ruleset.ErrNeedFull, err)
		}
	}
	if len(refused.Failed) != 0 {
		return refused
	}
	return nil
}
