package iptmemory

import (
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// Flow is the first packet of a connection on its way through the tables.
type Flow struct {
	// Packet is the packet. DNAT changes its destination and sets Translated.
	ruleset.Packet
	Translated bool
	// Mark is the packet's mark, and Masquerade reports whether its source is replaced.
	Mark       uint32
	Masquerade bool
	// Draw decides about a random choice. It returns true with probability p.
	Draw func(p float64) bool
	// Match, unless it is nil, evaluates options that Tables does not know, such as "--match-set" with the value
	// "NAME dst,dst".
	Match func(option, value string) bool
	// MapSet, unless it is nil, performs the target SET with the value of its option --map-set, such as
	// "NAME dst,dst".
	MapSet func(value string)
	// recent holds, by list, the timeout of the rules that look for clients. affinity is the
	// list that the packet's source was added to.
	recent   map[string]time.Duration
	affinity string
}

// maxDepth bounds how many chains can lead to each other. The kernel refuses loops.
const maxDepth = 64

// Pass sends the flow through a chain, usually one of the kernel's own. It returns
// [ruleset.ActionReject], [ruleset.ActionDrop], or [ruleset.ActionPass] if it may go on.
func (t *Tables) Pass(f *Flow, table, chain string) ruleset.Action {
	t.mu.Lock()
	chains := t.tables[table]
	t.mu.Unlock()
	if v := walk(chains, f, chain, 0); v != 0 {
		return v
	}
	return ruleset.ActionPass
}

// walk sends the flow through a chain and returns the verdict, 0 for none.
func walk(chains table, f *Flow, name string, depth int) ruleset.Action {
	if depth == maxDepth {
		panic("iptmemory: chains lead to each other in a loop")
	}
	c := chains[name]
	if c == nil {
		return 0
	}
	for i := range c.rules {
		r := &c.rules[i]
		if !f.matches(r) {
			continue
		}
		switch r.Target {
		case "":
		case "ACCEPT":
			return ruleset.ActionPass
		case "DROP":
			return ruleset.ActionDrop
		case "REJECT":
			return ruleset.ActionReject
		case "RETURN":
			return 0
		case "DNAT":
			to, err := netip.ParseAddrPort(r.Option("--to-destination"))
			if err != nil {
				panic(err) // parse accepted it
			}
			f.To, f.Translated = to, true
			return ruleset.ActionPass
		case "MASQUERADE":
			f.Masquerade = true
			return ruleset.ActionPass
		case "MARK":
			value, mask, _ := parseMark(r.Option("--set-xmark"))
			f.Mark = f.Mark&^mask ^ value
		case "SET":
			if f.MapSet != nil {
				f.MapSet(r.Option("--map-set"))
			}
		default:
			if v := walk(chains, f, r.Target, depth+1); v != 0 || r.Goto {
				return v
			}
		}
	}
	return 0
}

func (f *Flow) matches(r *rule) bool {
	for i := range r.matches {
		if f.match(r, &r.matches[i]) == r.matches[i].Not {
			return false
		}
	}
	return true
}

func (f *Flow) local(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(f.NodeAddresses, a)
}

func (f *Flow) match(r *rule, m *match) bool {
	switch m.Name {
	case "-s":
		return m.prefix.Contains(f.From)
	case "-d":
		return m.prefix.Contains(f.To.Addr())
	case "-p":
		return strings.EqualFold(m.Value, string(f.Protocol))
	case "-i":
		if prefix, ok := strings.CutSuffix(m.Value, "+"); ok {
			return f.InInterface != "" && strings.HasPrefix(f.InInterface, prefix)
		}
		return f.InInterface == m.Value
	case "--dport":
		port := uint64(f.To.Port())
		return m.from <= port && port <= m.to
	case "--src-type":
		return m.Value == "LOCAL" && f.local(f.From)
	case "--dst-type":
		return m.Value == "LOCAL" && f.local(f.To.Addr())
	case "--ctstate":
		states := strings.Split(m.Value, ",")
		return slices.Contains(states, "NEW") || f.Translated && slices.Contains(states, "DNAT")
	case "--mark":
		return f.Mark&m.mask == m.mark
	case "--probability":
		return f.Draw(m.probability)
	case "--rcheck":
		// The client is new. Later connections take this rule for as long as the list
		// remembers the client.
		if f.recent == nil {
			f.recent = map[string]time.Duration{}
		}
		if name := r.value("--name").Value; name == r.Target {
			f.recent[name] = time.Duration(r.value("--seconds").from) * time.Second
		}
		return false
	case "--set":
		f.affinity = r.value("--name").Value
		return true
	case "--mode", "--seconds", "--reap", "--name", "--mask", "--rsource", "--nfacct-name":
		return true
	}
	return f.Match != nil && f.Match(m.Name, m.Value)
}

func (r *rule) value(option string) match {
	for _, m := range r.matches {
		if m.Name == option {
			return m
		}
	}
	return match{}
}

// Handle returns what the tables do with the first packet of a connection: all ways that random
// choices may take. The packet is from the node if it has no interface.
func (t *Tables) Handle(p ruleset.Packet) conformance.Outcome {
	var out conformance.Outcome
	var weights []float64
	for d := (draws{}); ; {
		f := &Flow{Packet: p, Draw: d.next}
		d.at, d.p = 0, 1
		action := t.route(f)
		if action != ruleset.ActionForward {
			return conformance.Outcome{Action: action}
		}
		out.Action = action
		i := slices.IndexFunc(out.Endpoints, func(c conformance.Choice) bool { return c.Addr == f.To })
		if i < 0 {
			i = len(out.Endpoints)
			out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: f.To, Masquerade: f.Masquerade})
			weights = append(weights, 0)
		}
		weights[i] += d.p
		// A list that one rule adds to and none looks for is not affinity.
		affinity := f.recent[f.affinity]
		if (f.affinity == "") != (len(f.recent) == 0) || f.affinity != "" && affinity == 0 || len(weights) > 1 && affinity != out.Affinity {
			affinity = -1
		}
		out.Affinity = affinity
		if !d.more() {
			break
		}
	}
	scale(out.Endpoints, weights)
	return out
}

// route sends the flow through all hooks. It returns [ruleset.ActionForward] if the destination
// was translated and nothing stops the packet.
func (t *Tables) route(f *Flow) ruleset.Action {
	hook := "FORWARD"
	if f.InInterface == "" {
		t.Pass(f, "nat", "OUTPUT")
		if v := t.Pass(f, "filter", "OUTPUT"); v != ruleset.ActionPass {
			return v
		}
		hook = ""
	} else {
		t.Pass(f, "nat", "PREROUTING")
	}
	toNode := f.local(f.To.Addr())
	if toNode {
		hook = "INPUT"
	}
	if hook != "" {
		if v := t.Pass(f, "filter", hook); v != ruleset.ActionPass {
			return v
		}
	}
	if !toNode || f.InInterface == "" {
		t.Pass(f, "nat", "POSTROUTING")
	}
	if f.Translated {
		return ruleset.ActionForward
	}
	return ruleset.ActionPass
}

// draws enumerates the results of random choices. Each way through the tables replays a prefix
// of the previous one and then differs in one choice.
type draws struct {
	made []drawn
	at   int     // how many choices the present way has made
	p    float64 // the probability of the present way so far
}

type drawn struct {
	p   float64
	yes bool
}

func (d *draws) next(p float64) bool {
	if d.at == len(d.made) {
		d.made = append(d.made, drawn{p, true})
	}
	c := d.made[d.at]
	d.at++
	if c.yes {
		d.p *= c.p
	} else {
		d.p *= 1 - c.p
	}
	return c.yes
}

// more selects the next way and reports whether there is one.
func (d *draws) more() bool {
	for len(d.made) > 0 {
		last := &d.made[len(d.made)-1]
		if last.yes && last.p < 1 {
			last.yes = false
			return true
		}
		d.made = d.made[:len(d.made)-1]
	}
	return false
}

// maxSum is the largest sum of weights that scale tries.
const maxSum = 1 << 14

// scale sets the weights of the endpoints: the smallest integers in the proportions of shares,
// which are rounded, and 1 each if there are no such integers.
func scale(endpoints []conformance.Choice, shares []float64) {
	for sum := len(shares); sum <= maxSum; sum++ {
		exact := true
		for _, p := range shares {
			n := p * float64(sum)
			// Each share has a chain of factors that are rounded to 2^-31.
			if round := math.Round(n); round == 0 || math.Abs(n-round) > float64(sum)*1e-8 {
				exact = false
				break
			}
		}
		if exact {
			for i, p := range shares {
				endpoints[i].Weight = int(math.Round(p * float64(sum)))
			}
			return
		}
	}
	for i := range endpoints {
		endpoints[i].Weight = 1
	}
}
