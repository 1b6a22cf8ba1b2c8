package ruleset

import (
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

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

// TestCursorFindsAcknowledgedServices checks that look-ups return what the backend
// accepted, not what is wanted.
func TestCursorFindsAcknowledgedServices(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	b := &recorder{}
	c := e.Attach("b", b)
	show := func() string {
		s, f := c.Lookup(netip.MustParseAddrPort("[::ffff:192.0.2.1]:80"), v1.ProtocolTCP)
		out := "none"
		if f != nil {
			out = s.Key.Name + " " + f.Kind.String()
		}
		for _, s := range c.LookupEndpoint(netip.MustParseAddrPort("10.0.0.1:8080"), v1.ProtocolTCP) {
			out += " " + s.Key.Name
		}
		return out
	}
	step := func(err error, want string) {
		t.Helper()
		b.answer = func(*Delta) error { return err }
		if got := c.Sync(t.Context()); (got != nil) != (err != nil) {
			t.Fatalf("error %v, want %v", got, err)
		}
		if got := show(); got != want {
			t.Errorf("in effect: %q, want %q", got, want)
		}
	}
	external := func(s *v1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1"} }
	if got := show(); got != "none" {
		t.Errorf("before the first sync: %q", got)
	}
	tr.SetService(service("m", "172.30.0.1", external))
	tr.SetSlice(slice("m", "10.0.0.1"))
	step(errInjected, "none")
	step(nil, "m external IP m")
	tr.SetService(service("a", "172.30.0.2", external))
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	if got := show(); got != "m external IP m" {
		t.Errorf("before the sync: %q", got)
	}
	step(&PartialError{Failed: map[tracker.Key]error{key("a", tracker.IPv4): errInjected}}, "m external IP m")
	step(nil, "a external IP a m")
	if s := c.Port(key("a", tracker.IPv4)); s == nil || s != e.Snapshot().Ports[1] {
		t.Errorf("Service a is %v", s)
	}
	tr.DeleteService(name("a"))
	step(errInjected, "a external IP a m")
	if c.Port(key("a", tracker.IPv4)) == nil {
		t.Error("a Service whose removal failed is not found")
	}
	step(nil, "m external IP m")
	tr.SetSlice(slice("m", "10.0.0.3"))
	step(nil, "m external IP")
	if s, _ := c.Lookup(netip.AddrPort{}, v1.ProtocolTCP); s != nil || c.LookupEndpoint(netip.AddrPort{}, v1.ProtocolTCP) != nil {
		t.Error("the zero AddrPort is found")
	}
	c.Detach()
	if got := show(); got != "none" || c.Port(key("m", tracker.IPv4)) != nil {
		t.Errorf("after Detach: %q", got)
	}
}

// TestIndexUpdateCostIsConstant checks that, with indexes in use, a change costs as
// much with many Services as with few.
func TestIndexUpdateCostIsConstant(t *testing.T) {
	measure := func(s size) (allocs float64) {
		tr, e := fill(t, s)
		c := e.Attach("b", discard)
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		a, z := sliceN(7, s.endpoints, "n2"), sliceN(7, s.endpoints, "n2")
		z.Endpoints[0].Addresses[0] = "10.255.255.1"
		flip := func() {
			a, z = z, a
			tr.SetSlice(z)
			if err := c.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			at := netip.AddrPortFrom(netip.MustParseAddr(z.Endpoints[0].Addresses[0]), 8080)
			if len(c.LookupEndpoint(at, v1.ProtocolTCP)) != 1 {
				t.Fatal("the endpoint is not found")
			}
			if svc, _ := c.Lookup(netip.MustParseAddrPort("172.30.0.7:80"), v1.ProtocolTCP); svc == nil {
				t.Fatal("the frontend is not found")
			}
		}
		flip()
		return testing.AllocsPerRun(200, flip)
	}
	few, many := measure(size{10, 10}), measure(size{3000, 10})
	t.Logf("allocations for a change and two look-ups: %v with 10 services, %v with 3000", few, many)
	if many > few+2 {
		t.Errorf("a change and two look-ups cost %v allocations with many services, %v with few", many, few)
	}
}
