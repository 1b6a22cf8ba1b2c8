package mapplane

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// program reads the maps, as a BPF program would.
type program struct {
	frontends map[driver.Frontend]Action
	members   map[driver.Slot[driver.Pool]]Endpoint
	node      *ruleset.Node
}

func (p *program) handle(pk ruleset.Packet) conformance.Outcome {
	if p.node == nil {
		return conformance.Outcome{}
	}
	at := driver.Frontend{Addr: pk.To.Addr(), Port: pk.To.Port(), Protocol: pk.Protocol, Family: tracker.FamilyOf(pk.To.Addr())}
	a, ok := p.frontends[at]
	if !ok && slices.Contains(pk.NodeAddresses, at.Addr) && p.node.NodePorts(at.Family).Allows(at.Addr) {
		at.Addr = netip.Addr{}
		a, ok = p.frontends[at]
	}
	if !ok {
		return conformance.Outcome{}
	}
	fromPod, fromNode := p.node.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	target, size := a.Target, a.Size
	if fromPod || fromNode {
		target, size = a.Internal, a.InternalSize
	}
	switch target {
	case ruleset.TargetReject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	case ruleset.TargetDrop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	}
	masquerade := a.Masquerade.Applies(fromPod, fromNode)
	out := conformance.Outcome{Action: ruleset.ActionForward, Affinity: a.Affinity}
	for i := range size {
		// An empty slot is the zero Endpoint, which the suite reports as an error.
		ep := p.members[driver.Slot[driver.Pool]{Pool: driver.Pool{Service: a.Service, Target: target}, N: i}]
		out.Endpoints = append(out.Endpoints, conformance.Choice{
			Addr: ep.Addr, Weight: int(ep.Weight), Masquerade: masquerade || ep.Addr.Addr() == pk.From,
		})
	}
	return out
}

func TestConformance(t *testing.T) {
	conformance.Simulate(t, conformance.Simulation{
		New: func(_ testing.TB, env conformance.SimEnv) conformance.Fake {
			fails := func() bool { return env.Fail() != nil }
			p := &program{frontends: map[driver.Frontend]Action{}, members: map[driver.Slot[driver.Pool]]Endpoint{}}
			frontends := &fake[driver.Frontend, Action]{p.frontends, fails, env.Look, 0, 0}
			members := &fake[driver.Slot[driver.Pool], Endpoint]{p.members, fails, env.Look, 0, 0}
			return conformance.Fake{
				Backend: func() ruleset.Backend {
					plane := must.Get(New(frontends, members))(t)
					return ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
						p.node = d.Node
						return plane.Apply(ctx, d)
					})
				},
				Handle: p.handle,
				Dump:   p.dump,
			}
		},
		Skip: map[conformance.Feature]string{
			conformance.LoopbackNodePorts: "the map is the kernel's, where packets from loopback addresses stay",
			conformance.SourceRanges:      "the map has no place for them",
			conformance.RefuseBySource:    "as source ranges",
			conformance.ClosedPorts:       "addresses without ports are not in the map",
			conformance.ServiceCIDRs:      "as closed ports",
			conformance.ConsistentHash:    "endpoints are picked by number",
		},
	})
}

// dump returns the maps without the numbers of slots, which depend on earlier changes.
func (p *program) dump() string {
	var lines []string
	for f, a := range p.frontends {
		lines = append(lines, fmt.Sprintln(f, a))
	}
	for m, ep := range p.members {
		lines = append(lines, fmt.Sprintln(m.Pool, ep))
	}
	return strings.Join(slices.Sorted(slices.Values(lines)), "")
}
