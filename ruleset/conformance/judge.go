package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// judge compares what happens to a connection with the expected result and with the verdict of Trace.
func (w *World) judge(s *ruleset.Snapshot, c probe) error {
	p := w.packet(c.from, c.proto, c.to)
	v := s.Trace(p)
	err := func() error {
		if got := w.describe(v); c.want != "" && got != sortWords(c.want) {
			return fmt.Errorf("the verdict of Trace is %q, but the world expects %q: one of them is wrong", got, c.want)
		}
		if !w.skips.judges(s, v, p) || !w.judged(s, v, p) {
			return nil
		}
		o, err := w.outcome(c.from, p, v)
		if err == nil {
			err = w.compare(p, v, o)
		}
		if err != nil {
			return fmt.Errorf("%s, %w", o, err)
		}
		return nil
	}()
	if err != nil {
		return fmt.Errorf("%s from %s (%s) to %s: %w: %s", p.Protocol, c.from, p.From, p.To, err, v.Rule)
	}
	return nil
}

var musts = map[ruleset.Action]string{
	ruleset.ActionForward: "be forwarded", ruleset.ActionReject: "be refused", ruleset.ActionDrop: "get no answer", ruleset.ActionPass: "pass",
}

// lacksRefuse reports whether the backend lacks Refuse, which decides about a packet.
func (s skips) lacksRefuse(v ruleset.Verdict) bool {
	return !s.does(Refuse) && v.Port != nil && v.Action != ruleset.ActionForward
}

func (w *World) compare(p ruleset.Packet, v ruleset.Verdict, o Outcome) error {
	switch {
	case w.lacksRefuse(v):
		if o.Action == ruleset.ActionForward {
			return fmt.Errorf("must not reach an endpoint")
		}
		return nil
	case o.Action == ruleset.ActionReject && w.mayRefuse(v, p):
		return nil
	case o.Action != v.Action:
		return fmt.Errorf("must %s", musts[v.Action])
	case v.Action != ruleset.ActionForward:
		return nil
	}
	sum, has := 0, 0
	weights := weightsOf(v)
	for _, ep := range v.Endpoints {
		sum += int(ep.Weight)
	}
	for i, c := range o.Endpoints {
		has += c.Weight
		j := slices.IndexFunc(v.Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == c.Addr })
		if j < 0 {
			return fmt.Errorf("but %s is not among the endpoints allowed (%v)", c.Addr, v.Endpoints)
		}
		if slices.ContainsFunc(o.Endpoints[:i], func(d Choice) bool { return d.Addr == c.Addr }) {
			return fmt.Errorf("but %s is there twice", c.Addr)
		}
		switch must := w.masquerades(p, v, v.Endpoints[j]); {
		case c.Masquerade == must || !w.does(Masquerade):
		case must:
			return fmt.Errorf("at %s the source must be masqueraded to an address of the node", c.Addr)
		default:
			return fmt.Errorf("at %s the client must keep its source %s", c.Addr, p.From)
		}
	}
	if len(o.Endpoints) != len(weights) {
		return fmt.Errorf("of %d endpoints only %d were ever used (%v)", len(weights), len(o.Endpoints), v.Endpoints)
	}
	for _, c := range o.Endpoints {
		if want := weights[c.Addr]; w.does(WeightedEndpoints) && c.Weight*sum != want*has {
			return fmt.Errorf("%s has weight %d of %d, must have %d of %d", c.Addr, c.Weight, has, want, sum)
		}
	}
	switch {
	case v.Affinity != 0 && v.Frontend.ShortCircuit() && v.Frontend.Internal != v.Frontend.Target && !w.does(AffinityInternal):
		return nil // internal traffic may lack affinity or have something else instead
	case w.does(Affinity) && (o.Affinity != v.Affinity && w.does(AffinityTimeout) || (o.Affinity == 0) != (v.Affinity == 0)):
		return fmt.Errorf("affinity is %v, must be %v", o.Affinity, v.Affinity)
	case w.does(ConsistentHash) && o.Hash != v.Hash:
		return fmt.Errorf("hash is %v, must be %v", o.Hash, v.Hash)
	}
	return nil
}

func weightsOf(v ruleset.Verdict) map[netip.AddrPort]int {
	out := map[netip.AddrPort]int{}
	for _, ep := range v.Endpoints {
		out[ep.Addr] += int(ep.Weight)
	}
	return out
}

// judges reports whether the backend has the features that the verdict on a packet
// depends on, apart from those that decide about whole worlds.
func (s skips) judges(all *ruleset.Snapshot, v ruleset.Verdict, p ruleset.Packet) bool {
	internal := p.InInterface == "" || all.Node.LocalTraffic.Recognizes(p.From, p.InInterface)
	switch {
	case !s.does(UDP) && p.Protocol == udp:
		return false
	case v.Port == nil:
		return true
	case !s.does(ShortCircuit) && internal && v.Frontend.ShortCircuit():
		return false
	case !s.does(PreferLocal) && v.Port.Spec.PreferLocal && !v.Port.Spec.ExternalLocal && v.Frontend.Kind != ruleset.KindClusterIP:
		return false
	case !s.does(EndpointPorts) && differentPorts(v.Port.Selection.Reachable):
		return false
	}
	return true
}

// mayRefuse reports whether a packet that must be dropped may be refused, because the backend
// lacks Drop. Sources that a frontend does not admit must still be dropped.
func (s skips) mayRefuse(v ruleset.Verdict, p ruleset.Packet) bool {
	return !s.does(Drop) && v.Port != nil && v.Action == ruleset.ActionDrop && v.Frontend.Admits(p.From)
}

func differentPorts(eps []*tracker.Endpoint) bool {
	return slices.ContainsFunc(eps, func(e *tracker.Endpoint) bool { return e.Addr.Port() != eps[0].Addr.Port() })
}

// String describes the outcome in a few words.
func (o Outcome) String() string {
	switch {
	case o.seen != "":
		return o.seen
	case o.Action != ruleset.ActionForward:
		return action(o).String()
	}
	var to []string
	for _, c := range o.Endpoints {
		to = append(to, c.Addr.String())
	}
	return fmt.Sprintf("forward to [%s]", strings.Join(to, " "))
}
