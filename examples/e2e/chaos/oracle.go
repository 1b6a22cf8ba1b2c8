//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// oracle decides which outcomes of a connection are right. It has its own tracker and
// engine, which receive each object before the agent does.
type oracle struct {
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cidrs   map[string][]netip.Prefix

	// base is the version known to be in effect, and latest the version of the last
	// change. Any version from base to latest may be in effect. before is the base before base.
	before, base, latest atomic.Pointer[version]

	mu sync.Mutex
	// recent holds the Services that were changed last.
	recent []types.NamespacedName
	// restarted is set if the agent has been restarted. It cannot recognize the flows of Services that
	// were deleted while no agent ran (conntrack/doc.go).
	restarted atomic.Bool
}

// version is the ruleset after one change.
type version struct {
	*ruleset.Snapshot
	// local holds the node's addresses by family.
	local [2][]netip.Addr
	// setting counts the changes of the node's addresses and of ServiceCIDRs.
	setting int
	next    atomic.Pointer[version]
}

// newOracle returns an oracle for agents with these addresses of NodePorts.
func newOracle(nodePorts string) (*oracle, error) {
	o := &oracle{cidrs: map[string][]netip.Prefix{}}
	info := tracker.NodeInfo{Name: nodeName, Addresses: []netip.Addr{nodeAddresses[0][0], nodeAddresses[1][0]}}
	var err error
	if o.tracker, err = tracker.New(tracker.Config{Node: info, Families: []tracker.Family{tracker.IPv4, tracker.IPv6}}); err != nil {
		return nil, err
	}
	addresses, err := ruleset.ParseNodePortAddresses([]string{nodePorts})
	if err != nil {
		return nil, err
	}
	var pods []netip.Prefix
	for cidr := range strings.SplitSeq(clusterCIDRs, ",") {
		pods = append(pods, netip.MustParsePrefix(cidr))
	}
	if o.engine, err = ruleset.NewEngine(ruleset.Config{
		Source: o.tracker, NodePortAddresses: addresses, Budget: ruleset.DefaultBudget(), LocalTraffic: ruleset.LocalTraffic{CIDRs: pods},
	}); err != nil {
		return nil, err
	}
	o.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	o.latest.Store(&version{Snapshot: o.engine.Snapshot(), local: nodeAddresses})
	o.inEffect()
	o.inEffect()
	return o, nil
}

// change receives a new or changed object, or nil for a deleted one.
func (o *oracle) change(r resource, name string, obj object) {
	namespace, short, _ := strings.Cut(name, "/")
	id, setting := types.NamespacedName{Namespace: namespace, Name: short}, 0
	switch x := obj.(type) {
	case *v1.Service:
		o.tracker.SetService(x)
	case *discovery.EndpointSlice:
		o.tracker.SetSlice(x)
	case *v1.Node:
		info := tracker.NodeInfoOf(x)
		if len(info.Addresses) == 0 { // the agent reads them from the routing table
			info.Addresses = []netip.Addr{nodeAddresses[0][0], nodeAddresses[1][0]}
		}
		if before := o.now().Node.Info; !slices.Equal(before.Addresses, info.Addresses) {
			setting = 1
		}
		o.tracker.SetNode(info)
	case *networking.ServiceCIDR:
		o.cidrs[name] = nil
		for _, s := range x.Spec.CIDRs {
			o.cidrs[name] = append(o.cidrs[name], netip.MustParsePrefix(s))
		}
	case nil: // a Node's last state stays in effect
		switch r {
		case services:
			o.tracker.DeleteService(id)
		case slicesOf:
			o.tracker.DeleteSlice(id)
		case serviceCIDRs:
			delete(o.cidrs, name)
		}
	}
	if r == serviceCIDRs {
		var all []netip.Prefix
		for _, list := range o.cidrs {
			all = append(all, list...)
		}
		o.engine.SetServiceCIDRs(all, nil)
		setting = 1
	}
	o.publish(o.now().local, setting)
	if slice, ok := obj.(*discovery.EndpointSlice); ok {
		id.Name = slice.Labels[discovery.LabelServiceName]
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.recent = append(o.recent, id)
	o.recent = o.recent[max(0, len(o.recent)-recentServices):]
}

// publish appends a version. Only one goroutine calls it.
func (o *oracle) publish(local [2][]netip.Addr, setting int) {
	old := o.now()
	v := &version{Snapshot: o.engine.Snapshot(), local: local, setting: old.setting + setting}
	old.next.Store(v)
	o.latest.Store(v)
}

// inEffect records that the latest version is in effect.
func (o *oracle) inEffect() { o.before.Store(o.base.Swap(o.now())) }

// since returns the version that is known to be in effect.
func (o *oracle) since() *version { return o.base.Load() }

func (o *oracle) now() *version { return o.latest.Load() }

// until returns the versions from v to the latest.
func (o *oracle) until(v *version) (out []*version) {
	for ; v != nil; v = v.next.Load() {
		out = append(out, v)
	}
	return out
}

// recentServices is how many changes count as recent. Half of all connections go to their Services.
const recentServices = 20

// pick returns a random TCP or UDP destination: a frontend that a Service has, or had at the end of
// the round before. Some have a port that is closed, or an address that no Service has.
func (o *oracle) pick(rng *rand.Rand) (t target, ok bool) {
	v := pick(rng, o.before.Load(), o.since(), o.now())
	list := v.Ports
	o.mu.Lock()
	if len(o.recent) != 0 && rng.IntN(2) == 0 {
		list = v.PortsOf(pick(rng, o.recent...))
	}
	o.mu.Unlock()
	if len(list) == 0 {
		return t, false
	}
	svc := pick(rng, list...)
	if len(svc.Frontends) == 0 {
		return t, false
	}
	t, ok = targetOf(rng.IntN, svc, pick(rng, svc.Frontends...))
	switch rng.IntN(40) {
	case 0:
		t.to = netip.AddrPortFrom(t.to.Addr(), uint16(7000+rng.IntN(1000)))
	case 1:
		t.to = netip.AddrPortFrom(number(map[tracker.Family]string{tracker.IPv4: "10.96.200.0", tracker.IPv6: "fd00:96::f000"}[svc.Key.Family], rng.IntN(1000)), 80)
	}
	return t, ok
}

// targetOf returns the destination of connections to a frontend, unless it is of SCTP or a link-local address,
// which belongs to an interface.
func targetOf(random func(int) int, svc *ruleset.Port, to ruleset.Frontend) (t target, ok bool) {
	if to.Kind == ruleset.KindNodePort {
		to.Addr = nodeAddresses[map[tracker.Family]int{tracker.IPv6: 1}[svc.Key.Family]][random(2)]
	}
	return target{netip.AddrPortFrom(to.Addr, to.Port), svc.Key.Protocol}, svc.Key.Protocol != v1.ProtocolSCTP && to.Addr.IsGlobalUnicast()
}

// judge returns nil if the outcome of a connection is right, and otherwise an error. v was known to
// be in effect when the connection began. Any version from v to the latest may have been in effect.
// An agent receives the objects of each kind in order, but may receive the slices of a Service long
// before or after the Service or the node. So
//
//   - while a Service changes, or what its frontend depends on, its connections may have any outcome
//     but an error;
//   - while the node's zone changes, connections may reach all endpoints of a Service;
//   - otherwise the outcome must be that of one of the versions. If one of them does not forward, the
//     connection may be refused, lose packets or get no answer.
func (o *oracle) judge(v *version, from *place, t target, got outcome) error {
	var first error
	list, old := o.until(v), v.Trace(from.packet(t, v)).Port
	right, mayFail := false, false
	zones := slices.ContainsFunc(list, func(w *version) bool { return w.Node.Info.Zone != v.Node.Info.Zone })
	for _, w := range list {
		verdict := w.Trace(from.packet(t, w))
		svc, f := verdict.Port, verdict.Frontend
		switch {
		case verdict.Action == ruleset.ActionPass, got.Kind != netlab.Reached && svc != nil && dead(svc):
			return nil
		case got.Kind == netlab.Failed:
		case (svc == nil) != (old == nil), svc != nil && svc.Spec != old.Spec,
			w.setting != v.setting && (svc == nil || f.Kind == ruleset.KindNodePort || len(f.Sources) != 0):
			return nil
		}
		mayFail = mayFail || verdict.Action == ruleset.ActionDrop || verdict.Action != ruleset.ActionForward && len(list) > 1
		if zones && verdict.Action == ruleset.ActionForward {
			verdict.Endpoints = svc.Endpoints
		}
		err := from.check(got, verdict, w)
		right = right || err == nil
		if first == nil {
			first = err
		}
	}
	switch {
	case right && (got.lost == 0 || mayFail):
		return nil
	case right:
		return fmt.Errorf("%v: right but for the retransmission", got)
	case len(list) > 1 && mayFail && (got.Kind == netlab.Refused || got.Kind == netlab.Silent):
		return nil
	}
	return first
}

// hasEndpoint reports whether a Service has an endpoint at the address in one of the
// versions since v, whatever its conditions.
func (o *oracle) hasEndpoint(v *version, from *place, t target, at netip.AddrPort) bool {
	for _, w := range o.until(v) {
		if svc := w.Trace(from.packet(t, w)).Port; svc != nil && slices.ContainsFunc(svc.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == at }) {
			return true
		}
	}
	return false
}

// forgotten reports whether the destination had no Service in one of the versions since v, and the agent
// has been restarted. The first agent may have ended before it learned of the deletion, and the second
// cannot recognize the flows.
func (o *oracle) forgotten(v *version, from *place, t target) bool {
	return o.restarted.Load() && slices.ContainsFunc(o.until(v), func(w *version) bool { return w.Trace(from.packet(t, w)).Port == nil })
}

// keeps reports whether a Service port has an endpoint that is ready or serving at an address, in the
// latest version.
func (o *oracle) keeps(key tracker.Key, at netip.AddrPort) bool {
	return slices.ContainsFunc(o.now().PortsOf(key.NamespacedName), func(s *ruleset.Port) bool {
		return s.Key == key && slices.ContainsFunc(s.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == at && (e.Ready || e.Serving) })
	})
}

// dead reports whether a Service has an endpoint without a server.
func dead(s *ruleset.Port) bool {
	return slices.ContainsFunc(s.Endpoints, func(e *tracker.Endpoint) bool { return !alive(e.Addr) })
}

// alive reports whether a server answers at an address.
func alive(at netip.AddrPort) bool {
	for pod := range pods {
		if at.Addr() == podAddr(pod, familyOf(at.Addr())) {
			return slices.Contains(podPorts, at.Port())
		}
	}
	return false
}

// packet returns the first packet of a connection, for [ruleset.Snapshot.Trace].
func (p *place) packet(t target, v *version) ruleset.Packet {
	f := familyOf(t.to.Addr())
	return ruleset.Packet{From: p.addr[f], InInterface: p.in, Protocol: t.proto, To: t.to, NodeAddresses: v.local[f]}
}

// check returns an error unless the outcome of a connection from the place agrees with the
// verdict of a version.
func (p *place) check(o outcome, v ruleset.Verdict, of *version) error {
	want := map[ruleset.Action]netlab.OutcomeKind{ruleset.ActionForward: netlab.Reached, ruleset.ActionReject: netlab.Refused, ruleset.ActionDrop: netlab.Silent}[v.Action]
	switch {
	case o.Kind != want:
		return fmt.Errorf("%v, want %q: %s", o, want, v.Rule)
	case v.Action != ruleset.ActionForward:
		return nil
	}
	i := slices.IndexFunc(v.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == o.Server })
	if i < 0 {
		return fmt.Errorf("%v, which is not among the %d endpoints allowed: %s", o, len(v.Endpoints), v.Rule)
	}
	f := familyOf(o.Source)
	switch masqueraded := v.MasqueradeTo(v.Endpoints[i]); {
	case masqueraded && !slices.Contains(of.local[f], o.Source):
		return fmt.Errorf("%v, must be masqueraded to an address of the node: %s", o, v.Rule)
	case !masqueraded && o.Source != p.addr[f]:
		return fmt.Errorf("%v, must keep its source %s: %s", o, p.addr[f], v.Rule)
	}
	return nil
}
