package ipvs

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptmemory"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// way is a packet's way through the namespace.
type way struct {
	*memory
	iptmemory.Flow
	family tracker.Family
	// ipvs is set after IPVS replaced the destination.
	ipvs bool
}

// handlePacket returns what the namespace does with the first packet of a connection, as DESIGN.md shows. The packet is
// from the node if it has no interface.
func (m *memory) handlePacket(p ruleset.Packet) conformance.Outcome {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := &way{memory: m, Flow: iptmemory.Flow{Packet: p}, family: tracker.FamilyOf(p.To.Addr())}
	w.NodeAddresses = m.local()
	w.Match, w.MapSet = w.match, w.mapSet
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
func (w *way) server() *memoryServer {
	if w.marks && w.Mark&markDrop == markDrop {
		w.Mark &= markBits
	}
	if w.Mark != 0 {
		if v := w.servers[virtualKey{family: w.family, mark: w.Mark}]; v != nil {
			return v
		}
	}
	return w.servers[virtualKey{family: w.family, proto: inet.Protocol(w.Protocol), at: w.To}]
}

// balance returns the outcome of a packet that a virtual server handles.
func (w *way) balance(v *memoryServer) conformance.Outcome {
	out := conformance.Outcome{Action: ruleset.ActionForward}
	for at, r := range v.reals {
		if r.weight == 0 {
			continue
		}
		to := *w
		to.To, to.ipvs = at, true
		to.Match, to.MapSet = to.match, nil
		if a := to.pass([][2]string{{"mangle", "POSTROUTING"}, {"nat", "POSTROUTING"}}); a != ruleset.ActionPass {
			return conformance.Outcome{Action: a}
		}
		weight := int(r.weight)
		if v.scheduler == RoundRobin {
			weight = 1
		}
		// A pod on another node cannot reach itself through this one.
		hairpin := w.InInterface == "eth1" && at.Addr() == w.From
		out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: at, Weight: weight, Masquerade: to.Masquerade || hairpin})
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

// match evaluates the options that iptmemory.Tables does not know.
func (w *way) match(option, value string) bool {
	switch option {
	case "--ipvs":
		return w.ipvs
	case "--match-set":
		name, dirs, _ := strings.Cut(value, " ")
		_, ok := w.element(name, dirs)
		return ok
	}
	panic("unknown option " + option)
}

// element returns the packet mark of the set's element that the packet is in.
func (w *way) element(name, dirs string) (mark uint32, ok bool) {
	set := w.sets[name]
	if set == nil {
		panic("no set " + name)
	}
	e := set.key(entry{family: w.family})
	if set.kind != bitmapPort {
		if e.addr = w.To.Addr(); strings.HasPrefix(dirs, "src") {
			e.addr = w.From
		}
	}
	if set.kind != hashIP {
		e.port = w.To.Port()
	}
	switch set.kind {
	case hashIP, bitmapPort:
	default:
		e.proto = inet.Protocol(w.Protocol)
	}
	switch set.kind {
	case hashIPPortIP:
		e.other = netip.PrefixFrom(w.From, w.From.BitLen())
	case hashIPPortNet:
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
func (w *way) mapSet(value string) {
	name, dirs, _ := strings.Cut(value, " ")
	if mark, ok := w.element(name, dirs); ok {
		w.Mark = mark
	}
}

// local returns all addresses of the namespace.
func (m *memory) local() []netip.Addr {
	n := 0
	for _, d := range m.devices {
		n += len(d.addrs)
	}
	out := make([]netip.Addr, 0, n) // for each packet: by far most of its time, if it grows
	for _, d := range m.devices {
		for a := range d.addrs {
			out = append(out, a)
		}
	}
	return out
}
