package fake

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
	*Kernel
	iptmemory.Flow
	family tracker.Family
	// ipvs is set after IPVS replaced the destination.
	ipvs bool
}

// Handle returns what the namespace does with the first packet of a connection, as DESIGN.md of package ipvs
// shows. The packet is from the node if it has no interface.
func (k *Kernel) Handle(p ruleset.Packet) conformance.Outcome {
	k.mu.Lock()
	defer k.mu.Unlock()
	w := &way{Kernel: k, Flow: iptmemory.Flow{Packet: p}, family: tracker.FamilyOf(p.To.Addr())}
	w.NodeAddresses = k.local()
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
		if a := w.Tables[w.family].Pass(&w.Flow, h[0], h[1]); a != ruleset.ActionPass {
			return a
		}
	}
	return ruleset.ActionPass
}

// server returns the virtual server for the packet.
func (w *way) server() *Virtual {
	if m := w.Marks; m != (Marks{}) && w.Mark&m.Value == m.Value {
		w.Mark &= m.Keep
	}
	if w.Mark != 0 {
		if v := w.Servers[Server{Family: w.family, Mark: w.Mark}]; v != nil {
			return v
		}
	}
	return w.Servers[Server{Family: w.family, Protocol: inet.Protocol(w.Protocol), At: w.To}]
}

// balance returns the outcome of a packet that a virtual server handles.
func (w *way) balance(v *Virtual) conformance.Outcome {
	out := conformance.Outcome{Action: ruleset.ActionForward}
	for at, r := range v.Reals {
		if r.Weight == 0 {
			continue
		}
		to := *w
		to.To, to.ipvs = at, true
		to.Match, to.MapSet = to.match, nil
		if a := to.pass([][2]string{{"mangle", "POSTROUTING"}, {"nat", "POSTROUTING"}}); a != ruleset.ActionPass {
			return conformance.Outcome{Action: a}
		}
		weight := int(r.Weight)
		if v.Scheduler == "rr" {
			weight = 1
		}
		out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: at, Weight: weight, Masquerade: to.Masquerade})
	}
	if len(out.Endpoints) == 0 {
		return conformance.Outcome{Action: ruleset.ActionReject}
	}
	if v.Flags&persistent != 0 {
		out.Affinity = time.Duration(v.Timeout) * time.Second
	}
	if v.Scheduler == "mh" || v.Scheduler == "sh" {
		out.Hash = tracker.HashSource
		if v.Flags&hashPort != 0 {
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
	set := w.Sets[name]
	if set == nil {
		panic("no set " + name)
	}
	addr := w.To.Addr()
	if strings.HasPrefix(dirs, "src") {
		addr = w.From
	}
	e := Element{Addr: addr, Port: w.To.Port(), Protocol: inet.Protocol(w.Protocol)}
	switch set.Type {
	case "hash:ip":
		e = Element{Addr: addr}
	case "bitmap:port":
		e = Element{Port: e.Port}
	case "hash:ip,port,ip":
		e.Other = netip.PrefixFrom(w.From, w.From.BitLen())
	case "hash:ip,port,net":
		for have := range set.Elements {
			if have.Addr == e.Addr && have.Port == e.Port && have.Protocol == e.Protocol && have.Other.Contains(w.From) {
				return 0, true
			}
		}
		return 0, false
	}
	mark, ok = set.Elements[e]
	return mark, ok
}

// mapSet performs the target SET: the packet gets the mark of its element.
func (w *way) mapSet(value string) {
	name, dirs, _ := strings.Cut(value, " ")
	if mark, ok := w.element(name, dirs); ok {
		w.Mark = mark
	}
}
