//go:build linux

package socketlb

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// suite opens the pair of backends for the worlds of a test.
type suite struct {
	mu    sync.Mutex
	nodes map[*os.File]*node
	// taken is the number of connections that were translated at the socket, in all worlds.
	taken atomic.Uint64
}

// node returns the node of a world.
func (s *suite) node(tb testing.TB, env conformance.Env) *node {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[env.NetNS]
	if n == nil {
		n = newNode(tb)
		if s.nodes == nil {
			s.nodes = map[*os.File]*node{}
		}
		s.nodes[env.NetNS] = n
	}
	return n
}

func (s *suite) options() conformance.Options {
	return conformance.Options{
		Skip: map[conformance.Feature]string{conformance.LoopbackNodePorts: "endpoints could not reply to a loopback address"},
		New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
			c := s.node(tb, env).config()
			c.NetNS, c.Families = env.NetNS, env.Families
			return s.pair(tb, c)
		},
		Client:      func(env conformance.Env, f func() error) error { return s.node(nil, env).Do(f) },
		Masquerades: masquerades,
		EndsSockets: true,
	}
}

// pair returns package nftables with a Backend before it.
func (s *suite) pair(tb testing.TB, c Config) ruleset.Backend {
	behind := must.Get(nftables.New(tb.Context(), nftables.Config{NetNS: c.NetNS, Families: c.Families}))(tb)
	tb.Cleanup(func() { behind.Close() })
	b := must.Get(New(tb.Context(), c))(tb)
	tb.Cleanup(func() {
		n, err := countersOf(b)
		if err != nil {
			tb.Error(err)
		}
		tb.Logf("translated at the socket: %+v", n)
		s.taken.Add(n.Node + n.Pods)
		b.Close()
	})
	return ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		if err := behind.Apply(ctx, d); err != nil {
			return err
		}
		if err := b.Apply(ctx, d); err != nil {
			return err
		}
		return b.Check(ctx)
	})
}

// masquerades reports whether a packet must be masqueraded. It has the documented difference
// from the ruleset: a pod that reaches itself through a Service sees its own address, unless
// the connection is left alone or must be masqueraded for another reason.
func masquerades(p ruleset.Packet, v ruleset.Verdict, ep *tracker.Endpoint) bool {
	pod := p.InInterface == "cni0" || strings.HasPrefix(p.InInterface, "veth-")
	other := &tracker.Endpoint{Addr: netip.AddrPortFrom(p.From.Next(), 1)}
	if pod && (p.Protocol == v1.ProtocolTCP || p.Protocol == v1.ProtocolUDP) && ep.Addr.Addr() == p.From && !v.MasqueradeTo(other) &&
		len(v.Frontend.Sources) == 0 && v.Hash == tracker.HashNone {
		return false
	}
	return v.MasqueradeTo(ep)
}

// TestConformance runs the worlds of package conformance.
func TestConformance(t *testing.T) {
	t.Parallel()
	need(t)
	s := &suite{}
	t.Cleanup(func() {
		if s.taken.Load() == 0 {
			t.Error("no connection was translated at the socket")
		}
	})
	o := s.options()
	if !testtime.Complete() {
		o.Families = []tracker.Family{tracker.IPv4}
	}
	conformance.Run(t, o)
}

// TestRandomWorlds runs random worlds of package conformance.
func TestRandomWorlds(t *testing.T) {
	t.Parallel()
	need(t)
	conformance.RunRandom(t, new(suite).options(), conformance.Random{Worlds: 6})
}
