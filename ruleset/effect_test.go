package ruleset

import (
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// checkEffect compares a cursor's look-ups with the Services that its backend
// accepted.
func checkEffect(t *testing.T, c *Cursor, acked map[tracker.Key]*Port) {
	t.Helper()
	type at struct {
		addr  netip.AddrPort
		proto v1.Protocol
	}
	addrOf := func(p l4Key) at {
		a := netip.AddrFrom16(p.addr).Unmap()
		return at{netip.AddrPortFrom(a, p.port), map[uint16]v1.Protocol{1: v1.ProtocolTCP, 2: v1.ProtocolUDP, 3: v1.ProtocolSCTP}[p.proto]}
	}
	frontends, endpoints := map[at][]*Port{}, map[at][]*Port{}
	for k, s := range acked {
		if got := c.Port(k); diff(got, s) != 0 {
			t.Fatalf("%s: acknowledged %v, want %v", k, got, s)
		}
		for i := range s.Frontends {
			at := l4KeyOf(s, &s.Frontends[i])
			f := addrOf(at)
			frontends[f] = append(frontends[f], s)
		}
		for _, ep := range s.Endpoints {
			e := at{ep.Addr, k.Protocol}
			endpoints[e] = append(endpoints[e], s)
		}
	}
	for f, all := range frontends {
		s, got := c.Lookup(f.addr, f.proto)
		if len(all) != 1 || s == nil || diff(all[0], s) != 0 || all[0].Key != s.Key || addrOf(l4KeyOf(s, got)) != f {
			t.Fatalf("%v: found %v of %v, want %v", f, got, s, all)
		}
	}
	for e, all := range endpoints {
		slices.SortFunc(all, func(a, b *Port) int { return a.Key.Compare(b.Key) })
		if got := c.LookupEndpoint(e.addr, e.proto); !slices.EqualFunc(got, all, func(a, b *Port) bool { return a.Key == b.Key && diff(a, b) == 0 }) {
			t.Fatalf("endpoint %v: found %v, want %v", e, got, all)
		}
	}
	for p := range c.effect.frontends {
		if frontends[addrOf(p)] == nil {
			t.Fatalf("%v is found, though no acknowledged Service has it", addrOf(p))
		}
	}
	if len(c.effect.endpoints) != len(endpoints) {
		t.Fatalf("%d endpoints are found, want %d", len(c.effect.endpoints), len(endpoints))
	}
	if c.Port(key("no such service", tracker.IPv4)) != nil {
		t.Fatal("found a Service that does not exist")
	}
}

// TestLookupsOfUnusualAddresses looks up an IPv4 address in the form of IPv6 and the zero AddrPort, and looks up
// after Detach.
func TestLookupsOfUnusualAddresses(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	c := e.Attach("b", discard)
	tr.SetService(service("m", "172.30.0.1", externalIPs("192.0.2.1")))
	tr.SetSlice(slice("m", "10.0.0.1"))
	must.Do(t, c.Sync(t.Context()))
	find := func() bool {
		s, f := c.Lookup(netip.MustParseAddrPort("[::ffff:192.0.2.1]:80"), v1.ProtocolTCP)
		return s != nil && f.Kind == KindExternalIP
	}
	if !find() {
		t.Error("the IPv4 address in the form of IPv6 is not found")
	}
	if s, _ := c.Lookup(netip.AddrPort{}, v1.ProtocolTCP); s != nil || c.LookupEndpoint(netip.AddrPort{}, v1.ProtocolTCP) != nil {
		t.Error("the zero AddrPort is found")
	}
	c.Detach()
	if find() || c.Port(key("m", tracker.IPv4)) != nil || c.LookupEndpoint(netip.MustParseAddrPort("10.0.0.1:8080"), v1.ProtocolTCP) != nil {
		t.Error("a Service is found after Detach")
	}
}
