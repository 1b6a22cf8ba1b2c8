package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

var errNoSteps = errors.New("undisturbed has no steps")

var errWrite = errors.New("conformance: injected write failure")

// simulated are the [answers] of a [Fake].
type simulated struct {
	*World
	o     Simulation
	mode  simMode
	plane Fake

	// pending holds the ruleset that the backend last acknowledged, and those offered
	// since.
	pending []*ruleset.Snapshot
	// seen holds every target that ever was a frontend.
	seen map[simTarget]bool
	// failRate is the probability that a write fails. failures counts the failed
	// writes.
	failRate float64
	failures int
	// watched holds the packets checked at each Look, nil before the first Look of a
	// Sync. looked is the first error that a Look found.
	watched []watched
	looked  error
}

// simTarget is the destination of packets. For a NodePort the address is unspecified.
type simTarget struct {
	at    netip.AddrPort
	proto v1.Protocol
}

func (m *simulated) attach() {
	m.tb.Helper()
	m.answers, m.seen = m, map[simTarget]bool{}
	m.plane = m.o.New(m.tb, m.env(m.fail, m.look))
	if m.plane.Backend == nil || m.plane.Handle == nil {
		m.tb.Fatal("conformance: Simulation.New returned a Fake without Backend or Handle")
	}
	m.World.attach()
	m.pending = []*ruleset.Snapshot{m.Engine.Snapshot()}
}

func (m *simulated) env(fail func() error, look func()) SimEnv {
	e := SimEnv{Families: m.Env.Families, Fail: fail, Look: look}
	for _, f := range e.Families {
		e.NodeAddresses = append(e.NodeAddresses, m.nodeAddresses(f)...)
	}
	return e
}

func (m *simulated) start() ruleset.Backend { return m.plane.Backend() }
func (m *simulated) atOnce() int            { return 1 }
func (m *simulated) count() func() error    { return func() error { return nil } }

func (m *simulated) masquerades(_ ruleset.Packet, v ruleset.Verdict, ep *tracker.Endpoint) bool {
	return v.MasqueradeTo(ep) || !m.does(SourceAddress)
}

// step does only what changes the data plane. A simulated one has no clients: its [Outcome] states that they
// stay.
func (m *simulated) step(s *play, word, _ string, below []line) error {
	switch word {
	case "undisturbed":
		if len(below) == 0 {
			return errNoSteps
		}
		s.run(below)
	case "remember", "same":
		s.Sync()
	case "hold", "held":
	default:
		return fmt.Errorf("no step %q", word)
	}
	return nil
}

func (m *simulated) cold(tb testing.TB) (ruleset.Backend, func(*ruleset.Cursor) error, func() (got, want string)) {
	if m.plane.Dump == nil {
		return nil, nil, nil
	}
	cold := m.o.New(tb, m.env(func() error { return nil }, func() {}))
	return cold.Backend(), syncOnly, func() (got, want string) { return m.plane.Dump(), cold.Dump() }
}

// sync syncs the backend, with failures or restarts depending on the mode, and judges
// the result.
func (m *simulated) sync() error {
	switch m.mode {
	case failing:
		for range 1 + m.rng.IntN(3) {
			if err := m.attempt([]float64{0.02, 0.1, 0.4}[m.rng.IntN(3)]); err != nil {
				return fmt.Errorf("with failing writes: %w", err)
			}
		}
	case restarting:
		m.Cursor.Detach()
		m.World.attach()
	}
	return m.attempt(0)
}

// attempt calls Sync once, with the given probability of failing writes.
func (m *simulated) attempt(failRate float64) error {
	s := m.Engine.Snapshot()
	m.pending = append(m.pending, s)
	m.failRate, m.failures, m.watched, m.looked = failRate, 0, nil, nil
	err := syncOnly(m.Cursor)
	m.failRate = 0
	switch {
	case m.looked != nil:
		return fmt.Errorf("during Apply: %w", m.looked)
	case err != nil && m.failures == 0:
		return fmt.Errorf("sync failed without a failing write: %w", err)
	case err != nil:
		return nil
	}
	m.pending = []*ruleset.Snapshot{s}
	return m.judgeEverything(s)
}

func (m *simulated) fail() error {
	if m.failRate == 0 || m.rng.Float64() >= m.failRate {
		return nil
	}
	m.failures++
	return errWrite
}

// simHosts lists the hosts that send packets to every destination.
var simHosts = []string{"client1", "client2", "remote1", "pod1", "pod2", "pod3", nodeName}

// judgeEverything judges packets from every kind of host to every frontend, from some host to every former
// frontend, and to addresses around them.
func (m *simulated) judgeEverything(s *ruleset.Snapshot) error {
	try := func(from string, t simTarget) error { return m.judge(s, probe{from, t.proto, t.at, ""}) }
	now := map[simTarget]bool{}
	n := 0
	for _, t := range targetsOf(s) {
		now[t], m.seen[t] = true, true
		for _, from := range simHosts {
			n++
			if err := try(from, concrete(t, n)); err != nil {
				return err
			}
		}
		if t.at.Addr().IsUnspecified() {
			local := address("loopback", tracker.FamilyOf(t.at.Addr()))
			for _, from := range []string{"loopback", "client1"} {
				if err := try(from, simTarget{netip.AddrPortFrom(local, t.at.Port()), t.proto}); err != nil {
					return err
				}
			}
		}
	}
	for t := range m.seen {
		if now[t] {
			continue
		}
		n++
		if err := try(simHosts[n%len(simHosts)], concrete(t, n)); err != nil {
			return fmt.Errorf("at a former frontend: %w", err)
		}
	}
	around, err := parseAims(fmt.Sprintf("cluster199:80 cluster1:9 external1:9 node:%d pod2:%d", nodePortOwn, podPort))
	for _, f := range m.Env.Families {
		for _, a := range around {
			n++
			if err = try(simHosts[n%len(simHosts)], simTarget{a.at(f), a.proto}); err != nil {
				return err
			}
		}
	}
	return err
}

func targetsOf(s *ruleset.Snapshot) []simTarget {
	var out []simTarget
	for _, svc := range s.Ports {
		for _, fe := range svc.Frontends {
			addr := fe.Addr
			if fe.Kind == ruleset.KindNodePort {
				addr = pick(svc.Key.Family, "0.0.0.0", "::")
			}
			out = append(out, simTarget{netip.AddrPortFrom(addr, fe.Port), svc.Key.Protocol})
		}
	}
	slices.SortFunc(out, func(a, b simTarget) int {
		return cmp.Or(a.at.Compare(b.at), strings.Compare(string(a.proto), string(b.proto)))
	})
	return slices.Compact(out)
}

// concrete returns the target with one of the node's addresses if it is a NodePort.
func concrete(t simTarget, n int) simTarget {
	if t.at.Addr().IsUnspecified() {
		t.at = netip.AddrPortFrom(nodeAddresses(tracker.FamilyOf(t.at.Addr()))[n%3], t.at.Port())
	}
	return t
}

// judged reports whether a verdict of s does not depend on a feature that the backend lacks.
func (m *simulated) judged(s *ruleset.Snapshot, v ruleset.Verdict, p ruleset.Packet) bool {
	toNode := slices.Contains(p.NodeAddresses, p.To.Addr())
	switch {
	case v.Port == nil:
		return (v.Action != ruleset.ActionReject || m.does(ClosedPorts)) &&
			(v.Action != ruleset.ActionDrop || m.does(ServiceCIDRs)) &&
			(v.Action != ruleset.ActionPass || toNode || m.does(OtherPorts))
	case v.Port.Key.Protocol == sctp && !m.does(SCTP):
		return false
	case len(v.Frontend.Sources) != 0:
		return m.does(SourceRanges) && (m.does(RefuseBySource) || v.Frontend.Target != ruleset.TargetReject && v.Frontend.Internal != ruleset.TargetReject)
	}
	return true
}

func (m *simulated) outcome(_ string, p ruleset.Packet, v ruleset.Verdict) (Outcome, error) {
	o := m.plane.Handle(p)
	o.Action = action(o)
	// Packets to the node itself are not masqueraded.
	o.Endpoints = slices.Clone(o.Endpoints)
	for i, c := range o.Endpoints {
		for _, ep := range v.Endpoints {
			if ep.Addr == c.Addr && slices.Contains(p.NodeAddresses, c.Addr.Addr()) {
				o.Endpoints[i].Masquerade = m.masquerades(p, v, ep)
			}
		}
	}
	return o, nil
}

// action returns an outcome's action, of which 0 means ActionPass.
func action(o Outcome) ruleset.Action { return cmp.Or(o.Action, ruleset.ActionPass) }

// watched is a packet that is checked at each Look, with the verdict of each pending
// ruleset.
type watched struct {
	packet   ruleset.Packet
	from     string
	verdicts []ruleset.Verdict
	forwards int
	// endpoints holds the endpoints of the verdicts' Services in any of the rulesets:
	// the references to a Service and its pools need not change at the same time.
	endpoints map[netip.AddrPort]bool
}

// watchedOthers bounds the watched frontends of unchanged Services.
const watchedOthers = 8

func (m *simulated) look() {
	if m.looked != nil || m.Engine == nil {
		return
	}
	if m.watched == nil {
		m.watched = m.watch()
	}
	for _, p := range m.watched {
		if err := m.between(p, m.plane.Handle(p.packet)); err != nil {
			m.looked = fmt.Errorf("%s from %s (%s) to %s: %w (%s)", p.packet.Protocol, p.from, p.packet.From, p.packet.To, err, p.verdicts[len(p.verdicts)-1].Rule)
			return
		}
	}
}

func (m *simulated) watch() []watched {
	out := []watched{}
	done, others := map[simTarget]bool{}, 0
	byKey := map[tracker.Key][]*ruleset.Port{}
	for _, s := range m.pending {
		for _, svc := range s.Ports {
			byKey[svc.Key] = append(byKey[svc.Key], svc)
		}
	}
	for _, s := range m.pending {
		for _, t := range targetsOf(s) {
			if done[t] {
				continue
			}
			done[t] = true
			from := simHosts[m.rng.IntN(len(simHosts))]
			t = concrete(t, m.rng.IntN(3))
			p := watched{packet: m.packet(from, t.proto, t.at), from: from, endpoints: map[netip.AddrPort]bool{}}
			same, ok := true, true
			for _, s := range m.pending {
				v := s.Trace(p.packet)
				ok = ok && m.skips.judges(s, v, p.packet) && m.judged(s, v, p.packet)
				same = same && (len(p.verdicts) == 0 || v.Port == p.verdicts[0].Port)
				if v.Action == ruleset.ActionForward {
					p.forwards++
				}
				p.verdicts = append(p.verdicts, v)
			}
			if same {
				others++
			}
			if !ok || same && others > watchedOthers {
				continue
			}
			for _, v := range p.verdicts {
				if v.Port == nil {
					continue
				}
				for _, svc := range byKey[v.Port.Key] {
					for _, ep := range svc.Selection.Reachable {
						p.endpoints[ep.Addr] = true
					}
				}
			}
			out = append(out, p)
		}
	}
	return out
}

// between checks an outcome during an Apply.
func (m *simulated) between(p watched, o Outcome) error {
	forwarded := o.Action == ruleset.ActionForward
	switch {
	case !m.does(ReplaceInPlace) && (!forwarded || p.forwards == 0):
		return nil
	case !forwarded && p.forwards == len(p.verdicts):
		return fmt.Errorf("%s, but it is forwarded before and after", o)
	case !forwarded:
		return nil
	case p.forwards == 0:
		return fmt.Errorf("%s, but it is forwarded neither before nor after", o)
	case len(o.Endpoints) == 0:
		return errors.New("forwarded, but to no endpoint")
	}
	for _, c := range o.Endpoints {
		if !p.endpoints[c.Addr] {
			return fmt.Errorf("%s, but %s is an endpoint neither before nor after", o, c.Addr)
		}
	}
	return nil
}
