//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"

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

	mu sync.Mutex
	// base is the version known to be in effect, and latest the version of the last
	// commit. Any version from base to latest may be in effect.
	base, latest *version
}

// version is the ruleset after one commit.
type version struct {
	*ruleset.Snapshot
	next *version
}

func newOracle() (*oracle, error) {
	o := &oracle{}
	info := tracker.NodeInfo{Name: nodeName, Addresses: []netip.Addr{nodeAddresses[0][0], nodeAddresses[1][0]}}
	var err error
	if o.tracker, err = tracker.New(tracker.Config{Node: info, Families: families}); err != nil {
		return nil, err
	}
	addresses, err := ruleset.ParseNodePortAddresses([]string{"primary"})
	if err != nil {
		return nil, err
	}
	var cidrs []netip.Prefix
	for _, s := range serviceCIDRs {
		cidrs = append(cidrs, netip.MustParsePrefix(s))
	}
	if o.engine, err = ruleset.NewEngine(ruleset.Config{
		Tracker: o.tracker, NodePortAddresses: addresses, ServiceCIDRs: cidrs,
		LocalTraffic: ruleset.LocalTraffic{CIDRs: []netip.Prefix{netip.MustParsePrefix(localPodCIDRs[0]), netip.MustParsePrefix(localPodCIDRs[1])}},
	}); err != nil {
		return nil, err
	}
	o.tracker.MarkSynced(tracker.SourceServices, tracker.SourceSlices, tracker.SourceNodes)
	o.latest = &version{Snapshot: o.engine.Snapshot()}
	o.base = o.latest
	return o, nil
}

// commit makes a change.
func (o *oracle) commit(c change) {
	keep := map[string]bool{}
	if c.now != nil {
		o.tracker.SetService(c.now.object())
		for _, es := range c.now.slices() {
			o.tracker.SetSlice(es)
			keep[es.Name] = true
		}
	}
	if c.old == nil {
		return
	}
	for _, es := range c.old.slices() {
		if !keep[es.Name] {
			o.tracker.DeleteSlice(types.NamespacedName{Namespace: namespace, Name: es.Name})
		}
	}
	if c.now == nil {
		o.tracker.DeleteService(types.NamespacedName{Namespace: namespace, Name: c.old.name()})
	}
}

// publish appends a version with all committed Services.
func (o *oracle) publish() {
	v := &version{Snapshot: o.engine.Snapshot()}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.latest.next = v
	o.latest = v
}

// inEffect records that the latest version is in effect.
func (o *oracle) inEffect() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.base = o.latest
}

// since returns the version that is known to be in effect.
func (o *oracle) since() *version {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.base
}

// until returns the versions from v to the latest.
func (o *oracle) until(v *version) []*version {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []*version
	for ; v != nil; v = v.next {
		out = append(out, v)
	}
	return out
}

// judge returns nil if any version from v to the latest allows the outcome of a connection,
// and otherwise an error. v was known to be in effect when the connection began. A Service
// and its slices reach the agent one after the other, and parts of them may be in effect for a
// while: if one of several versions does not forward, the connection may be refused, lose packets
// or get no answer.
func (o *oracle) judge(v *version, from *place, t target, got outcome) error {
	var first error
	right, mayDrop := false, false
	list := o.until(v)
	for _, w := range list {
		verdict := w.Trace(from.packet(t))
		partial := verdict.Action != ruleset.ActionForward && len(list) > 1
		if partial && (got.Kind == netlab.Refused || got.Kind == netlab.Silent) {
			return nil
		}
		mayDrop = mayDrop || partial || verdict.Action == ruleset.ActionDrop
		err := from.check(got, verdict)
		if right = right || err == nil; right && (got.lost == 0 || mayDrop) {
			return nil
		}
		if first == nil {
			first = err
		}
	}
	if right {
		return fmt.Errorf("%v: right but for the retransmission", got)
	}
	return first
}

// hasEndpoint reports whether a Service has an endpoint at the address in one of the
// versions since v, whatever its conditions.
func (o *oracle) hasEndpoint(v *version, from *place, t target, at netip.AddrPort) bool {
	for _, w := range o.until(v) {
		svc := w.Trace(from.packet(t)).Service
		if svc != nil && slices.ContainsFunc(svc.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == at }) {
			return true
		}
	}
	return false
}

// packet returns the first packet of a connection, for [ruleset.Snapshot.Trace].
func (p *place) packet(t target) ruleset.Packet {
	f := familyOf(t.to.Addr())
	return ruleset.Packet{From: p.addr[f], InInterface: p.in, Protocol: t.proto, To: t.to, NodeAddresses: nodeAddresses[f]}
}

// check returns an error unless the outcome of a connection from the place agrees with the
// verdict.
func (p *place) check(o outcome, v ruleset.Verdict) error {
	want := map[ruleset.Action]netlab.OutcomeKind{ruleset.ActionForward: netlab.Reached, ruleset.ActionReject: netlab.Refused, ruleset.ActionDrop: netlab.Silent}[v.Action]
	switch {
	case v.Action == ruleset.ActionPass:
		return nil
	case o.Kind != want:
		return fmt.Errorf("%v, want %q: %s", o, want, v.Rule)
	case v.Action != ruleset.ActionForward:
		return nil
	}
	for _, ep := range v.Endpoints {
		if ep.Addr != o.Server {
			continue
		}
		f := familyOf(o.Source)
		switch {
		case v.MasqueradeTo(ep) && !slices.Contains(nodeAddresses[f], o.Source):
			return fmt.Errorf("%v, must be masqueraded to an address of the node: %s", o, v.Rule)
		case !v.MasqueradeTo(ep) && o.Source != p.addr[f]:
			return fmt.Errorf("%v, must keep its source %s: %s", o, p.addr[f], v.Rule)
		}
		return nil
	}
	return fmt.Errorf("%v, which is not among the %d endpoints allowed: %s", o, len(v.Endpoints), v.Rule)
}
