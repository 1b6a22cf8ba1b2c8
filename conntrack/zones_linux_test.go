package conntrack

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestKernelTableReportsItsZonesOnly opens the kernel's table for some zones.
func TestKernelTableReportsItsZonesOnly(t *testing.T) {
	h := netlab.NewHost(t)
	var flows []Flow
	for i, zone := range []uint16{0, 7, 65520} {
		for n := range i + 1 {
			flows = append(flows,
				in(zone, flow(fmt.Sprintf("10.9.0.1:%d", 1000+n), "10.96.0.1:53", "10.0.0.1:53")),
				in(zone, flow(fmt.Sprintf("[fd09::1]:%d", 1000+n), "[fd96::1]:53", "[fd00::1]:53")))
		}
	}
	create(t, h, flows...)
	for _, c := range []struct{ zones, want []uint16 }{
		{nil, []uint16{0}},
		{[]uint16{0}, []uint16{0}},
		{[]uint16{7}, []uint16{7}},
		{[]uint16{65520}, []uint16{65520}},
		{[]uint16{65520, 0}, []uint16{0, 65520}},
		{[]uint16{9}, nil},
	} {
		table := must.Get(OpenKernelTable(Config{NetNS: h.File(), Zones: c.zones}))(t)
		defer table.Close()
		for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			var got, want []Flow
			must.Do(t, table.Dump(t.Context(), family, func(f *Flow) { got = append(got, *f) }))
			for i := range got {
				got[i].ID = 0
			}
			for _, f := range flows {
				if tracker.FamilyOf(f.Dst.Addr()) == family && slices.Contains(c.want, f.Zone) {
					want = append(want, f)
				}
			}
			order := func(a, b Flow) int { return int(a.Zone) - int(b.Zone) + 100000*a.Src.Compare(b.Src) }
			slices.SortFunc(got, order)
			slices.SortFunc(want, order)
			if !slices.Equal(got, want) {
				t.Errorf("zones %v, %s: %v, want %v", c.zones, family, got, want)
			}
		}
	}
}

// logged is a table that records deleted flows.
type logged struct {
	FlowTable
	deleted []Flow
}

// Delete implements [FlowTable].
func (l *logged) Delete(ctx context.Context, flows []Flow) (int, error) {
	l.deleted = append(l.deleted, flows...)
	return l.FlowTable.Delete(ctx, flows)
}

// TestKernelTableCanBeWrapped has a Cleaner work on the kernel's table through a wrapper. Its
// Close leaves the table open.
func TestKernelTableCanBeWrapped(t *testing.T) {
	h := netlab.NewHost(t)
	create(t, h, in(7, toOne), in(7, toTwo), toOne)
	table := must.Get(OpenKernelTable(Config{NetNS: h.File(), Zones: []uint16{7}}))(t)
	defer table.Close()
	wrapped := &logged{FlowTable: table}
	c := must.Get(New(t.Context(), Config{Table: wrapped, Zones: []uint16{7}}))(t)
	both, two := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
	c.note(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, both)}}, nil)
	c.note(&ruleset.Delta{Node: everyAddress(), Changes: []ruleset.Change{change(both, two)}}, nil)
	must.Do(t, c.Flush(t.Context()))
	if len(wrapped.deleted) != 1 || wrapped.deleted[0].Src != toOne.Src || wrapped.deleted[0].Zone != 7 {
		t.Errorf("deleted %v", wrapped.deleted)
	}
	if got, want := read(t, h), shown(toOne, toTwo); !slices.Equal(got, want) {
		t.Errorf("left: %v, want %v", got, want)
	}
	must.Do(t, c.Close())
	left := 0
	if err := table.Dump(t.Context(), tracker.IPv4, func(*Flow) { left++ }); err != nil || left != 1 {
		t.Errorf("after the Cleaner's Close: %d flows, %v", left, err)
	}
}
