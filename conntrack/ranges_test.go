package conntrack

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
)

// TestCleanerAgreesWithModelOfRanges has Services with ranges, single ports and NodePorts share the
// first ports of two addresses, one of which is the node's. It compares the remaining flows with a
// model that examines every frontend for every flow.
func TestCleanerAgreesWithModelOfRanges(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			m := &rangeModel{t: t, rng: rand.New(rand.NewPCG(seed, 11)), acked: make([]*ruleset.Port, rangeServices), wanted: make([]*ruleset.Port, rangeServices)}
			m.bed = newBed(t)
			m.table.local = []netip.Addr{addr("127.0.0.1"), addr(nodeAddr)}
			for step := range 150 {
				m.traffic()
				m.change(step == 0 || m.rng.IntN(15) == 0)
			}
			if m.deleted < 50 || m.kept < 50 || m.inRanges < 50 {
				t.Errorf("the test proves little: %d deleted, %d kept, %d in ranges", m.deleted, m.kept, m.inRanges)
			}
		})
	}
}

// rangeModel is a data plane, and what the Cleaner must have left.
type rangeModel struct {
	t *testing.T
	*bed
	rng *rand.Rand
	// acked holds the Services in effect. tried holds those of failed attempts, each of which may
	// be in effect.
	acked []*ruleset.Port
	tried [][]*ruleset.Port
	// wanted holds the Services with all frontends that they ask for.
	wanted []*ruleset.Port
	client uint16

	deleted, kept, inRanges int
}

const (
	rangeServices = 6
	rangePorts    = 12
)

// world changes some of the wanted Services and returns what each gets. A frontend that conflicts with one of a Service before is left
// out.
func (m *rangeModel) world() []*ruleset.Port {
	out := make([]*ruleset.Port, rangeServices)
	var have []ruleset.Frontend
	for i := range out {
		if m.rng.IntN(2) == 0 {
			m.wanted[i] = m.random(i)
		}
		if m.wanted[i] == nil {
			continue
		}
		c := *m.wanted[i]
		c.Frontends = slices.DeleteFunc(slices.Clone(c.Frontends), func(f ruleset.Frontend) bool {
			return slices.ContainsFunc(have, func(o ruleset.Frontend) bool {
				return f.Addr == o.Addr && f.Kind == o.Kind && f.IsRange() == o.IsRange() && f.Port <= max(o.Port, o.LastPort) && o.Port <= max(f.Port, f.LastPort)
			})
		})
		have = append(have, c.Frontends...)
		out[i] = &c
	}
	return out
}

// random returns a random Service number i, or nil.
func (m *rangeModel) random(i int) *ruleset.Port {
	if m.rng.IntN(5) == 0 {
		return nil
	}
	first := 1 + m.rng.IntN(rangePorts)
	s := service{name: fmt.Sprint("s", i), cluster: fmt.Sprintf("10.96.0.%d:%d", i, first)}
	if m.rng.IntN(3) != 0 {
		s.last = uint16(first + 1 + m.rng.IntN(rangePorts/2))
		s.target = uint16([]int{0, 0, 100 + first}[m.rng.IntN(3)])
	}
	if m.rng.IntN(3) == 0 {
		s.nodePort = uint16(1 + m.rng.IntN(rangePorts))
	}
	for _, a := range []string{"198.51.100.1", nodeAddr} {
		if m.rng.IntN(3) != 0 {
			s.external = append(s.external, a)
		}
	}
	for e := range 3 {
		if m.rng.IntN(2) == 0 {
			how := []string{"", "", "terminating", "gone"}[m.rng.IntN(4)]
			// The ports are also among those of ranges.
			s.endpoints = append(s.endpoints, ep(fmt.Sprintf("10.0.0.%d:%d", e, 1+m.rng.IntN(3)), how))
		}
	}
	return s.compile(everyAddress())
}

// find returns the frontend at an address among Services: first one with a single port, then a
// NodePort, then a range.
func find(all []*ruleset.Port, dst netip.AddrPort) (*ruleset.Port, *ruleset.Frontend) {
	for _, wanted := range []func(*ruleset.Frontend) bool{
		func(f *ruleset.Frontend) bool { return !f.IsRange() && f.Addr == dst.Addr() && f.Port == dst.Port() },
		func(f *ruleset.Frontend) bool {
			return f.Kind == ruleset.KindNodePort && dst.Addr() == addr(nodeAddr) && f.Port == dst.Port()
		},
		func(f *ruleset.Frontend) bool { return f.IsRange() && f.Addr == dst.Addr() && f.Matches(dst.Port()) },
	} {
		for _, s := range all {
			if s == nil {
				continue
			}
			for i := range s.Frontends {
				if wanted(&s.Frontends[i]) {
					return s, &s.Frontends[i]
				}
			}
		}
	}
	return nil, nil
}

// traffic begins flows as the data plane translates them.
func (m *rangeModel) traffic() {
	for range 20 {
		a := []string{"198.51.100.1", nodeAddr, fmt.Sprint("10.96.0.", m.rng.IntN(rangeServices))}[m.rng.IntN(3)]
		dst := netip.AddrPortFrom(addr(a), uint16(1+m.rng.IntN(2*rangePorts)))
		m.client++
		f := flow(netip.AddrPortFrom(addr("10.9.0.1"), m.client).String(), dst.String(), dst.String())
		all := m.acked
		if len(m.tried) > 0 && m.rng.IntN(2) == 0 {
			all = m.tried[m.rng.IntN(len(m.tried))]
		}
		if s, fe := find(all, dst); s != nil {
			if len(s.Selection.Reachable) == 0 {
				continue // refused: no entry
			}
			f.ReplySrc = fe.Endpoint(s.Selection.Reachable[m.rng.IntN(len(s.Selection.Reachable))], dst.Port())
			if fe.IsRange() {
				m.inRanges++
			}
		}
		m.table.flows = append(m.table.flows, f)
	}
}

// right reports whether a flow is valid.
func (m *rangeModel) right(f Flow) bool {
	s, fe := find(m.acked, f.Dst)
	if s == nil {
		return f.ReplySrc == f.Dst
	}
	usable := 0
	for _, e := range s.Endpoints {
		if e.Ready || e.Serving {
			usable++
			if fe.Endpoint(e, f.Dst.Port()) == f.ReplySrc {
				return true
			}
		}
	}
	return f.ReplySrc == f.Dst && usable == 0
}

// change makes the data plane apply a world, and compares the flows that are left if that works.
func (m *rangeModel) change(full bool) {
	next := m.world()
	d := &ruleset.Delta{Full: full, Node: everyAddress(), OldNode: everyAddress()}
	for i, s := range next {
		old, attempted := m.acked[i], []*ruleset.Port(nil)
		for _, t := range m.tried {
			if t[i] != nil {
				attempted = append(attempted, t[i])
			}
		}
		if full || attempted != nil || !reflect.DeepEqual(old, s) {
			if old != nil || s != nil || attempted != nil {
				d.Changes = append(d.Changes, change(old, s, attempted...))
			}
		}
	}
	m.rng.Shuffle(len(d.Changes), func(i, j int) { d.Changes[i], d.Changes[j] = d.Changes[j], d.Changes[i] })
	m.result = nil
	if m.rng.IntN(5) == 0 {
		m.result = errTest
	}
	switch m.rng.IntN(8) {
	case 0:
		m.table.fail = ErrIncomplete
	case 1:
		m.table.refuse = errTest
	}
	before := slices.Clone(m.table.flows)
	if err := m.backend.Apply(m.t.Context(), d); err != m.result {
		m.t.Fatal(err)
	}
	_ = m.Flush(m.t.Context())
	m.table.fail, m.table.refuse = nil, nil
	if m.result != nil {
		m.tried = append(m.tried, next)
		return
	}
	m.acked, m.tried = next, nil
	if err := m.Flush(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
	left := map[Flow]bool{}
	for _, f := range m.table.flows {
		left[f] = true
	}
	for _, f := range before {
		switch {
		case !left[f] && m.right(f):
			m.t.Fatalf("deleted %+v", f)
		case left[f] && !m.right(f):
			_, fe := find(m.acked, f.Dst)
			m.t.Fatalf("left %+v, frontend %+v", f, fe)
		case left[f]:
			m.kept++
		default:
			m.deleted++
		}
	}
	if extra := len(m.table.flows) - 200; extra > 0 { // old flows expire
		m.table.flows = m.table.flows[extra:]
	}
}

// TestSpansAgreeWithModel sets and removes ranges of several Services, and compares the owner of each
// port with a list of all ports.
func TestSpansAgreeWithModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	services := []*ruleset.Port{}
	for i := range 4 {
		services = append(services, service{name: fmt.Sprint("s", i), cluster: "10.96.0.1:53"}.compile(everyAddress()))
	}
	x, a := spans{}, addr("10.96.0.1")
	type owner struct {
		s *ruleset.Port
		w place
	}
	var want [50]owner
	var all []owner // that were set
	for step := range 5000 {
		if len(all) > 0 && rng.IntN(3) == 0 {
			o := all[rng.IntN(len(all))]
			x.remove(o.w, o.s.Key)
			for port := range want {
				if want[port] == o {
					want[port] = owner{}
				}
			}
		} else {
			first := 1 + rng.IntN(len(want)-2)
			last := first + 1 + rng.IntN(len(want)-1-first)
			o := owner{services[rng.IntN(len(services))], place{netip.AddrPortFrom(a, uint16(first)), uint16(last), uint16(first)}}
			x.set(o.w, o.s)
			all = append(all, o)
			for port := first; port <= last; port++ {
				want[port] = o
			}
		}
		for port, o := range want {
			got, ok := x.find(netip.AddrPortFrom(a, uint16(port)))
			if ok != (o.s != nil) || got.service != o.s || got.place != o.w {
				t.Fatalf("step %d: port %d has %+v, want %+v", step, port, got, o)
			}
		}
	}
	for _, o := range all {
		x.remove(o.w, o.s.Key)
	}
	if len(x) != 0 {
		t.Errorf("left %v", x)
	}
}
