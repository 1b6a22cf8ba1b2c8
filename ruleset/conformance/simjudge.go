package conformance

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// simHosts lists the hosts that send packets to every destination.
var simHosts = []string{"client1", "client2", "remote1", "pod1", "pod2", "pod3", nodeName}

// judge compares the handling of packets with the expected one: from every kind of
// host to every frontend, from some host to every former frontend, and to addresses
// around them.
func (w *simWorld) judge(s *ruleset.Snapshot) error {
	var hosts []origin
	for _, name := range simHosts {
		hosts = append(hosts, w.origin(name))
	}
	try := func(from origin, t simTarget) error {
		p := w.packet(from, t.proto, t.at)
		if err := w.compare(s, p); err != nil {
			return fmt.Errorf("%s from %s (%s) to %s: %w", t.proto, from.name, p.From, t.at, err)
		}
		return nil
	}
	now := map[simTarget]bool{}
	n := 0
	for _, t := range targetsOf(s) {
		now[t], w.seen[t] = true, true
		for _, from := range hosts {
			n++
			if err := try(from, w.concrete(t, n)); err != nil {
				return err
			}
		}
		if t.at.Addr().IsUnspecified() {
			f := tracker.FamilyOf(t.at.Addr())
			for _, from := range []string{"loopback", "client1"} {
				if err := try(w.origin(from), simTarget{netip.AddrPortFrom(loopback(f), t.at.Port()), t.proto}); err != nil {
					return err
				}
			}
		}
	}
	for t := range w.seen {
		if now[t] {
			continue
		}
		n++
		if err := try(hosts[n%len(hosts)], w.concrete(t, n)); err != nil {
			return fmt.Errorf("at a former frontend: %w", err)
		}
	}
	for _, f := range w.ipFamilies {
		for _, t := range []target{clusterIP(199, 80), clusterIP(1, 9), externalIP(1, 9), atPrimary(nodePortOwn), atPod(2, podPort)} {
			for _, proto := range []v1.Protocol{tcp, udp} {
				n++
				if err := try(hosts[n%len(hosts)], simTarget{t.at(f), proto}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// targetsOf returns the targets of the frontends, in a fixed order.
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
func (w *simWorld) concrete(t simTarget, n int) simTarget {
	if t.at.Addr().IsUnspecified() {
		own := []netip.Addr{}
		for _, addr := range []func(tracker.Family) netip.Addr{primary, secondary, gateway} {
			own = append(own, addr(tracker.FamilyOf(t.at.Addr())))
		}
		t.at = netip.AddrPortFrom(own[n%len(own)], t.at.Port())
	}
	return t
}

// judged reports whether a verdict of s does not depend on a feature that the backend lacks.
func (w *simWorld) judged(s *ruleset.Snapshot, v ruleset.Verdict, p ruleset.Packet) bool {
	toNode := slices.Contains(p.NodeAddresses, p.To.Addr())
	switch {
	case !w.judges(s, v, p):
		return false
	case v.Port == nil:
		return (v.Action != ruleset.ActionReject || w.does(ClosedPorts)) &&
			(v.Action != ruleset.ActionDrop || w.does(ServiceCIDRs)) &&
			(v.Action != ruleset.ActionPass || toNode || w.does(OtherPorts))
	case v.Port.Key.Protocol == sctp && !w.does(SCTP):
		return false
	case len(v.Frontend.Sources) != 0:
		return w.does(SourceRanges) && (w.does(RefuseBySource) || v.Frontend.Target != ruleset.TargetReject && v.Frontend.Internal != ruleset.TargetReject)
	}
	return true
}

// compare compares the outcome of a packet with its verdict.
func (w *simWorld) compare(s *ruleset.Snapshot, p ruleset.Packet) error {
	v := s.Trace(p)
	if !w.judged(s, v, p) {
		return nil
	}
	o := w.handle(p)
	if !w.does(Refuse) && v.Port != nil && v.Action != ruleset.ActionForward {
		if o.Action == ruleset.ActionForward {
			return fmt.Errorf("%s, must not be forwarded: %s", o, v.Rule)
		}
		return nil
	}
	if o.Action == ruleset.ActionReject && w.mayRefuse(v, p) {
		return nil
	}
	if o.Action != v.Action {
		return fmt.Errorf("%s, must be %s: %s", o, v.Action, v.Rule)
	}
	if v.Action != ruleset.ActionForward {
		return nil
	}
	fail := func(format string, args ...any) error {
		return fmt.Errorf("%s, %s: %s", o, fmt.Sprintf(format, args...), v.Rule)
	}
	sum, has := 0, 0
	weights := map[netip.AddrPort]int{}
	for _, ep := range v.Endpoints {
		sum += int(ep.Weight)
		weights[ep.Addr] += int(ep.Weight)
	}
	for _, c := range o.Endpoints {
		has += c.Weight
	}
	for i, c := range o.Endpoints {
		j := slices.IndexFunc(v.Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == c.Addr })
		if j < 0 {
			return fail("%s is not among the endpoints allowed (%v)", c.Addr, v.Endpoints)
		}
		if slices.ContainsFunc(o.Endpoints[:i], func(d Choice) bool { return d.Addr == c.Addr }) {
			return fail("%s is there twice", c.Addr)
		}
		ep := v.Endpoints[j]
		must := v.MasqueradeTo(ep) || !w.does(SourceAddress)
		// Packets to the node itself are not masqueraded.
		if here := slices.Contains(p.NodeAddresses, ep.Addr.Addr()); !here && c.Masquerade != must && w.does(Masquerade) {
			return fail("to %s masquerade is %t, must be %t", c.Addr, c.Masquerade, must)
		}
		if want := weights[c.Addr]; w.does(WeightedEndpoints) && c.Weight*sum != want*has {
			return fail("%s has weight %d of %d, must have %d of %d", c.Addr, c.Weight, has, want, sum)
		}
	}
	switch {
	case len(o.Endpoints) != len(weights):
		return fail("%d endpoints, must be %d (%v)", len(o.Endpoints), len(weights), v.Endpoints)
	case v.Affinity != 0 && v.Frontend.ShortCircuit() && v.Frontend.Internal != v.Frontend.Target && !w.does(AffinityInternal):
		return nil // internal traffic may lack affinity or have something else instead
	case w.does(Affinity) && (o.Affinity != v.Affinity && w.does(AffinityTimeout) || (o.Affinity == 0) != (v.Affinity == 0)):
		return fail("affinity is %v, must be %v", o.Affinity, v.Affinity)
	case w.does(ConsistentHash) && o.Hash != v.Hash:
		return fail("hash is %v, must be %v", o.Hash, v.Hash)
	}
	return nil
}

// handle calls the data plane's Handle.
func (w *simWorld) handle(p ruleset.Packet) Outcome {
	o := w.plane.Handle(p)
	o.Action = cmp.Or(o.Action, ruleset.ActionPass)
	return o
}

// String describes the outcome in a few words.
func (o Outcome) String() string {
	action := cmp.Or(o.Action, ruleset.ActionPass)
	if action != ruleset.ActionForward {
		return action.String()
	}
	var to []string
	for _, c := range o.Endpoints {
		to = append(to, c.Addr.String())
	}
	return fmt.Sprintf("forward to [%s]", strings.Join(to, " "))
}

// watched is a packet that is checked at each Look, with the verdict of each pending
// ruleset.
type watched struct {
	packet   ruleset.Packet
	from     string
	verdicts []ruleset.Verdict
	// forwards is the number of verdicts that forward.
	forwards int
	// endpoints holds the endpoints of the verdicts' Services in any of the rulesets:
	// the references to a Service and its pools need not change at the same time.
	endpoints map[netip.AddrPort]bool
}

// watchedOthers bounds the watched frontends of unchanged Services.
const watchedOthers = 8

// look implements SimEnv.Look.
func (w *simWorld) look() {
	if w.looked != nil || w.engine == nil {
		return
	}
	if w.watched == nil {
		w.watched = w.watch()
	}
	for _, p := range w.watched {
		if err := w.between(p, w.handle(p.packet)); err != nil {
			w.looked = fmt.Errorf("%s from %s (%s) to %s: %w", p.packet.Protocol, p.from, p.packet.From, p.packet.To, err)
			return
		}
	}
}

// watch chooses the packets of each Look.
func (w *simWorld) watch() []watched {
	out := []watched{}
	done, others := map[simTarget]bool{}, 0
	byKey := map[tracker.Key][]*ruleset.Port{}
	for _, s := range w.pending {
		for _, svc := range s.Ports {
			byKey[svc.Key] = append(byKey[svc.Key], svc)
		}
	}
	for _, s := range w.pending {
		for _, t := range targetsOf(s) {
			if done[t] {
				continue
			}
			done[t] = true
			from := w.origin(simHosts[w.rng.IntN(len(simHosts))])
			t = w.concrete(t, w.rng.IntN(3))
			p := watched{packet: w.packet(from, t.proto, t.at), from: from.name}
			same, ok := true, true
			for _, s := range w.pending {
				v := s.Trace(p.packet)
				ok = ok && w.judged(s, v, p.packet)
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
			p.endpoints = map[netip.AddrPort]bool{}
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
func (w *simWorld) between(p watched, o Outcome) error {
	if !w.does(ReplaceInPlace) && (o.Action != ruleset.ActionForward || p.forwards == 0) {
		return nil
	}
	switch {
	case o.Action != ruleset.ActionForward && p.forwards == len(p.verdicts):
		return fmt.Errorf("%s, but it is forwarded before and after (%s)", o, p.verdicts[len(p.verdicts)-1].Rule)
	case o.Action != ruleset.ActionForward:
		return nil
	case p.forwards == 0:
		return fmt.Errorf("%s, but it is forwarded neither before nor after (%s)", o, p.verdicts[len(p.verdicts)-1].Rule)
	case len(o.Endpoints) == 0:
		return fmt.Errorf("forwarded, but to no endpoint (%s)", p.verdicts[len(p.verdicts)-1].Rule)
	}
	for _, c := range o.Endpoints {
		if !p.endpoints[c.Addr] {
			return fmt.Errorf("%s, but %s is an endpoint neither before nor after (%s)", o, c.Addr, p.verdicts[len(p.verdicts)-1].Rule)
		}
	}
	return nil
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

// addressesOf returns the addresses and ports that may get a packet, each once.
func addressesOf(v ruleset.Verdict) map[netip.AddrPort]bool {
	out := map[netip.AddrPort]bool{}
	for _, ep := range v.Endpoints {
		out[ep.Addr] = true
	}
	return out
}

// differentPorts reports whether not all endpoints have the same port.
func differentPorts(eps []*tracker.Endpoint) bool {
	return slices.ContainsFunc(eps, func(e *tracker.Endpoint) bool { return e.Addr.Port() != eps[0].Addr.Port() })
}
