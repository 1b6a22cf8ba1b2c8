package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/iptables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestSimulation runs the conformance suite with a kernel in memory.
func TestSimulation(t *testing.T) {
	worlds := 4
	if testtime.Thorough() {
		worlds = 100
	}
	conformance.Simulate(t, conformance.Simulation{Skip: skips, New: newPlane, First: *backendtest.Seed, Worlds: worlds})
}

func TestReleasesDeltas(t *testing.T) {
	backendtest.ReleasesDeltas(t, newPlane)
}

// foreignMark is what network policies of another program set in the mark of all packets.
const foreignMark = "0x30000/0x30000"

// newPlane returns a Backend beside network policies of another program.
func newPlane(tb testing.TB, env conformance.SimEnv) conformance.Fake {
	config, err := Config{Families: env.Families}.withDefaults()
	if err != nil {
		tb.Fatal(err)
	}
	m := newMemory(env.NodeAddresses...)
	for _, t := range m.tables {
		for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
			if err := t.Run("-A", chain, "-j", "MARK", "--set-xmark", foreignMark); err != nil {
				tb.Fatal(err)
			}
		}
	}
	w := &watched{memory: m, fail: env.Fail, look: env.Look}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			w.Backend = newBackend(config, m.handle(config))
			return w
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { w.settle(tb); return m.handlePacket(p) },
		Dump:   func() string { w.settle(tb); return m.dump() },
	}
}

// watched is a Backend whose writes fail only in Apply.
type watched struct {
	*Backend
	memory *memory
	fail   func() error
	look   func()
	// applying is set during Apply, and applied after it.
	applying, applied bool
}

func (w *watched) Apply(ctx context.Context, d *ruleset.Delta) error {
	w.memory.fail, w.memory.look = w.fail, w.look
	w.applying = true
	err := w.Backend.Apply(ctx, d)
	w.applying, w.applied = false, true
	w.memory.fail, w.memory.look = nil, nil
	return err
}

// settle does after Apply what Watch does every second. No real server has connections.
func (w *watched) settle(tb testing.TB) {
	if w.applying || !w.applied {
		return
	}
	w.applied = false
	if err := w.tend(context.Background(), time.Now().Add(time.Hour)); err != nil && !errors.Is(err, ruleset.ErrNeedFull) {
		tb.Error(err)
	}
}

// way is a packet's way through the namespace.
type way struct {
	*memory
	fake.Flow
	family tracker.Family
	// ipvs is set after IPVS replaced the destination.
	ipvs bool
}

// handlePacket returns what the namespace does with the first packet of a connection, as
// DESIGN.md shows.
func (m *memory) handlePacket(p ruleset.Packet) conformance.Outcome {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := &way{memory: m, Flow: fake.Flow{Packet: p}, family: tracker.FamilyOf(p.To.Addr())}
	w.NodeAddresses = m.local()
	w.Match, w.Target = w.match, func(_ *fake.Flow, r iptext.Rule) { w.mapSet(r) }
	toNode := slices.Contains(w.NodeAddresses, p.To.Addr())
	fromNode := p.InInterface == ""
	hooks := [][2]string{{"nat", "PREROUTING"}, {"mangle", "INPUT"}, {"filter", "INPUT"}}
	switch {
	case fromNode:
		hooks = [][2]string{{"mangle", "OUTPUT"}, {"nat", "OUTPUT"}}
	case !toNode:
		hooks = [][2]string{{"nat", "PREROUTING"}, {"mangle", "FORWARD"}, {"filter", "FORWARD"}}
	}
	if a := w.pass(hooks); a != ruleset.ActionPass {
		return conformance.Outcome{Action: a}
	}
	if toNode || fromNode {
		if v := w.server(); v != nil {
			return w.balance(v)
		}
	}
	if fromNode {
		hooks = [][2]string{{"filter", "OUTPUT"}}
		if toNode {
			hooks = append(hooks, [2]string{"filter", "INPUT"})
		}
		return conformance.Outcome{Action: w.pass(hooks)}
	}
	return conformance.Outcome{}
}

// pass sends the packet through chains until one ends its way.
func (w *way) pass(hooks [][2]string) ruleset.Action {
	for i, h := range hooks {
		if h[1] == "INPUT" && i > 0 && w.InInterface == "" {
			w.InInterface = "lo"
		}
		if a := w.tables[w.family].Pass(&w.Flow, h[0], h[1]); a != ruleset.ActionPass {
			return a
		}
	}
	return ruleset.ActionPass
}

// server returns the virtual server for the packet.
func (w *way) server() *memoryVirtual {
	if w.Mark&w.restored.Value == w.restored.Value {
		w.Mark &= w.restored.own()
	}
	if w.Mark != 0 {
		if v := w.virtuals[virtualKey{family: w.family, mark: w.Mark}]; v != nil {
			return v
		}
	}
	return w.virtuals[virtualKey{family: w.family, proto: inet.Protocol(w.Protocol), at: w.To}]
}

// balance returns the outcome of a packet that a virtual server handles.
func (w *way) balance(v *memoryVirtual) conformance.Outcome {
	out := conformance.Outcome{Action: ruleset.ActionForward}
	for _, r := range v.reals {
		if r.weight == 0 {
			continue
		}
		to := *w
		to.To, to.ipvs = r.at, true
		to.Match, to.Target = to.match, nil
		if a := to.pass([][2]string{{"mangle", "POSTROUTING"}, {"nat", "POSTROUTING"}}); a != ruleset.ActionPass {
			return conformance.Outcome{Action: a}
		}
		weight := int(r.weight)
		if v.scheduler == RoundRobin {
			weight = 1
		}
		// A pod on another node cannot reach itself through this one.
		elsewhere := w.InInterface == "eth1" && r.at.Addr() == w.From
		out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: r.at, Weight: weight, Masquerade: to.Masquerade || elsewhere})
	}
	if len(out.Endpoints) == 0 {
		return conformance.Outcome{Action: ruleset.ActionReject}
	}
	if v.flags&flagPersistent != 0 {
		out.Affinity = time.Duration(v.timeout) * time.Second
	}
	if v.scheduler == Maglev || v.scheduler == SourceHash {
		out.Hash = tracker.HashSource
		if v.flags&flagPort != 0 {
			out.Hash = tracker.HashSourcePort
		}
	}
	return out
}

// match evaluates the options that fake does not know.
func (w *way) match(o iptext.Option) bool {
	switch o.Name {
	case "--ipvs":
		return w.ipvs
	case "--match-set":
		name, dirs, _ := strings.Cut(o.Value, " ")
		_, ok := w.element(name, dirs)
		return ok
	}
	panic("unknown option " + o.Name)
}

// element returns the packet mark of the set's element that the packet is in.
func (w *way) element(name, dirs string) (mark uint32, ok bool) {
	set := w.sets[name]
	if set == nil {
		panic("no set " + name)
	}
	addr := w.To.Addr()
	if strings.HasPrefix(dirs, "src") {
		addr = w.From
	}
	e := entry{addr: addr, port: w.To.Port(), proto: inet.Protocol(w.Protocol)}
	switch set.typeName {
	case "hash:ip":
		e = entry{addr: addr}
	case "bitmap:port":
		e = entry{port: e.port}
	case "hash:ip,port,ip":
		e.other = netip.PrefixFrom(w.From, w.From.BitLen())
	case "hash:ip,port,net":
		for have := range set.elements {
			if have.addr == e.addr && have.port == e.port && have.proto == e.proto && have.other.Contains(w.From) {
				return 0, true
			}
		}
		return 0, false
	}
	mark, ok = set.elements[e]
	return mark, ok
}

// mapSet performs the target SET: the packet gets the mark of its element.
func (w *way) mapSet(r iptext.Rule) {
	name, dirs, _ := strings.Cut(r.Option("--map-set"), " ")
	if mark, ok := w.element(name, dirs); ok {
		w.Mark = mark
	}
}

// dump returns everything in the namespace, without packet marks, which depend on the order of
// changes.
func (m *memory) dump() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	// internal holds the destinations whose internal traffic has a virtual server, by mark.
	internal := map[virtualKey]string{}
	for name, set := range m.sets {
		for e, mark := range set.elements {
			line := fmt.Sprint(name, " ", e.addr, " ", e.proto, " ", e.port, " ", e.other)
			if mark != 0 {
				f := tracker.FamilyOf(e.addr)
				k := virtualKey{family: f, mark: mark}
				if m.virtuals[k] != nil {
					if internal[k] == "" || line < internal[k] {
						internal[k] = line
					}
				}
				line += " " + strconv.FormatBool(m.virtuals[k] != nil)
			}
			out = append(out, line)
		}
	}
	for k, v := range m.virtuals {
		name := k.String()
		if k.mark != 0 {
			name = "internal traffic to " + internal[k]
		}
		out = append(out, fmt.Sprint(name, " ", v.virtual))
		for at, r := range v.reals {
			out = append(out, fmt.Sprint(name, " has ", at, " ", r.weight))
		}
	}
	for name, d := range m.devices {
		for a := range d.addrs {
			out = append(out, name+" "+a.String())
		}
	}
	slices.Sort(out)
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		var rules strings.Builder
		if err := m.tables[f].Save(context.Background(), "", &rules); err != nil {
			panic(err)
		}
		out = append(out, rules.String())
	}
	return strings.Join(out, "\n")
}
