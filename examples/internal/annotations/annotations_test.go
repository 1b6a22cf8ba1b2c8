package annotations

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

func TestServiceAnnotationsSetTheHash(t *testing.T) {
	for _, c := range []struct {
		balance, slots string
		hash           tracker.Hash
		want           uint16
		warnings       int
	}{
		{"", "", tracker.HashNone, 0, 0},
		{"random", "", tracker.HashNone, 0, 0},
		{"source", "1000", tracker.HashSource, 1000, 0},
		{"source-port", "65535", tracker.HashSourcePort, 65535, 0},
		{"Source", "65536", tracker.HashNone, 0, 2},
		{"source", "0", tracker.HashSource, 0, 1},
		{"source", "-1", tracker.HashSource, 0, 1},
		{"source", "many", tracker.HashSource, 0, 1},
	} {
		s := &v1.Service{}
		s.Annotations = map[string]string{Balance: c.balance}
		if c.slots != "" {
			s.Annotations[Slots] = c.slots
		}
		p := &tracker.ServicePort{}
		warned := count(t, allowing(t, Known()...).OnService(s, nil, p))
		if p.Hash != c.hash || p.HashBuckets != c.want {
			t.Errorf("%q, %q: %v, %d slots", c.balance, c.slots, p.Hash, p.HashBuckets)
		}
		if warned != c.warnings {
			t.Errorf("%q, %q: %d warnings", c.balance, c.slots, warned)
		}
	}
}

func TestFlagsNeedTrue(t *testing.T) {
	for name, of := range map[string]func(*tracker.ServicePort) bool{
		PreferLocal: func(p *tracker.ServicePort) bool { return p.PreferLocal },
	} {
		for value, want := range map[string]struct {
			set      bool
			warnings int
		}{"": {false, 0}, "true": {true, 0}, "false": {false, 0}, "yes": {false, 1}} {
			s := &v1.Service{}
			s.Annotations = map[string]string{name: value}
			var p tracker.ServicePort
			if warned := count(t, allowing(t, Known()...).OnService(s, nil, &p)); of(&p) != want.set || warned != want.warnings {
				t.Errorf("%s %q: %v, %d warnings", name, value, of(&p), warned)
			}
			p = tracker.ServicePort{}
			if count(t, allowing(t).OnService(s, nil, &p)); of(&p) {
				t.Errorf("%s %q: in force without permission", name, value)
			}
		}
	}
}

func TestServerIsAnExtension(t *testing.T) {
	for _, c := range []struct {
		scheduler, forwarding string
		want                  tracker.Extension
		warnings              int
	}{
		{"", "", nil, 0},
		{"lc", "", Server{Scheduler: "lc"}, 0},
		{"mh, port", "", Server{Scheduler: "mh", Port: true}, 0},
		{"rr,one-packet", "direct", Server{Scheduler: "rr", OnePacket: true, Forwarding: "direct"}, 0},
		{"", "tunnel", Server{Forwarding: "tunnel"}, 0},
		{"", "gre", Server{Forwarding: "gre"}, 0},
		{"rr,often", "far", nil, 2},
		{",port", "", nil, 1},
		{"averyveryverylongname", "", nil, 1},
	} {
		s, p := &v1.Service{}, &tracker.ServicePort{}
		s.Annotations = map[string]string{Scheduler: c.scheduler, Forwarding: c.forwarding}
		if warned := count(t, allowing(t, Known()...).OnService(s, nil, p)); p.Ext != c.want || warned != c.warnings {
			t.Errorf("%q, %q: %v, %d warnings", c.scheduler, c.forwarding, p.Ext, warned)
		}
	}
}

func TestSliceAnnotationsSetWeights(t *testing.T) {
	for _, c := range []struct {
		weight, weights string
		want            [2]uint16 // of 10.244.1.7 and fd00::1
		warnings        int
	}{
		{"", "", [2]uint16{1, 1}, 0},
		{"5", "", [2]uint16{5, 5}, 0},
		{"5", "10.244.1.7=0", [2]uint16{0, 5}, 0},
		{"", "fd00:0::1 = 65535, 10.244.1.9=2,", [2]uint16{1, 65535}, 0},
		{"x", "10.244.1.7=3", [2]uint16{3, 1}, 1},
		{"-1", "10.244.1.7=3,nonsense,fd00::1=70000", [2]uint16{3, 1}, 2},
	} {
		r, warned := allowing(t, "weight", "weights"), 0
		s := &discovery.EndpointSlice{}
		s.Annotations = map[string]string{Weights: c.weights}
		if c.weight != "" {
			s.Annotations[Weight] = c.weight
		}
		s.Endpoints = make([]discovery.Endpoint, 2)
		for i, a := range []string{"10.244.1.7", "fd00::1"} {
			e := &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), 80), Weight: 1}
			warned += count(t, r.OnEndpoint(s, &s.Endpoints[i], e))
			if e.Weight != c.want[i] {
				t.Errorf("%q, %q: %s has weight %d, want %d", c.weight, c.weights, a, e.Weight, c.want[i])
			}
		}
		if warned != c.warnings {
			t.Errorf("%q, %q: %d warnings", c.weight, c.weights, warned)
		}
	}
}

// TestChangedWeightsAreRead reads several slices with one reader, starting at any endpoint,
// and the same object with changed annotations.
func TestChangedWeightsAreRead(t *testing.T) {
	r := allowing(t, "weight", "weights")
	s := &discovery.EndpointSlice{Endpoints: make([]discovery.Endpoint, 2)}
	for i, c := range []struct {
		weights string
		want    [2]uint16
	}{
		{"10.0.0.0=3", [2]uint16{3, 1}},
		{"10.0.0.1=4", [2]uint16{1, 4}},
		{"", [2]uint16{1, 1}},
		{"10.0.0.1=4", [2]uint16{1, 4}},
		{"10.0.0.1=4,10.0.0.1=5,::ffff:10.0.0.0=9", [2]uint16{9, 5}},
	} {
		s.Annotations = map[string]string{Weights: c.weights}
		for _, at := range [][]int{{0, 1}, {1, 0}, {1}}[i%3] {
			e := &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(at)}), 80), Weight: 1}
			must.Do(t, r.OnEndpoint(s, &s.Endpoints[at], e))
			if e.Weight != c.want[at] {
				t.Errorf("%q: %s has weight %d, want %d", c.weights, e, e.Weight, c.want[at])
			}
		}
	}
}

// TestCiliumWeightHasCiliumsMeaning checks range, default and precedence of Cilium's annotation.
func TestCiliumWeightHasCiliumsMeaning(t *testing.T) {
	for _, c := range []struct {
		name            string
		allowed         []string
		cilium, weights string
		want            [2]uint16 // of 10.244.1.7 and fd00::1
		warnings        int
	}{
		{"not allowed", nil, "5", "", [2]uint16{1, 1}, 0},
		{"missing", []string{CiliumWeight}, "", "", [2]uint16{100, 100}, 0},
		{"maintenance", []string{CiliumWeight}, "0", "", [2]uint16{0, 0}, 0},
		{"largest", []string{CiliumWeight}, "65535", "", [2]uint16{65535, 65535}, 0},
		{"too large", []string{CiliumWeight}, "65536", "", [2]uint16{100, 100}, 1},
		{"overridden", Known(), "5", "fd00::1=7", [2]uint16{5, 7}, 0},
	} {
		r, warned := allowing(t, c.allowed...), 0
		s := &discovery.EndpointSlice{Endpoints: make([]discovery.Endpoint, 2)}
		s.Annotations = map[string]string{CiliumWeight: c.cilium, Weights: c.weights}
		for i, a := range []string{"10.244.1.7", "fd00::1"} {
			e := &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), 80), Weight: 1}
			warned += count(t, r.OnEndpoint(s, &s.Endpoints[i], e))
			if e.Weight != c.want[i] {
				t.Errorf("%s: %s has weight %d, want %d", c.name, a, e.Weight, c.want[i])
			}
		}
		if warned != c.warnings {
			t.Errorf("%s: %d warnings, want %d", c.name, warned, c.warnings)
		}
	}
}

// allowing returns a Reader that allows the annotations.
func allowing(t testing.TB, names ...string) *Reader {
	t.Helper()
	r := must.Get(NewReader(names))(t)
	return r
}

// count returns the number of ignored annotations in a warning. Any other error is fatal.
func count(t testing.TB, err error) int {
	t.Helper()
	if err == nil {
		return 0
	}
	if fmt.Sprintf("%T", err) != fmt.Sprintf("%T", tracker.Warning("")) {
		t.Fatal(err)
	}
	return strings.Count(err.Error(), "is ignored")
}

func TestAnnotationsNeedPermission(t *testing.T) {
	s := &v1.Service{}
	s.Annotations = map[string]string{Balance: "source", Slots: "1000"}
	for _, c := range []struct {
		allowed []string
		hash    tracker.Hash
		slots   uint16
		warned  int
	}{
		{nil, tracker.HashNone, 0, 2},
		{[]string{"balance"}, tracker.HashSource, 0, 1},
		{[]string{"balance-slots", "weights"}, tracker.HashNone, 1000, 1},
		{Known(), tracker.HashSource, 1000, 0},
	} {
		p := &tracker.ServicePort{}
		warned := count(t, allowing(t, c.allowed...).OnService(s, nil, p))
		if p.Hash != c.hash || p.HashBuckets != c.slots || warned != c.warned {
			t.Errorf("%q: hash %v, %d slots, %d warnings", c.allowed, p.Hash, p.HashBuckets, warned)
		}
	}
	es := &discovery.EndpointSlice{Endpoints: make([]discovery.Endpoint, 2)}
	es.Annotations = map[string]string{Weight: "7", Weights: "10.0.0.1=9"}
	warned := 0
	for i := range es.Endpoints {
		e := &tracker.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Weight: 1}
		warned += count(t, allowing(t, "balance").OnEndpoint(es, &es.Endpoints[i], e))
		if e.Weight != 1 {
			t.Errorf("weight %d without permission", e.Weight)
		}
	}
	if warned != 2 {
		t.Errorf("%d warnings", warned)
	}
	if _, err := NewReader([]string{"bogus"}); err == nil {
		t.Error("an unknown annotation is accepted")
	}
}

func FuzzWarningsAreBounded(f *testing.F) {
	f.Add("10.0.0.1=3, fd00::1 = 65535", "source", "65535", "7")
	f.Add(strings.Repeat("x", 1<<17), strings.Repeat("\x1b", 1<<17), strings.Repeat("9", 1<<17), "-1")
	f.Fuzz(func(t *testing.T, weights, balance, slots, weight string) {
		r := allowing(t, Known()...)
		s := &v1.Service{}
		s.Annotations = map[string]string{Balance: balance, Slots: slots}
		s.Spec.Ports = []v1.ServicePort{{Name: "p", Port: 1}}
		short := func(err error) {
			if err != nil && len(err.Error()) > 1500 {
				t.Errorf("a warning of %d bytes", len(err.Error()))
			}
		}
		short(r.OnService(s, &s.Spec.Ports[0], &tracker.ServicePort{}))
		es := &discovery.EndpointSlice{Endpoints: make([]discovery.Endpoint, 2)}
		es.Annotations = map[string]string{Weights: weights, Weight: weight}
		for i := range es.Endpoints {
			short(r.OnEndpoint(es, &es.Endpoints[i], &tracker.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:80")}))
		}
	})
}
