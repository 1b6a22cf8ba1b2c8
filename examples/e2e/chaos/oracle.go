//go:build linux

package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

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

	// restarted is set if the agent has been restarted. It cannot recognize the flows of Services that
	// were deleted while no agent ran (conntrack/doc.go).
	restarted atomic.Bool
}

// version is the ruleset after one change.
type version struct {
	*ruleset.Snapshot
	// local holds the node's addresses.
	local []netip.Addr
	// setting counts the changes of the node's addresses and of ServiceCIDRs.
	setting int
	// recent holds the Services that were changed last.
	recent []types.NamespacedName
	next   atomic.Pointer[version]
}

// nodeIPs holds the addresses of a node whose object has none, as the agent reads them from the routing table.
var nodeIPs = parse(netip.MustParseAddr, nodeAddr4, nodeAddr6)

// newOracle returns an oracle for agents with these addresses of NodePorts.
func newOracle(nodePorts string) (*oracle, error) {
	o := &oracle{cidrs: map[string][]netip.Prefix{}}
	info := tracker.NodeInfo{Name: nodeName, Addresses: nodeIPs}
	var err error
	if o.tracker, err = tracker.New(tracker.Config{Node: info, Families: []tracker.Family{tracker.IPv4, tracker.IPv6}}); err != nil {
		return nil, err
	}
	addresses, err := ruleset.ParseNodePortAddresses([]string{nodePorts})
	if err != nil {
		return nil, err
	}
	if o.engine, err = ruleset.NewEngine(ruleset.Config{
		Source: o.tracker, NodePortAddresses: addresses, Budget: ruleset.DefaultBudget(),
		LocalTraffic: ruleset.LocalTraffic{CIDRs: parse(netip.MustParsePrefix, strings.Split(clusterCIDRs, ",")...)},
	}); err != nil {
		return nil, err
	}
	o.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	o.latest.Store(&version{Snapshot: o.engine.Snapshot(), local: nodeAddresses})
	o.inEffect()
	o.inEffect()
	return o, nil
}

// change receives a change of an object.
func (o *oracle) change(kind watch.EventType, obj object) {
	id, setting := types.NamespacedName{Namespace: obj.GetNamespace(), Name: obj.GetName()}, 0
	deleted := kind == watch.Deleted
	switch x := obj.(type) {
	case *v1.Service:
		if o.tracker.SetService(x); deleted {
			o.tracker.DeleteService(id)
		}
	case *discovery.EndpointSlice:
		if o.tracker.SetSlice(x); deleted {
			o.tracker.DeleteSlice(id)
		}
		id.Name = x.Labels[discovery.LabelServiceName]
	case *v1.Node:
		info := tracker.NodeInfoOf(x)
		if len(info.Addresses) == 0 {
			info.Addresses = nodeIPs
		}
		if !slices.Equal(o.now().Node.Info.Addresses, info.Addresses) {
			setting = 1
		}
		o.tracker.SetNode(info) // a Node's last state stays in effect
	case *networking.ServiceCIDR:
		if o.cidrs[id.Name] = parse(netip.MustParsePrefix, x.Spec.CIDRs...); deleted {
			delete(o.cidrs, id.Name)
		}
		o.engine.SetServiceCIDRs(slices.Concat(slices.Collect(maps.Values(o.cidrs))...), nil)
		setting = 1
	}
	o.publish(o.now().local, setting, id)
}

// publish appends a version. Only one goroutine calls it.
func (o *oracle) publish(local []netip.Addr, setting int, changed ...types.NamespacedName) {
	old := o.now()
	recent := slices.Concat(old.recent, changed)
	recent = recent[max(0, len(recent)-20):]
	v := &version{Snapshot: o.engine.Snapshot(), local: local, setting: old.setting + setting, recent: recent}
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

// pick returns a random TCP or UDP destination: a frontend that a Service has, or had at the end of
// the round before, half of them of Services that changed recently. Some have a port that is closed, or an address that
// no Service has.
func (o *oracle) pick(rng *rand.Rand) (t target, ok bool) {
	v, recent := pick(rng, o.before.Load(), o.since(), o.now()), o.now().recent
	list := v.Ports
	if len(recent) != 0 && rng.IntN(2) == 0 {
		list = v.PortsOf(pick(rng, recent...))
	}
	if len(list) == 0 {
		return t, false
	}
	svc := pick(rng, list...)
	if len(svc.Frontends) == 0 {
		return t, false
	}
	t, ok = targetOf(rng, svc, pick(rng, svc.Frontends...))
	switch rng.IntN(40) {
	case 0:
		t.to = netip.AddrPortFrom(t.to.Addr(), uint16(7000+rng.IntN(1000)))
	case 1:
		t.to = netip.AddrPortFrom(number(rng.IntN(1000), "10.96.200.0", "fd00:96::f000")[svc.Key.Family], 80)
	}
	return t, ok
}

// targetOf returns the destination of connections to a frontend, unless it is of SCTP or a link-local address,
// which belongs to an interface.
func targetOf(rng *rand.Rand, svc *ruleset.Port, to ruleset.Frontend) (t target, ok bool) {
	if to.Kind == ruleset.KindNodePort {
		to.Addr = pick(rng, number(0, nodeAddr4, nodeAddr6), number(0, "192.0.2.1", "2001:db8:1::1"))[svc.Key.Family]
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
func (o *oracle) judge(a attempt, got outcome) error {
	var first error
	list, old := o.until(a.v), a.Port
	right, mayFail := false, false
	zones := slices.ContainsFunc(list, func(w *version) bool { return w.Node.Info.Zone != a.v.Node.Info.Zone })
	for _, w := range list {
		verdict := w.trace(a.from, a.target)
		svc, f := verdict.Port, verdict.Frontend
		switch {
		case verdict.Action == ruleset.ActionPass, got.Kind != netlab.Reached && svc != nil && dead(svc):
			return nil
		case got.Kind == netlab.Failed:
		case (svc == nil) != (old == nil), svc != nil && svc.Spec != old.Spec,
			w.setting != a.v.setting && (svc == nil || f.Kind == ruleset.KindNodePort || len(f.Sources) != 0):
			return nil
		}
		mayFail = mayFail || verdict.Action == ruleset.ActionDrop || verdict.Action != ruleset.ActionForward && len(list) > 1
		if zones && verdict.Action == ruleset.ActionForward {
			verdict.Endpoints = svc.Endpoints
		}
		err := w.check(a.from, got, verdict)
		right = right || err == nil
		first = cmp.Or(first, err)
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

// ports returns the Service port to which an attempt led in each version since, or nil.
func (o *oracle) ports(a attempt) (out []*ruleset.Port) {
	for _, w := range o.until(a.v) {
		out = append(out, w.trace(a.from, a.target).Port)
	}
	return out
}

// forgotten reports whether the destination had no Service in one of the versions since an attempt, and the agent
// has been restarted. The first agent may have ended before it learned of the deletion, and the second
// cannot recognize the flows.
func (o *oracle) forgotten(a attempt) bool {
	return o.restarted.Load() && slices.Contains(o.ports(a), nil)
}

// keeps reports whether a Service port has an endpoint that is ready or serving at an address, in the
// latest version.
func (o *oracle) keeps(key tracker.Key, at netip.AddrPort) bool {
	return slices.ContainsFunc(o.now().PortsOf(key.NamespacedName), func(s *ruleset.Port) bool {
		return s.Key == key && slices.ContainsFunc(s.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == at && (e.Ready || e.Serving) })
	})
}

// has reports whether a Service has an endpoint at an address, whatever its conditions.
func has(s *ruleset.Port, at netip.AddrPort) bool {
	return slices.ContainsFunc(s.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == at })
}

// dead reports whether a Service has an endpoint without a server.
func dead(s *ruleset.Port) bool {
	return slices.ContainsFunc(s.Endpoints, func(e *tracker.Endpoint) bool {
		for pod := range pods {
			if e.Addr.Addr() == podAddr(pod)[tracker.FamilyOf(e.Addr.Addr())] && slices.Contains(podPorts, e.Addr.Port()) {
				return false
			}
		}
		return true
	})
}

// trace returns the verdict on a connection's first packet.
func (v *version) trace(from *place, t target) ruleset.Verdict {
	return v.Trace(ruleset.Packet{From: from.own(t.to.Addr()), InInterface: from.in, Protocol: t.proto, To: t.to, NodeAddresses: v.local})
}

// check returns an error unless the outcome of a connection agrees with a verdict of the version.
func (v *version) check(from *place, o outcome, verdict ruleset.Verdict) error {
	want := map[ruleset.Action]netlab.OutcomeKind{
		ruleset.ActionForward: netlab.Reached, ruleset.ActionReject: netlab.Refused, ruleset.ActionDrop: netlab.Silent,
	}[verdict.Action]
	i := slices.IndexFunc(verdict.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == o.Server })
	var err error
	switch own := from.own(o.Source); {
	case o.Kind != want:
		err = fmt.Errorf("want %q", want)
	case want != netlab.Reached:
	case i < 0:
		err = fmt.Errorf("which is not among the %d endpoints allowed", len(verdict.Endpoints))
	case verdict.MasqueradeTo(verdict.Endpoints[i]):
		if !slices.Contains(v.local, o.Source) {
			err = errors.New("must be masqueraded to an address of the node")
		}
	case o.Source != own:
		err = fmt.Errorf("must keep its source %s", own)
	}
	if err != nil {
		err = fmt.Errorf("%v, %w: %s", o, err, verdict.Rule)
	}
	return err
}
