package conformance

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// concurrentChecks is the number of connections that a world checks concurrently.
// Most of the time it waits for replies that must not arrive.
const concurrentChecks = 16

func (l *connections) atOnce() int { return concurrentChecks }

func (l *connections) judged(*ruleset.Snapshot, ruleset.Verdict, ruleset.Packet) bool { return true }

func (l *connections) count() func() error {
	l.made = tally{}
	before := l.traffic()
	return func() error { return l.made.compare(before, l.traffic()) }
}

func (l *connections) masquerades(p ruleset.Packet, v ruleset.Verdict, ep *tracker.Endpoint) bool {
	if !l.does(SourceAddress) {
		return true
	}
	if l.options.Masquerades != nil {
		return l.options.Masquerades(p, v, ep)
	}
	return v.MasqueradeTo(ep)
}

func (l *connections) outcome(from string, p ruleset.Packet, v ruleset.Verdict) (Outcome, error) {
	h := l.net.hosts[from]
	if v.Action == ruleset.ActionForward {
		return l.forwarded(h, p, v)
	}
	wait, silence, passed := l.timeout(), l.silence(), l.unhandled(h, p.To)
	if v.Action == ruleset.ActionDrop || v.Action == ruleset.ActionPass && passed.Kind == netlab.Silent || l.lacksRefuse(v) {
		wait = silence
	}
	if l.lacksRefuse(v) {
		return l.read(h.probe(l.tb.Context(), p.Protocol, p.To, wait), p, v), nil
	}
	begun := time.Now()
	o := l.probe(h, p, wait)
	if v.Action == ruleset.ActionDrop && o.Kind == netlab.Silent && h.stalls.Since(begun) {
		o = l.probe(h, p, 4*silence) // the time may have ended before the packet was sent
	}
	out := l.read(o, p, v)
	switch {
	case v.Action == ruleset.ActionPass:
		if o.Kind == passed.Kind && o.Server == passed.Server && o.Source == passed.Source {
			out.Action = ruleset.ActionPass
		}
		return out, nil
	case o.notSent && !v.MayFailSend && l.does(LocalErrors):
		return out, fmt.Errorf("must %s", musts[v.Action])
	}
	v.Action = out.Action // the backend may count a packet that must be dropped as refused
	l.made.note(v)
	return out, nil
}

func (l *connections) silence() time.Duration {
	if l.options.silence != 0 {
		return l.options.silence
	}
	return silence
}

// read returns the outcome of a connection. An endpoint that is allowed is masqueraded as it must be, or not.
func (l *connections) read(o outcome, p ruleset.Packet, v ruleset.Verdict) Outcome {
	out := Outcome{seen: o.String()}
	switch o.Kind {
	case netlab.Refused:
		out.Action = ruleset.ActionReject
	case netlab.Silent:
		out.Action = ruleset.ActionDrop
	case netlab.Reached:
		out.Action = ruleset.ActionForward
		c := Choice{Addr: o.Server, Weight: weightsOf(v)[o.Server], Masquerade: o.Source != p.From}
		if i := slices.IndexFunc(v.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == o.Server }); i >= 0 {
			must := l.masquerades(p, v, v.Endpoints[i])
			right := o.Source == p.From
			if must {
				right = slices.Contains(p.NodeAddresses, o.Source)
			}
			c.Masquerade = must == right
		}
		out.Endpoints = []Choice{c}
	}
	return out
}

func (l *connections) probe(from host, p ruleset.Packet, wait time.Duration) outcome {
	o := from.probe(l.tb.Context(), p.Protocol, p.To, wait)
	if l.options.Observe != nil && o.Kind != netlab.Failed {
		seen := l.read(o, p, ruleset.Verdict{})
		seen.seen = ""
		l.options.Observe(l.World, p, seen)
	}
	return o
}

// forwarded connects until every endpoint was reached. The probability that 30n connections miss one of n equally
// used endpoints is e^-30. With weights, n is the total weight divided by the least weight.
func (l *connections) forwarded(from host, p ruleset.Packet, v ruleset.Verdict) (out Outcome, err error) {
	n := len(weightsOf(v))
	sum, least := len(v.Endpoints), 1
	if l.does(WeightedEndpoints) {
		sum, least = 0, 1<<16
		for _, ep := range v.Endpoints {
			sum, least = sum+int(ep.Weight), min(least, int(ep.Weight))
		}
	}
	fixed := v.Affinity != 0 || v.Hash == tracker.HashSource && l.does(ConsistentHash)
	seen := map[netip.AddrPort]int{}
	var last netip.AddrPort
	moves := -1
	// What a connection does not show is as it must be.
	all := Outcome{Action: ruleset.ActionForward, Affinity: v.Affinity, Hash: v.Hash}
	for i := 0; i < 30*((sum+least-1)/least) && (len(seen) < n || i < n+2); i++ {
		// A round-robin backend may be in step with several hosts, each of which then
		// always gets the same endpoint.
		if i > 3*n {
			time.Sleep(rand.N(time.Millisecond))
		}
		o := l.probe(from, p, l.timeout())
		one := l.read(o, p, v)
		if one.Action != ruleset.ActionForward {
			return one, fmt.Errorf("must be forwarded (%w)", o.Err)
		}
		c := one.Endpoints[0]
		if bad := slices.IndexFunc(v.Endpoints, func(e *tracker.Endpoint) bool {
			return e.Addr == c.Addr && (c.Masquerade == l.masquerades(p, v, e) || !l.does(Masquerade))
		}) < 0; bad {
			return one, nil
		}
		l.made.note(v)
		if seen[c.Addr]++; seen[c.Addr] == 1 {
			all.Endpoints = append(all.Endpoints, c)
		}
		if c.Addr != last {
			last, moves = c.Addr, moves+1
		}
		// A client with a fixed endpoint sees no other one.
		if fixed && i == n+1 {
			break
		}
	}
	all.seen = counts(seen)
	// A client that is moved must not return to its previous endpoint.
	if fixed && moves != 0 && (moves != len(seen)-1 || !l.mayMove(v)) {
		return all, fmt.Errorf("client affinity or a hash of the source, but connections went to %d endpoints", len(seen))
	}
	for _, ep := range v.Endpoints {
		if fixed && seen[ep.Addr] == 0 {
			seen[ep.Addr]++
			all.Endpoints = append(all.Endpoints, Choice{ep.Addr, weightsOf(v)[ep.Addr], l.masquerades(p, v, ep)})
		}
	}
	return all, nil
}

// mayMove reports whether an earlier change of other endpoints may move a client that
// has a fixed endpoint.
func (l *connections) mayMove(v ruleset.Verdict) bool {
	if v.Affinity == 0 {
		return !l.does(HashOfEndpoints)
	}
	f := v.Frontend
	internal := f.ShortCircuit() && f.Internal != f.Target && slices.Equal(v.Endpoints, v.Port.Pool(f.Internal))
	return internal && !l.does(AffinityInternal)
}

func counts(seen map[netip.AddrPort]int) string {
	var b []string
	for _, a := range slices.SortedFunc(maps.Keys(seen), netip.AddrPort.Compare) {
		b = append(b, fmt.Sprintf("%s %dx", a, seen[a]))
	}
	return strings.Join(b, ", ")
}

// unhandled returns the expected outcome for a packet that is not for a Service.
func (l *connections) unhandled(from host, to netip.AddrPort) netlab.Outcome {
	reached := netlab.Outcome{Kind: netlab.Reached, Server: to, Source: address(from.name, tracker.FamilyOf(to.Addr()))}
	switch here := to.Addr().IsLoopback(); {
	case here && l.config.interfaceOf(from.name) != "":
		return netlab.Outcome{Kind: netlab.Silent} // the kernel drops it
	case here || slices.Contains(l.nodeAddresses(tracker.FamilyOf(to.Addr())), to.Addr()):
		if to.Port() == nodePortOwn {
			return reached
		}
		return netlab.Outcome{Kind: netlab.Refused}
	case l.podAt(to.Addr()) != "":
		return reached
	}
	return netlab.Outcome{Kind: netlab.Silent}
}
