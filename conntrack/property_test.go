package conntrack

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestCleanerAgreesWithModel drives random changes, failures and flows through a Cleaner. It
// compares the remaining flows with a model that examines all flows and all Services each time.
func TestCleanerAgreesWithModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(25) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			m := &model{t: t, rng: rand.New(rand.NewPCG(seed, 7)), acked: map[string]*ruleset.Port{}, tried: map[string][]*ruleset.Port{}, zones: []uint16{0}}
			cfg := Config{}
			switch seed % 3 {
			case 1:
				m.zones, cfg.Zones = []uint16{3, 0}, []uint16{3, 0}
			case 2:
				m.spare, cfg.Filter = "s1", m.filter
			}
			m.bed = newBedOf(t, cfg)
			m.table.local = []netip.Addr{addr("127.0.0.1"), addr("192.0.2.1")}
			m.table.deleted = m.mayBeDeleted
			for step := range 120 {
				m.traffic()
				m.change(step == 0 || m.rng.IntN(15) == 0)
				m.flush()
				m.check(step)
			}
			if m.deleted == 0 || m.kept == 0 {
				t.Errorf("the test proves nothing: %d deleted, %d kept", m.deleted, m.kept)
			}
		})
	}
}

type model struct {
	t *testing.T
	*bed
	rng           *rand.Rand
	acked         map[string]*ruleset.Port   // the data plane's Services
	tried         map[string][]*ruleset.Port // failed attempts that may be in effect
	port          uint16                     // of the last client
	zones         []uint16                   // the zones that are judged
	spare         string                     // the Service whose flows are spared
	deleted, kept int
}

const (
	modelServices = 5
	nodeAddr      = "192.0.2.1"
)

// random returns a random Service number i. Cluster IPs differ between Services. External IPs,
// NodePorts and endpoints may be shared.
func (m *model) random(i int) *ruleset.Port {
	if m.rng.IntN(5) == 0 {
		return nil
	}
	s := service{name: fmt.Sprint("s", i), cluster: fmt.Sprintf("10.96.0.%d:53", i)}
	if m.rng.IntN(2) == 0 {
		s.nodePort = uint16(30000 + i)
	}
	if m.rng.IntN(2) == 0 {
		s.external = []string{fmt.Sprintf("198.51.100.%d", i)}
	}
	for e := range 4 {
		if m.rng.IntN(3) == 0 {
			how := []string{"", "", "terminating", "gone"}[m.rng.IntN(4)]
			s.endpoints = append(s.endpoints, ep(fmt.Sprintf("10.0.0.%d:53", e), how))
		}
	}
	return s.compile(everyAddress())
}

// packetsTo returns the address and port of a frontend's packets.
func packetsTo(f *ruleset.Frontend) netip.AddrPort {
	if f.Kind == ruleset.KindNodePort {
		return netip.AddrPortFrom(addr(nodeAddr), f.Port)
	}
	return netip.AddrPortFrom(f.Addr, f.Port)
}

// named returns the name of the Service of an address, whether or not the Service exists.
func named(at netip.AddrPort) string {
	if at.Port() == 53 {
		return fmt.Sprint("s", at.Addr().As4()[3])
	}
	return fmt.Sprint("s", at.Port()-30000)
}

// filter is Config.Filter.
func (m *model) filter(s *ruleset.Port, f Flow) bool {
	if want := named(f.Dst); s.Key.Name != want {
		m.t.Errorf("flow %+v taken for one of %s, not of %s", f, s.Key.Name, want)
	}
	return s.Key.Name != m.spare
}

// owner returns the Service at an address.
func (m *model) owner(at netip.AddrPort) *ruleset.Port {
	for _, s := range m.acked {
		for i := range s.Frontends {
			if packetsTo(&s.Frontends[i]) == at {
				return s
			}
		}
	}
	return nil
}

// traffic begins some flows as the data plane would translate them now.
func (m *model) traffic() {
	for range 12 {
		i := m.rng.IntN(modelServices)
		dst := []string{
			fmt.Sprintf("10.96.0.%d:53", i), fmt.Sprintf("198.51.100.%d:53", i),
			fmt.Sprintf("%s:%d", nodeAddr, 30000+i), fmt.Sprintf("192.0.2.9:%d", 30000+i), // another host
			fmt.Sprintf("10.0.0.%d:53", i), // an endpoint, directly
		}[m.rng.IntN(5)]
		m.port++
		f := flow(netip.AddrPortFrom(addr("10.9.0.1"), m.port).String(), dst, dst)
		if m.rng.IntN(8) == 0 {
			f.Protocol = 6
		}
		if m.rng.IntN(8) == 0 {
			f.Zone = 3
		}
		if s := m.owner(f.Dst); s != nil {
			// After a failed attempt, either version may be in effect.
			if tried := m.tried[s.Key.Name]; len(tried) > 0 && m.rng.IntN(2) == 0 {
				s = tried[len(tried)-1]
			}
			if len(s.Selection.Reachable) == 0 {
				continue // refused: no entry
			}
			f.ReplySrc = s.Selection.Reachable[m.rng.IntN(len(s.Selection.Reachable))].Addr
		}
		m.table.flows = append(m.table.flows, f)
	}
}

// change offers changes of some Services to a data plane that may fail.
func (m *model) change(full bool) {
	d := &ruleset.Delta{Full: full, Node: everyAddress(), OldNode: everyAddress()}
	for i := range modelServices {
		name := fmt.Sprint("s", i)
		if !full && m.rng.IntN(2) == 0 && len(m.tried[name]) == 0 {
			continue
		}
		old, now := m.acked[name], m.random(i)
		if old == nil && now == nil && len(m.tried[name]) == 0 {
			continue
		}
		c := change(old, now)
		if old == nil && now == nil {
			c.Key = m.tried[name][0].Key
		}
		d.Changes = append(d.Changes, c)
	}
	m.result = nil
	failed := map[tracker.Key]error{}
	switch m.rng.IntN(6) {
	case 0:
		m.result = errTest
	case 1:
		for _, c := range d.Changes {
			if m.rng.IntN(2) == 0 {
				failed[c.Key] = errTest
			}
		}
		m.result = &ruleset.PartialError{Failed: failed}
	}
	if err := m.backend.Apply(m.t.Context(), d); err != m.result {
		m.t.Fatal(err)
	}
	for _, c := range d.Changes {
		if _, ok := failed[c.Key]; ok || m.result == errTest {
			if c.New != nil {
				m.tried[c.Key.Name] = append(m.tried[c.Key.Name], c.New)
			} else if len(m.tried[c.Key.Name]) == 0 && c.Old != nil {
				m.tried[c.Key.Name] = []*ruleset.Port{c.Old}
			}
			continue
		}
		delete(m.tried, c.Key.Name)
		delete(m.acked, c.Key.Name)
		if c.New != nil {
			m.acked[c.Key.Name] = c.New
		}
	}
}

// mayBeDeleted checks a flow that is deleted: it must not be valid, and the last change of its
// Service must be acknowledged.
func (m *model) mayBeDeleted(f Flow) {
	m.deleted++
	if m.right(f) {
		m.t.Fatalf("deleted %+v", f)
	}
	if s := m.owner(f.Dst); s != nil && len(m.tried[s.Key.Name]) != 0 {
		m.t.Fatalf("deleted %+v, whose Service has a change that is not acknowledged", f)
	}
}

// flush cleans up. The clean-up may fail, or Services change while the table is read.
func (m *model) flush() {
	switch m.rng.IntN(10) {
	case 0:
		m.table.fail = ErrIncomplete
	case 1:
		m.table.refuse = errTest
	case 2, 3, 4:
		m.table.during = func() {
			m.traffic()
			m.change(m.rng.IntN(15) == 0)
			m.traffic()
		}
	}
	err := m.Flush(m.t.Context())
	if m.table.refuse == nil && m.table.fail == nil && err != nil && !errors.Is(err, ErrIncomplete) {
		m.t.Fatal(err)
	}
	m.table.fail, m.table.refuse, m.table.during = nil, nil, nil
}

// right reports whether f is a valid flow.
func (m *model) right(f Flow) bool {
	if f.Protocol != inet.UDP || !slices.Contains(m.zones, f.Zone) || named(f.Dst) == m.spare {
		return true
	}
	s := m.owner(f.Dst)
	if s == nil {
		return f.ReplySrc == f.Dst
	}
	valid := 0
	for _, e := range s.Endpoints {
		if e.Ready || e.Serving {
			valid++
			if e.Addr == f.ReplySrc {
				return true
			}
		}
	}
	return f.ReplySrc == f.Dst && valid == 0
}

// check flushes and verifies that no stale flow is left, except flows of Services with an
// unacknowledged change.
func (m *model) check(step int) {
	if err := m.Flush(m.t.Context()); err != nil || m.Pending() {
		m.t.Fatalf("step %d: %v, pending %v", step, err, m.Pending())
	}
	acknowledged := func(f Flow) bool {
		for _, tried := range m.tried {
			for _, s := range tried {
				for i := range s.Frontends {
					if packetsTo(&s.Frontends[i]) == f.Dst {
						return false
					}
				}
			}
		}
		s := m.owner(f.Dst)
		return s == nil || len(m.tried[s.Key.Name]) == 0
	}
	if extra := len(m.table.flows) - 200; extra > 0 { // old flows expire
		m.table.flows = m.table.flows[extra:]
	}
	for _, f := range m.table.flows {
		m.kept++
		if acknowledged(f) && !m.right(f) {
			m.t.Fatalf("step %d: left %+v, owner %v", step, f, m.owner(f.Dst))
		}
	}
}

// TestModelDetectsMissingCleanUp runs the model with a Cleaner that deletes nothing.
func TestModelDetectsMissingCleanUp(t *testing.T) {
	m := &model{acked: map[string]*ruleset.Port{"dns": dns("10.0.0.2:53")}, zones: []uint16{0}}
	if m.right(toOne) || !m.right(toTwo) {
		t.Error(errors.New("the model does not detect stale flows"))
	}
}
