package grouptable

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// vips holds the frontends of a data plane with groups. All are replaced in one step after
// the groups.
type vips struct {
	sw    *fakeSwitch
	empty bool
	node  *ruleset.Node
	table map[vip]entry
}

type vip struct {
	addr   netip.Addr // the zero Addr for a NodePort
	port   uint16
	proto  v1.Protocol
	family tracker.Family
}

type entry struct {
	service  tracker.Key
	frontend ruleset.Frontend
	affinity time.Duration
	// target and internal are the targets. With empty groups they are the pools of the
	// traffic policies: the flow always names a group, and an empty one refuses.
	target, internal ruleset.Target
}

// entryOf returns the entry of a frontend.
func (v *vips) entryOf(s *ruleset.Port, f *ruleset.Frontend) entry {
	e := entry{s.Key, *f, s.Spec.Affinity, f.Target, f.Internal}
	if !v.empty {
		return e
	}
	pool := func(t ruleset.Target, local bool) ruleset.Target {
		switch {
		case t == ruleset.TargetCluster || t == ruleset.TargetLocal:
			return t
		case local:
			return ruleset.TargetLocal
		}
		return ruleset.TargetCluster
	}
	if f.Kind == ruleset.KindClusterIP {
		e.target, e.internal = pool(f.Target, s.Spec.InternalLocal), pool(f.Internal, s.Spec.InternalLocal)
	} else {
		e.target, e.internal = pool(f.Target, s.Spec.ExternalLocal), pool(f.Internal, false)
	}
	return e
}

// over returns a backend that writes to a backend for groups and then to v.
func (v *vips) over(t ruleset.Backend) ruleset.Backend {
	return ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		v.node = d.Node
		err := t.Apply(ctx, d)
		var partial *ruleset.PartialError
		if err != nil && !errors.As(err, &partial) {
			return err
		}
		if d.Full {
			clear(v.table)
		}
		at := func(c *ruleset.Change, f *ruleset.Frontend) vip {
			return vip{f.Addr, f.Port, c.Key.Protocol, c.Key.Family}
		}
		for _, c := range d.Changes {
			if partial != nil && partial.Failed[c.Key] != nil {
				continue
			}
			for f := range c.GoneFrontends() {
				delete(v.table, at(&c, &f))
			}
			if c.New == nil {
				continue
			}
			for i := range c.New.Frontends {
				f := &c.New.Frontends[i]
				v.table[at(&c, f)] = v.entryOf(c.New, f)
			}
		}
		return err
	})
}

func (v *vips) handle(pk ruleset.Packet) conformance.Outcome {
	if v.node == nil {
		return conformance.Outcome{}
	}
	at := vip{pk.To.Addr(), pk.To.Port(), pk.Protocol, tracker.FamilyOf(pk.To.Addr())}
	e, ok := v.table[at]
	if !ok && slices.Contains(pk.NodeAddresses, at.addr) && v.node.NodePorts(at.family).Allows(at.addr) {
		at.addr = netip.Addr{}
		e, ok = v.table[at]
	}
	fromPod, fromNode := v.node.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	target := e.target
	if fromPod || fromNode {
		target = e.internal
	}
	switch {
	case !ok:
		return conformance.Outcome{}
	case !e.frontend.Admits(pk.From), target == ruleset.TargetDrop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	case target == ruleset.TargetReject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	}
	masquerade := e.frontend.Masquerade.Applies(fromPod, fromNode)
	out := conformance.Outcome{Action: ruleset.ActionForward, Affinity: e.affinity}
	for _, g := range v.sw.groups {
		if g.name != (driver.Pool{Service: e.service, Target: target}) {
			continue
		}
		if v.empty && len(g.buckets) == 0 {
			return conformance.Outcome{Action: ruleset.ActionReject}
		}
		for _, ep := range g.buckets {
			if !v.sw.endpoints[ep] {
				ep.Addr = netip.AddrPort{}
			}
			out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: ep.Addr, Masquerade: masquerade || ep.Addr.Addr() == pk.From})
		}
	}
	return out
}

// TestConformance runs the suite with and without empty groups.
func TestConformance(t *testing.T) {
	for _, empty := range []bool{false, true} {
		t.Run(fmt.Sprintf("empty=%t", empty), func(t *testing.T) {
			skip := map[conformance.Feature]string{
				conformance.LoopbackNodePorts: "no packet from a loopback address leaves the node",
				conformance.ClosedPorts:       "groups and frontends are all there is",
				conformance.ServiceCIDRs:      "as closed ports",
				conformance.WeightedEndpoints: "buckets count alike",
				conformance.ConsistentHash:    "as weights",
			}
			if empty {
				skip[conformance.Drop] = "a group without buckets refuses, even if other nodes have endpoints"
			}
			conformance.Simulate(t, conformance.Simulation{
				New: func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
					fails := func() bool { return env.Fail() != nil }
					v := &vips{
						empty: empty,
						sw:    &fakeSwitch{t, fails, map[driver.Endpoint]bool{}, map[uint32]group{}, 0},
						table: map[vip]entry{},
					}
					return conformance.Fake{
						Backend: func() ruleset.Backend {
							table := must.Get(New(v.sw, empty))(t)
							return v.over(table)
						},
						Handle: v.handle,
					}
				},
				Skip:   skip,
				Worlds: 12,
			})
		})
	}
}
