package iptables

import (
	"bytes"
	"context"
	"hash/maphash"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptmemory"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// FuzzInjection renders Services with arbitrary names, and a node with an arbitrary bridge.
// The output must have as many lines as it has rules and chains. A kernel in memory must accept
// it, and on Linux the real iptables-restore.
func FuzzInjection(f *testing.F) {
	for _, s := range []string{"svc", "a\" -j ACCEPT", "a\nCOMMIT\n*filter\n-P INPUT DROP", "\\\"", "'`$(reboot)`", "-j", "!", "", strings.Repeat("x", 300), "\x00", "ü", "# c", "KUBE-SVC"} {
		f.Add(s, "ns", "p", []byte{10, 0, 0, 1}, int64(10))
		f.Add("svc", s, s, []byte{127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, int64(0))
	}
	real := map[tracker.Family]programs{}
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, name, namespace, port string, addr []byte, seconds int64) {
		a, ok := netip.AddrFromSlice(addr)
		if !ok {
			a = netip.MustParseAddr("10.0.0.9")
		}
		a = a.Unmap()
		family := tracker.FamilyOf(a)
		if _, ok := real[family]; !ok {
			real[family] = linuxPrograms(t, family)
		}
		ep := &tracker.Endpoint{Addr: netip.AddrPortFrom(a, 80), Node: "n", Ready: true, Serving: true, Weight: 1}
		key := tracker.Key{Family: family}
		key.Namespace, key.Name, key.Port, key.Protocol = namespace, name, port, v1.ProtocolTCP
		sp := &tracker.ServicePort{
			Key: key, ClusterIP: a, Port: 80, NodePort: 30000, Affinity: time.Duration(uint32(seconds)) * time.Second,
			ExternalIPs: []netip.Addr{a.Next()}, LoadBalancerIPs: []netip.Addr{a.Prev()}, SourceRanges: []netip.Prefix{netip.PrefixFrom(a, a.BitLen()/2)},
			ExternalLocal: seconds%2 == 0, HealthCheckNodePort: 30001,
		}
		node := &ruleset.Node{Info: tracker.NodeInfo{Name: "n"}, LocalTraffic: ruleset.LocalTraffic{Bridge: port}}
		s := ruleset.Compile(tracker.PortState{Port: sp, Endpoints: []*tracker.Endpoint{ep}}, node)
		m, err := newModel(&settings{family: family, mark: 1 << 14}, node)
		if err != nil {
			return // no interface can have the bridge's name
		}
		b := newBatch()
		m.change(s.Key, s, b.difference)
		m.allChains(b.put)
		for tab := range tables {
			lines := 2
			for _, c := range b.puts[tab] {
				lines += 1 + len(c.rules)
			}
			for _, in := range b.inputs(tab, nil, 1<<20, nil) {
				if got := bytes.Count(in.Bytes(), []byte("\n")); got != lines {
					t.Fatalf("%d lines, want %d:\n%s", got, lines, in.String())
				}
				for _, p := range []programs{&memoryPrograms{memory: newMemory(NFT), Tables: iptmemory.New()}, real[family]} {
					if p == nil {
						continue
					}
					if err := p.Restore(context.Background(), in.Bytes(), "--test"); err != nil {
						t.Fatalf("%v\n%s", err, in.String())
					}
				}
			}
		}
	})
}

// FuzzSave parses arbitrary input as the output of iptables-save.
func FuzzSave(f *testing.F) {
	f.Add([]byte("*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -j KUBE-NODEPORTS\n-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n"))
	f.Add([]byte("*nat\n-A\n-A KUBE-X\n:\n*\n-A OUTPUT -m comment --comment \"-j KUBE-SERVICES\" -j ACCEPT\n"))
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, text []byte) {
		k := parseSave(bytes.NewReader(text), nat, maphash.MakeSeed())
		for name := range k.chains {
			if !owned(nat, name) {
				t.Errorf("chain %q is not ours", name)
			}
		}
		for _, h := range k.hooks {
			if !owned(nat, iptext.Target(h.rule)) {
				t.Errorf("%q leads to no chain of ours", h.rule)
			}
		}
	})
}
