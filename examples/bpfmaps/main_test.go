//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// need skips the test unless the process may make maps.
func need(t *testing.T) *maps {
	m, err := openMaps("", 1<<8)
	netlab.Need(t, err == nil, fmt.Sprintf("the right to make BPF maps: %v", err))
	t.Cleanup(m.close)
	return m
}

// program reads the maps as a BPF program would.
type program struct {
	*maps
	node *ruleset.Node
}

func (p *program) handle(pk ruleset.Packet) conformance.Outcome {
	if p.node == nil {
		return conformance.Outcome{}
	}
	f := tracker.FamilyOf(pk.To.Addr())
	k := frontendKey{Addr: pk.To.Addr().As16(), Port: bigEndian(pk.To.Port()), Protocol: protocols[pk.Protocol], Family: uint8(f)}
	var fe frontend
	err := p.frontends.Lookup(k, &fe)
	if err != nil && slices.Contains(pk.NodeAddresses, pk.To.Addr()) && p.node.NodePorts(f).Allows(pk.To.Addr()) {
		k.Addr = [16]byte{}
		err = p.frontends.Lookup(k, &fe)
	}
	if err != nil {
		return conformance.Outcome{}
	}
	fromPod, fromNode := p.node.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	to := fe.External
	if fromPod || fromNode {
		to = fe.Internal
	}
	switch to.Action {
	case reject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	case drop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	}
	out := conformance.Outcome{Action: ruleset.ActionForward, Affinity: time.Duration(fe.Affinity) * time.Second}
	for i := range to.Size {
		var b backend
		_ = p.backends.Lookup(backendKey{to.Pool, i}, &b) // the suite reports the zero endpoint as an error
		addr := netip.AddrPortFrom(netip.AddrFrom16(b.Addr).Unmap(), binary.BigEndian.Uint16(b.Port[:]))
		out.Endpoints = append(out.Endpoints, conformance.Choice{
			Addr: addr, Weight: int(b.Weight), Masquerade: ruleset.Masquerade(fe.Masquerade).Applies(fromPod, fromNode) || addr.Addr() == pk.From,
		})
	}
	return out
}

// dump returns the maps without numbers of pools and slots, which depend on earlier changes.
func (p *program) dump() string {
	names := map[uint32]string{}
	var lines []string
	each(p.names, func(id uint32, n poolName) { names[id] = string(n[:]) })
	each(p.frontends, func(k frontendKey, f frontend) {
		lines = append(lines, fmt.Sprintln(frontendOf(k), names[f.External.Pool], names[f.Internal.Pool], f.External.Size, f.Internal.Size, f.External.Action, f.Internal.Action, f.Masquerade, f.Affinity))
	})
	each(p.backends, func(k backendKey, b backend) { lines = append(lines, fmt.Sprintln(names[k.Pool], b)) })
	slices.Sort(lines)
	return strings.Join(lines, "")
}

func each[K, V any](m *ebpf.Map, f func(K, V)) {
	var k K
	var v V
	for all := m.Iterate(); all.Next(&k, &v); {
		f(k, v)
	}
}

// TestConformance runs the suite's simulated worlds on maps of the kernel, and looks at them before each
// of its writes.
func TestConformance(t *testing.T) {
	need(t)
	conformance.Simulate(t, conformance.Simulation{
		New: func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
			m := must.Get(openMaps("", 1<<8))(tb)
			tb.Cleanup(m.close)
			p := &program{maps: m}
			return conformance.Fake{
				Backend: func() ruleset.Backend {
					plane := must.Get(newPlane(m))(tb)
					return ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
						p.node = d.Node
						if err := env.Fail(); err != nil {
							return err
						}
						err := plane.Apply(ctx, d)
						env.Look()
						return err
					})
				},
				Handle: p.handle,
				Dump:   p.dump,
			}
		},
		Skip: map[conformance.Feature]string{
			conformance.LoopbackNodePorts: "the map is the kernel's, where packets from loopback addresses stay",
			conformance.SourceRanges:      "the maps have none",
			conformance.RefuseBySource:    "as source ranges",
			conformance.ClosedPorts:       "addresses without ports are not in the map",
			conformance.ServiceCIDRs:      "as closed ports",
			conformance.ConsistentHash:    "endpoints are picked by number",
		},
	})
}

// port is a Service port with one endpoint and a load-balancer IP by the length of its name.
func port(name string) *ruleset.Port {
	key := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}, Protocol: v1.ProtocolTCP}, Family: tracker.IPv4}
	ep := &tracker.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Ready: true, Serving: true, Weight: 1}
	return &ruleset.Port{
		ID: uint32(len(name)), Key: key, Spec: &tracker.ServicePort{Key: key}, Endpoints: []*tracker.Endpoint{ep},
		Selection: tracker.Selection{Cluster: []*tracker.Endpoint{ep}, UsesCluster: true},
		Frontends: []ruleset.Frontend{{
			Kind: ruleset.KindLoadBalancerIP, Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(len(name))}), Port: 80,
			Target: ruleset.TargetCluster, Internal: ruleset.TargetCluster,
		}},
	}
}

// TestFullMapFailsOneService has maps with room for one pool.
func TestFullMapFailsOneService(t *testing.T) {
	need(t)
	m := must.Get(openMaps("", 1))(t)
	defer m.close()
	plane := must.Get(newPlane(m))(t)
	a, bb := port("a"), port("bb")
	err := plane.Apply(t.Context(), &ruleset.Delta{Full: true, Node: &ruleset.Node{}, Changes: []ruleset.Change{{Key: a.Key, New: a}, {Key: bb.Key, New: bb}}})
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(partial.Failed[bb.Key], syscall.E2BIG) {
		t.Fatalf("error %v, want the second Service to fail", err)
	}
	// It fits once the first one is gone, when it is tried again.
	for _, c := range []ruleset.Change{{Key: a.Key, Old: a}, {Key: bb.Key, New: bb}} {
		if err := plane.Apply(t.Context(), &ruleset.Delta{Node: &ruleset.Node{}, Changes: []ruleset.Change{c}}); err != nil {
			t.Error(err)
		}
	}
}
