package annotations

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// annotated returns the annotations "NAME=VALUE; NAME=VALUE" without the prefix of most of their names.
func annotated(text string) map[string]string {
	out := map[string]string{}
	for a := range strings.SplitSeq(text, "; ") {
		name, value, _ := strings.Cut(a, "=")
		if !strings.Contains(name, "/") {
			name = "go-proxier.github.io/" + name
		}
		out[name] = value
	}
	return out
}

func TestServiceAnnotationsSetFields(t *testing.T) {
	for _, c := range []struct {
		annotations string
		want        tracker.ServicePort
		warnings    int
	}{
		{"balance=", tracker.ServicePort{}, 0},
		{"balance=random", tracker.ServicePort{}, 0},
		{"balance=source; balance-slots=1000", tracker.ServicePort{Hash: tracker.HashSource, HashBuckets: 1000}, 0},
		{"balance=source-port; balance-slots=65535", tracker.ServicePort{Hash: tracker.HashSourcePort, HashBuckets: 65535}, 0},
		{"balance=Source; balance-slots=65536", tracker.ServicePort{}, 2},
		{"balance=source; balance-slots=0", tracker.ServicePort{Hash: tracker.HashSource}, 1},
		{"balance=source; balance-slots=-1", tracker.ServicePort{Hash: tracker.HashSource}, 1},
		{"balance=source; balance-slots=many", tracker.ServicePort{Hash: tracker.HashSource}, 1},
		{PreferLocal + "=", tracker.ServicePort{}, 0},
		{PreferLocal + "=true", tracker.ServicePort{PreferLocal: true}, 0},
		{PreferLocal + "=false", tracker.ServicePort{}, 0},
		{PreferLocal + "=yes", tracker.ServicePort{}, 1},
		{Scheduler + "=lc", tracker.ServicePort{Ext: Server{Scheduler: "lc"}}, 0},
		{Scheduler + "=mh, port", tracker.ServicePort{Ext: Server{Scheduler: "mh", Port: true}}, 0},
		{Scheduler + "=rr,one-packet; " + Forwarding + "=direct", tracker.ServicePort{Ext: Server{Scheduler: "rr", OnePacket: true, Forwarding: "direct"}}, 0},
		{Forwarding + "=tunnel", tracker.ServicePort{Ext: Server{Forwarding: "tunnel"}}, 0},
		{Forwarding + "=gre", tracker.ServicePort{Ext: Server{Forwarding: "gre"}}, 0},
		{Scheduler + "=rr,often; " + Forwarding + "=far", tracker.ServicePort{}, 2},
		{Scheduler + "=,port", tracker.ServicePort{}, 1},
		{Scheduler + "=averyveryverylongname", tracker.ServicePort{}, 1},
	} {
		s := &v1.Service{}
		s.Annotations = annotated(c.annotations)
		got := tracker.ServicePort{}
		if warned := count(t, allowing(t, Known()...).OnService(s, nil, &got)); !reflect.DeepEqual(got, c.want) || warned != c.warnings {
			t.Errorf("%s: %+v, %d warnings, want %d", c.annotations, got, warned, c.warnings)
		}
		got = tracker.ServicePort{}
		if count(t, allowing(t).OnService(s, nil, &got)); !reflect.DeepEqual(got, tracker.ServicePort{}) {
			t.Errorf("%s: in force without permission: %+v", c.annotations, got)
		}
	}
}

// TestSliceAnnotationsSetWeights includes range, default and precedence of Cilium's annotation.
func TestSliceAnnotationsSetWeights(t *testing.T) {
	own, all := []string{"weight", "weights"}, Known()
	for _, c := range []struct {
		allowed     []string
		annotations string
		want        [2]uint16 // of 10.244.1.7 and fd00::1
		warnings    int
	}{
		{own, "weights=", [2]uint16{1, 1}, 0},
		{own, "weight=5", [2]uint16{5, 5}, 0},
		{own, "weight=5; weights=10.244.1.7=0", [2]uint16{0, 5}, 0},
		{own, "weights=fd00:0::1 = 65535, 10.244.1.9=2,", [2]uint16{1, 65535}, 0},
		{own, "weight=x; weights=10.244.1.7=3", [2]uint16{3, 1}, 1},
		{own, "weight=-1; weights=10.244.1.7=3,nonsense,fd00::1=70000", [2]uint16{3, 1}, 2},
		{nil, CiliumWeight + "=5", [2]uint16{1, 1}, 0},
		{[]string{CiliumWeight}, CiliumWeight + "=", [2]uint16{100, 100}, 0},
		{[]string{CiliumWeight}, CiliumWeight + "=0", [2]uint16{0, 0}, 0},
		{[]string{CiliumWeight}, CiliumWeight + "=65535", [2]uint16{65535, 65535}, 0},
		{[]string{CiliumWeight}, CiliumWeight + "=65536", [2]uint16{100, 100}, 1},
		{all, CiliumWeight + "=5; weights=fd00::1=7", [2]uint16{5, 7}, 0},
	} {
		r, warned := allowing(t, c.allowed...), 0
		s := &discovery.EndpointSlice{Endpoints: make([]discovery.Endpoint, 2)}
		s.Annotations = annotated(c.annotations)
		for i, a := range []string{"10.244.1.7", "fd00::1"} {
			e := &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), 80), Weight: 1}
			warned += count(t, r.OnEndpoint(s, &s.Endpoints[i], e))
			if e.Weight != c.want[i] {
				t.Errorf("%q, %s: %s has weight %d, want %d", c.allowed, c.annotations, a, e.Weight, c.want[i])
			}
		}
		if warned != c.warnings {
			t.Errorf("%q, %s: %d warnings, want %d", c.allowed, c.annotations, warned, c.warnings)
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
