package model

import (
	"context"
	"errors"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// state prints what plans change in a table.
func state(t *Table) string {
	var pools []pool
	for _, s := range t.services {
		for i := 0; s != nil && i < len(s.pools); i++ {
			if s.pools[i] != nil {
				pools = append(pools, *s.pools[i])
			}
		}
	}
	return fmt.Sprint(pools, t.plain.cell.now, t.pools.sticky.cell.now, t.adopted.now, t.handlers.now, t.chains.sticky.now, t.stickyNumbers.cell.now,
		t.unused.now, t.verdicts.now, t.objects.now, t.garbage.now, t.clusterIPs.now, t.prefixes.now,
		t.refs.now, t.grace.now, t.stickyOf.now, t.longNames.now)
}

// TestRefusedServiceLeavesTableAsItWas plans each change of Services of all kinds in a transaction
// without room first.
func TestRefusedServiceLeavesTableAsItWas(t *testing.T) {
	p := backendtest.NewNode(t, tracker.Config{})
	var tab *Table
	refused := 0
	c := p.Engine.Attach("plan", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		if tab == nil {
			tab = NewTable(tracker.IPv4, d.Node, DefaultConfig, d.Changes, 0)
		}
		for i := range d.Changes {
			if d.Changes[i].Key.Family != tracker.IPv4 {
				continue
			}
			was, tx := state(tab), &Tx{Limit: 1}
			if err := tab.Change(&d.Changes[i], tx); errors.Is(err, ErrTooLarge) {
				refused++
			} else {
				t.Errorf("%v: %v", d.Changes[i].Key, err)
			}
			if now := state(tab); now != was || len(tx.Edits)+len(tx.Objects)+len(tx.Lost) != 0 {
				t.Errorf("%v: the table has\n%s\nbefore\n%s", d.Changes[i].Key, now, was)
			}
			if err := tab.Change(&d.Changes[i], &Tx{}); err != nil {
				t.Error(err)
			}
		}
		return nil
	}))
	for round := range 4 {
		for i := range 6 {
			options := []func(*v1.Service){backendtest.NodePort(int32(30000 + i))}
			if (i+round)%2 == 0 {
				options = append(options, backendtest.Affinity(int32(10+round)))
			}
			if (i+round)%3 == 0 {
				options = append(options, backendtest.ExternalLocal, func(s *v1.Service) { s.Spec.ExternalIPs = []string{fmt.Sprint("192.0.2.", 1+i)} })
			}
			p.Tracker.SetService(backendtest.Numbered(i, options...))
			p.Tracker.SetSlice(backendtest.NumberedSlice(i, tracker.IPv4, upTo(i+5*round%7)...))
		}
		must.Do(t, c.Sync(t.Context()))
	}
	if refused < 15 {
		t.Errorf("only %d changes", refused)
	}
}

func upTo(n int) (out []int) {
	for i := range n {
		out = append(out, i)
	}
	return out
}
