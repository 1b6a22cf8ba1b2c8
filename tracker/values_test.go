package tracker_test

import (
	"net/netip"
	"reflect"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/tracker"
)

// TestEqualMissesNoField sets each field in turn. It finds new fields that Equal does
// not compare; their changes would never reach the kernel.
func TestEqualMissesNoField(t *testing.T) {
	eachField(t, (*tracker.ServicePort).Equal)
	eachField(t, (*tracker.Endpoint).Equal)
	eachField(t, func(a, b *tracker.NodeInfo) bool { return a.Equal(*b) })
}

func eachField[T any](t *testing.T, equal func(a, b *T) bool) {
	t.Helper()
	var zero T
	kind := reflect.TypeOf(zero)
	for i := range kind.NumField() {
		field := kind.Field(i)
		var a, b T
		v := reflect.ValueOf(&a).Elem().Field(i)
		switch field.Type {
		case reflect.TypeFor[tracker.Key]():
			v.Set(reflect.ValueOf(key("svc", "http", tracker.IPv4)))
		case reflect.TypeFor[tracker.Extension]():
			v.Set(reflect.ValueOf(color("red")))
		case reflect.TypeFor[netip.Addr]():
			v.Set(reflect.ValueOf(addr("10.0.0.1")))
		case reflect.TypeFor[time.Time]():
			v.Set(reflect.ValueOf(time.Unix(1, 0)))
		case reflect.TypeFor[netip.AddrPort]():
			v.Set(reflect.ValueOf(netip.MustParseAddrPort("10.0.0.1:80")))
		default:
			switch v.Kind() {
			case reflect.Bool:
				v.SetBool(true)
			case reflect.Uint8, reflect.Uint16:
				v.SetUint(1)
			case reflect.Int, reflect.Int64:
				v.SetInt(1)
			case reflect.String:
				v.SetString("x")
			case reflect.Slice:
				v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			default:
				t.Fatalf("%v: this test needs a value for the type", field)
			}
		}
		if equal(&a, &b) || equal(&b, &a) {
			t.Errorf("%v.%s is not compared", kind, field.Name)
		}
		b = a
		if !equal(&a, &b) {
			t.Errorf("%v.%s is not equal to itself", kind, field.Name)
		}
	}
}

func TestEqualNil(t *testing.T) {
	var p *tracker.ServicePort
	var e *tracker.Endpoint
	if !p.Equal(nil) || p.Equal(&tracker.ServicePort{}) || !e.Equal(nil) || e.Equal(&tracker.Endpoint{}) {
		t.Error("nil")
	}
}

func TestStrings(t *testing.T) {
	k := key("svc", "http", tracker.IPv6)
	unnamed := key("svc", "", tracker.IPv4)
	for _, tt := range [][2]string{
		{k.String(), "ns/svc:http/TCP/IPv6"},
		{k.ServicePortName.String(), "ns/svc:http"},
		{unnamed.ServicePortName.String(), "ns/svc"},
		{(&tracker.ServicePort{Key: k, ClusterIP: addr("fd00::1"), Port: 80}).String(), "[fd00::1]:80/TCP"},
		{(&tracker.ServicePort{Key: tracker.Key{ServicePortName: tracker.ServicePortName{Protocol: v1.ProtocolUDP}}, ClusterIP: addr("10.96.0.1"), Port: 53}).String(), "10.96.0.1:53/UDP"},
		{tracker.Family(0).String(), "none"},
		{tracker.FamilyOf(addr("::ffff:10.0.0.1")).String(), "IPv4"},
		{tracker.FamilyOf(netip.Addr{}).String(), "none"},
	} {
		if tt[0] != tt[1] {
			t.Errorf("got %s, want %s", tt[0], tt[1])
		}
	}
}

// TestNilElements passes nil where a caller may by mistake.
func TestNilElements(t *testing.T) {
	tr := newSynced(t, tracker.Config{})
	tr.Notify(nil)
	if tr.SetService(nil) || tr.SetSlice(nil) || !tr.SetService(service("ns", "svc", "10.96.0.1")) {
		t.Error("nil is a change, or nothing is after it")
	}
}

func TestNodeInfoOf(t *testing.T) {
	type addrs = []v1.NodeAddress
	const in, ex = v1.NodeInternalIP, v1.NodeExternalIP
	for _, c := range []struct {
		name string
		in   addrs
		want []string
	}{
		{"none", nil, nil},
		{"one", addrs{{Type: in, Address: "192.0.2.1"}}, []string{"192.0.2.1"}},
		{"the first of each family", addrs{
			{Type: v1.NodeHostName, Address: "192.0.2.9"},
			{Type: in, Address: "2001:db8::1"},
			{Type: in, Address: "192.0.2.1"},
			{Type: in, Address: "192.0.2.2"},
			{Type: in, Address: "2001:db8::2"},
		}, []string{"2001:db8::1", "192.0.2.1"}},
		{"internal before external", addrs{
			{Type: ex, Address: "198.51.100.1"}, {Type: in, Address: "192.0.2.1"}, {Type: ex, Address: "2001:db8::1"},
		}, []string{"192.0.2.1", "2001:db8::1"}},
		{"mapped", addrs{{Type: in, Address: "::ffff:192.0.2.1"}}, []string{"192.0.2.1"}},
		{"bad ones", addrs{{Type: in, Address: "node-a"}, {Type: in}, {Type: in, Address: "fe80::1%eth0"}, {Type: ex, Address: "192.0.2.1"}}, []string{"192.0.2.1"}},
	} {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"topology.kubernetes.io/zone": "z"}}}
		n.Status.Addresses = c.in
		want := tracker.NodeInfo{Name: "n", Zone: "z"}
		for _, a := range c.want {
			want.Addresses = append(want.Addresses, netip.MustParseAddr(a))
		}
		if got := tracker.NodeInfoOf(n); !got.Equal(want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, want)
		}
	}
	if got := tracker.NodeInfoOf(nil); !got.Equal(tracker.NodeInfo{}) {
		t.Errorf("nil: %+v", got)
	}
}
