package endpointslice_test

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/endpointslice"
)

func ptr[T any](v T) *T { return &v }

func named(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "ns", Name: name}
}

// slice returns an IPv4 slice with the port "http", 80.
func slice(name, owner string, eps ...discovery.Endpoint) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name,
			Labels: map[string]string{discovery.LabelServiceName: owner},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{port("http", 80)},
		Endpoints:   eps,
	}
}

func port(name string, number int32) discovery.EndpointPort {
	return discovery.EndpointPort{Name: &name, Protocol: ptr(v1.ProtocolTCP), Port: &number}
}

func ep(addrs ...string) discovery.Endpoint { return discovery.Endpoint{Addresses: addrs} }

func conditions(e discovery.Endpoint, ready, serving, terminating *bool) discovery.Endpoint {
	e.Conditions = discovery.EndpointConditions{Ready: ready, Serving: serving, Terminating: terminating}
	return e
}

func onNode(e discovery.Endpoint, node string) discovery.Endpoint {
	e.NodeName = &node
	return e
}

func terminating(e discovery.Endpoint) discovery.Endpoint {
	return conditions(e, ptr(false), ptr(true), ptr(true))
}

type cache = endpointslice.Cache[endpointslice.Endpoint]

// newCache returns a cache and what it leaves out, each as "reason: text".
func newCache() (*cache, *[]string) {
	var out []string
	return endpointslice.New(endpointslice.Plain(func(_ *discovery.EndpointSlice, left []endpointslice.LeftOut) {
		for _, l := range left {
			out = append(out, fmt.Sprintf("%s: %v", l.Reason, l.Err))
		}
	})), &out
}

// dump renders a Service's ports: "http/TCP/IPv4 10.0.0.1:80 ...", with the
// endpoint's node, and marks for endpoints that are not simply ready.
func dump(ports []endpointslice.Port[endpointslice.Endpoint]) string {
	var out []string
	for _, p := range ports {
		line := fmt.Sprintf("%s/%s/%s", p.Name, p.Protocol, p.Type)
		for _, e := range p.Endpoints {
			line += " " + e.Addr.String()
			if e.Node != "" {
				line += "@" + e.Node
			}
			if !e.Ready {
				line += "-unready"
			}
			if !e.Serving {
				line += "-unserving"
			}
			if e.Terminating {
				line += "-terminating"
			}
		}
		out = append(out, line)
	}
	return strings.Join(out, "; ")
}

func TestSliceContents(t *testing.T) {
	v6 := func(s *discovery.EndpointSlice) *discovery.EndpointSlice {
		s.AddressType = discovery.AddressTypeIPv6
		return s
	}
	ports := func(s *discovery.EndpointSlice, p ...discovery.EndpointPort) *discovery.EndpointSlice {
		s.Ports = p
		return s
	}
	edit := func(s *discovery.EndpointSlice, f func(*discovery.EndpointSlice)) *discovery.EndpointSlice {
		f(s)
		return s
	}
	for _, tt := range []struct {
		name    string
		slice   *discovery.EndpointSlice
		want    string
		reports string // a part of what is reported, "" for nothing
	}{
		{
			name: "sorted by number, not by text", slice: slice("s", "svc", ep("10.0.0.10"), ep("10.0.0.9")),
			want: "http/TCP/IPv4 10.0.0.9:80 10.0.0.10:80",
		},
		{name: "only the first address", slice: slice("s", "svc", ep("10.0.0.1", "10.0.0.2")), want: "http/TCP/IPv4 10.0.0.1:80", reports: "ProxyFurtherAddress: endpoint 0 has 2 addresses"},
		{name: "no address", slice: slice("s", "svc", ep(), ep("10.0.0.1")), want: "http/TCP/IPv4 10.0.0.1:80", reports: "ProxyAddress: endpoint 0 has no address"},
		{name: "leading zeros", slice: slice("s", "svc", ep("010.000.0.041")), want: "http/TCP/IPv4 10.0.0.41:80"},
		{name: "malformed address", slice: slice("s", "svc", ep("10.0.0.x"), ep("10.0.0.1")), want: "http/TCP/IPv4 10.0.0.1:80", reports: "not an IP address"},
		{name: "many malformed addresses", slice: slice("s", "svc", ep("x"), ep("y")), reports: `ProxyAddress: endpoint 0: "x" is not an IP address; ProxyAddress: endpoint 1: "y" is`},
		{name: "IPv6 in an IPv4 slice", slice: slice("s", "svc", ep("fd00::1"), ep("10.0.0.1")), want: "http/TCP/IPv4 10.0.0.1:80", reports: "ProxyFamilyMismatch: endpoint 0: fd00::1 in a slice of type IPv4"},
		{name: "IPv4 in an IPv6 slice", slice: v6(slice("s", "svc", ep("fd00::1"), ep("10.0.0.1"))), want: "http/TCP/IPv6 [fd00::1]:80", reports: "in a slice of type IPv6"},
		{name: "IPv4-mapped is IPv4", slice: slice("s", "svc", ep("::ffff:10.0.0.1")), want: "http/TCP/IPv4 10.0.0.1:80"},
		{name: "zone", slice: v6(slice("s", "svc", ep("fe80::1%eth0"))), reports: "with a zone"},
		{name: "unspecified", slice: slice("s", "svc", ep("0.0.0.0")), reports: "ProxyAddress: endpoint 0: "},
		{name: "broadcast", slice: slice("s", "svc", ep("255.255.255.255")), reports: "ProxyAddress: endpoint 0: "},
		{name: "multicast", slice: slice("s", "svc", ep("224.0.0.1")), reports: "ProxyAddress: endpoint 0: "},
		{name: "FQDN", slice: edit(slice("s", "svc", ep("example.com")), func(s *discovery.EndpointSlice) { s.AddressType = discovery.AddressTypeFQDN }), reports: `ProxyAddressType: address type "FQDN" is not supported`},
		{name: "unknown type", slice: edit(slice("s", "svc", ep("10.0.0.1")), func(s *discovery.EndpointSlice) { s.AddressType = "IPX" }), reports: `address type "IPX" is not supported`},
		{name: "no label", slice: edit(slice("s", "svc", ep("10.0.0.1")), func(s *discovery.EndpointSlice) { s.Labels = nil }), reports: "ProxyNoService: no label"},
		{name: "no namespace", slice: edit(slice("s", "svc", ep("10.0.0.1")), func(s *discovery.EndpointSlice) { s.Namespace = "" }), reports: "missing name"},
		{name: "no name", slice: slice("", "svc", ep("10.0.0.1")), reports: "missing name"},
		{name: "nil", reports: "ProxyInvalidObject: nil EndpointSlice"},

		{name: "no ports", slice: ports(slice("s", "svc", ep("10.0.0.1")))},
		{
			name: "nil port name", slice: ports(slice("s", "svc", ep("10.0.0.1")), discovery.EndpointPort{Port: ptr(int32(80))}, port("a", 1)),
			want: "a/TCP/IPv4 10.0.0.1:1", reports: "ProxyPortName: port 0 has a nil name",
		},
		{name: "unnamed port", slice: ports(slice("s", "svc", ep("10.0.0.1")), port("", 80)), want: "/TCP/IPv4 10.0.0.1:80"},
		{name: "nil and zero port", slice: ports(slice("s", "svc", ep("10.0.0.1")), discovery.EndpointPort{Name: ptr("n")}, port("z", 0)), reports: `ProxyNoPortNumber: port "n" has no number; ProxyNoPortNumber: port "z" has`},
		{name: "port too large", slice: ports(slice("s", "svc", ep("10.0.0.1")), port("a", 65536), port("b", 65535)), want: "b/TCP/IPv4 10.0.0.1:65535", reports: `ProxyPortNumber: port "a": number 65536`},
		{name: "negative port", slice: ports(slice("s", "svc", ep("10.0.0.1")), port("a", -1)), reports: "-1"},
		{name: "nil protocol is TCP", slice: ports(slice("s", "svc", ep("10.0.0.1")), discovery.EndpointPort{Name: ptr("a"), Port: ptr(int32(1))}), want: "a/TCP/IPv4 10.0.0.1:1"},
		{
			name: "protocols", slice: ports(slice("s", "svc", ep("10.0.0.1")),
				discovery.EndpointPort{Name: ptr("a"), Port: ptr(int32(1)), Protocol: ptr(v1.ProtocolUDP)},
				discovery.EndpointPort{Name: ptr("a"), Port: ptr(int32(1)), Protocol: ptr(v1.ProtocolSCTP)},
				discovery.EndpointPort{Name: ptr("a"), Port: ptr(int32(1)), Protocol: ptr(v1.ProtocolTCP)}),
			want: "a/SCTP/IPv4 10.0.0.1:1; a/TCP/IPv4 10.0.0.1:1; a/UDP/IPv4 10.0.0.1:1",
		},
		{name: "unknown protocol", slice: ports(slice("s", "svc", ep("10.0.0.1")),
			discovery.EndpointPort{Name: ptr("a"), Port: ptr(int32(1)), Protocol: ptr(v1.Protocol("tcp"))}), reports: `ProxyProtocol: port "a": unknown protocol "tcp"`},
		{
			name: "one name, two numbers", slice: ports(slice("s", "svc", ep("10.0.0.2"), ep("10.0.0.1")), port("a", 2), port("a", 1), port("a", 2)),
			want: "a/TCP/IPv4 10.0.0.1:1 10.0.0.1:2 10.0.0.2:1 10.0.0.2:2",
		},

		{name: "nil conditions", slice: slice("s", "svc", conditions(ep("10.0.0.1"), nil, nil, nil)), want: "http/TCP/IPv4 10.0.0.1:80"},
		{
			name: "all conditions", slice: slice("s", "svc", conditions(ep("10.0.0.1"), ptr(false), ptr(false), ptr(true))),
			want: "http/TCP/IPv4 10.0.0.1:80-unready-unserving-terminating",
		},
		{
			name: "duplicate prefers the one not terminating", slice: slice("s", "svc", onNode(ep("10.0.0.1"), "b"), onNode(terminating(ep("10.0.0.1")), "a")),
			want: "http/TCP/IPv4 10.0.0.1:80@b", reports: "ProxyDuplicate: endpoint ",
		},
		{
			name: "duplicate then prefers the ready one", slice: slice("s", "svc", onNode(conditions(ep("10.0.0.1"), ptr(false), nil, nil), "a"), onNode(ep("10.0.0.1"), "b")),
			want: "http/TCP/IPv4 10.0.0.1:80@b", reports: "ProxyDuplicate: endpoint ",
		},
		{
			name: "duplicate then prefers the first node", slice: slice("s", "svc", onNode(ep("10.0.0.1"), "b"), onNode(ep("10.0.0.01"), "a")),
			want: "http/TCP/IPv4 10.0.0.1:80@a", reports: "ProxyDuplicate: endpoint ",
		},
		{
			name: "duplicate prefers the one with a node", slice: slice("s", "svc", ep("10.0.0.1"), onNode(ep("10.0.0.1"), "a")),
			want: "http/TCP/IPv4 10.0.0.1:80@a", reports: "ProxyDuplicate: endpoint ",
		},
		{
			name: "duplicate prefers the one with a node, listed first", slice: slice("s", "svc", onNode(ep("10.0.0.1"), "a"), ep("10.0.0.1")),
			want: "http/TCP/IPv4 10.0.0.1:80@a", reports: "ProxyDuplicate: endpoint ",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, left := newCache()
			if got := c.Set(tt.slice); got != (tt.want != "") {
				t.Errorf("Set() = %v", got)
			}
			c.Take()
			if got := dump(c.Ports(named("svc"))); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if all := strings.Join(*left, "; "); tt.reports == "" && all != "" || !strings.Contains(all, tt.reports) {
				t.Errorf("reported %q, want %q", all, tt.reports)
			}
		})
	}
}

func TestEndpointFields(t *testing.T) {
	c, _ := newCache()
	e := ep("10.0.0.1")
	e.NodeName, e.Zone = ptr("node"), ptr("zone")
	e.Hints = &discovery.EndpointHints{
		ForZones: []discovery.ForZone{{Name: "z2"}, {Name: "z1"}, {Name: "z2"}},
		ForNodes: []discovery.ForNode{{Name: "n1"}},
	}
	e2 := *e.DeepCopy()
	e2.Addresses[0] = "10.0.0.2"
	c.Set(slice("s", "svc", e, e2))
	got := c.Take()[0].New[0].Endpoints
	want := endpointslice.Endpoint{
		Addr: netip.MustParseAddrPort("10.0.0.1:80"), Node: "node", Zone: "zone",
		ForNodes: []string{"n1"}, ForZones: []string{"z1", "z2"}, Ready: true, Serving: true,
	}
	if !reflect.DeepEqual(*got[0], want) {
		t.Errorf("got %+v, want %+v", *got[0], want)
	}
	if &got[0].ForZones[0] != &got[1].ForZones[0] {
		t.Error("equal hints are not shared")
	}
}

// TestRewriteIsNoChange rewrites a slice in ways that do not change its endpoints.
func TestRewriteIsNoChange(t *testing.T) {
	base := func() *discovery.EndpointSlice {
		s := slice("s", "svc", onNode(ep("10.0.0.1"), "a"), onNode(terminating(ep("10.0.0.2")), "b"), onNode(ep("10.0.0.1"), "c"))
		s.Ports = append(s.Ports, port("b", 81))
		s.Endpoints[0].Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "x"}, {Name: "y"}}}
		return s
	}
	for name, edit := range map[string]func(*discovery.EndpointSlice){
		"nothing": func(*discovery.EndpointSlice) {},
		"metadata": func(s *discovery.EndpointSlice) {
			s.ResourceVersion, s.Generation, s.UID = "7", 3, "u"
			s.Annotations = map[string]string{"a": "b"}
			s.Labels["x"] = "y"
		},
		"order of endpoints": func(s *discovery.EndpointSlice) { slices.Reverse(s.Endpoints) },
		"order of ports":     func(s *discovery.EndpointSlice) { slices.Reverse(s.Ports) },
		"order of hints":     func(s *discovery.EndpointSlice) { slices.Reverse(s.Endpoints[0].Hints.ForZones) },
		"conditions spelt out": func(s *discovery.EndpointSlice) {
			s.Endpoints[0] = onNode(conditions(s.Endpoints[0], ptr(true), ptr(true), ptr(false)), "a")
		},
		"spelling of address": func(s *discovery.EndpointSlice) { s.Endpoints[1].Addresses = []string{"010.0.0.2", "10.9.9.9"} },
		"target, hostname": func(s *discovery.EndpointSlice) {
			s.Endpoints[1].Hostname = ptr("h")
			s.Endpoints[1].TargetRef = &v1.ObjectReference{Name: "pod"}
		},
		"empty hints":      func(s *discovery.EndpointSlice) { s.Endpoints[1].Hints = &discovery.EndpointHints{} },
		"appProtocol":      func(s *discovery.EndpointSlice) { s.Ports[0].AppProtocol = ptr("h2c") },
		"useless port":     func(s *discovery.EndpointSlice) { s.Ports = append(s.Ports, port("z", 0)) },
		"useless endpoint": func(s *discovery.EndpointSlice) { s.Endpoints = append(s.Endpoints, ep("nonsense")) },
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := newCache()
			c.Set(base())
			c.Take()
			before := c.Ports(named("svc"))
			s := base()
			edit(s)
			if c.Set(s) {
				t.Error("Set reports a change")
			}
			if got := c.Take(); got != nil {
				t.Errorf("Take() = %v", got)
			}
			if after := c.Ports(named("svc")); &after[0] != &before[0] {
				t.Error("unchanged ports got new memory")
			}
		})
	}
}

// TestFieldChangesAreReported changes one field of one endpoint. Only that endpoint
// may change.
func TestFieldChangesAreReported(t *testing.T) {
	base := func() *discovery.EndpointSlice { return slice("s", "svc", ep("10.0.0.1"), ep("10.0.0.2")) }
	for name, edit := range map[string]func(*discovery.EndpointSlice){
		"ready":       func(s *discovery.EndpointSlice) { s.Endpoints[1].Conditions.Ready = ptr(false) },
		"serving":     func(s *discovery.EndpointSlice) { s.Endpoints[1].Conditions.Serving = ptr(false) },
		"terminating": func(s *discovery.EndpointSlice) { s.Endpoints[1].Conditions.Terminating = ptr(true) },
		"node":        func(s *discovery.EndpointSlice) { s.Endpoints[1].NodeName = ptr("n") },
		"zone":        func(s *discovery.EndpointSlice) { s.Endpoints[1].Zone = ptr("z") },
		"zone hint": func(s *discovery.EndpointSlice) {
			s.Endpoints[1].Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "z"}}}
		},
		"node hint": func(s *discovery.EndpointSlice) {
			s.Endpoints[1].Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: "n"}}}
		},
		"address": func(s *discovery.EndpointSlice) { s.Endpoints[1].Addresses[0] = "10.0.0.3" },
		"removed": func(s *discovery.EndpointSlice) { s.Endpoints = s.Endpoints[:1] },
		"added":   func(s *discovery.EndpointSlice) { s.Endpoints = append(s.Endpoints, ep("10.0.0.0")) },
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := newCache()
			c.Set(base())
			first := c.Take()[0].New[0].Endpoints[0]
			s := base()
			edit(s)
			if !c.Set(s) {
				t.Error("Set reports no change")
			}
			got := c.Take()
			if len(got) != 1 {
				t.Fatalf("Take() = %v", got)
			}
			if !slices.Contains(got[0].New[0].Endpoints, first) {
				t.Error("an unchanged endpoint got a new pointer")
			}
			if !c.Set(base()) {
				t.Error("Set reports no change when the change is reverted")
			}
			c.Take()
			if got := dump(c.Ports(named("svc"))); got != "http/TCP/IPv4 10.0.0.1:80 10.0.0.2:80" {
				t.Error(got)
			}
		})
	}
	for name, edit := range map[string]func(*discovery.EndpointSlice){
		"port number":   func(s *discovery.EndpointSlice) { *s.Ports[0].Port = 81 },
		"port name":     func(s *discovery.EndpointSlice) { *s.Ports[0].Name = "x" },
		"port protocol": func(s *discovery.EndpointSlice) { *s.Ports[0].Protocol = v1.ProtocolUDP },
		"port added":    func(s *discovery.EndpointSlice) { s.Ports = append(s.Ports, port("b", 1)) },
		"ports removed": func(s *discovery.EndpointSlice) { s.Ports = nil },
		"owner":         func(s *discovery.EndpointSlice) { s.Labels[discovery.LabelServiceName] = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := newCache()
			c.Set(base())
			before := dump(c.Take()[0].New)
			s := base()
			edit(s)
			if !c.Set(s) || len(c.Take()) == 0 {
				t.Error("Set reports no change")
			}
			if dump(c.Ports(named("svc"))) == before {
				t.Error("Take returns no change")
			}
		})
	}
}

// TestManyDuplicatesAreMergedStably uses more slices than a small sort, which is
// stable by accident, would need.
func TestManyDuplicatesAreMergedStably(t *testing.T) {
	c, _ := newCache()
	for i := range 50 {
		name := fmt.Sprintf("s%02d", i*37%50)
		s := slice(name, "svc", onNode(ep("10.0.0.1"), "on-"+name), onNode(ep("10.0.0.2"), "on-"+name))
		s.Ports = append(s.Ports, port("a", 1), port("z", 9))
		c.Set(s)
	}
	c.Take()
	want := "a/TCP/IPv4 10.0.0.1:1@on-s00 10.0.0.2:1@on-s00; " +
		"http/TCP/IPv4 10.0.0.1:80@on-s00 10.0.0.2:80@on-s00; " +
		"z/TCP/IPv4 10.0.0.1:9@on-s00 10.0.0.2:9@on-s00"
	if got := dump(c.Ports(named("svc"))); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestMakeErrorSkipsEndpoint(t *testing.T) {
	broken := errors.New("broken")
	config := endpointslice.Plain(nil)
	plain := config.Make
	config.Make = func(s *discovery.EndpointSlice, raw *discovery.Endpoint, from, e *endpointslice.Endpoint) error {
		if err := plain(s, raw, from, e); err != nil {
			return err
		}
		if raw.Hostname != nil {
			return broken
		}
		return nil
	}
	var reported []endpointslice.LeftOut
	config.Report = func(_ *discovery.EndpointSlice, left []endpointslice.LeftOut) { reported = left }
	c := endpointslice.New(config)
	bad := ep("10.0.0.1")
	bad.Hostname = ptr("x")
	c.Set(slice("s", "svc", bad, ep("10.0.0.2")))
	c.Take()
	if got := dump(c.Ports(named("svc"))); got != "http/TCP/IPv4 10.0.0.2:80" {
		t.Error(got)
	}
	if len(reported) != 1 || reported[0].Reason != endpointslice.ReasonHookFailed || !errors.Is(reported[0].Err, broken) {
		t.Error(reported)
	}
	c.Set(slice("s", "svc", bad))
	c.Take()
	if got := dump(c.Ports(named("svc"))); got != "" {
		t.Error(got)
	}
}

func TestNewPanicsOnIncompleteConfig(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	endpointslice.New(endpointslice.Config[int]{})
}

func TestParseAddr(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1":                   "10.0.0.1",
		"172.30.0.041":               "172.30.0.41",
		"000010.00.000.255":          "10.0.0.255",
		"10.0.0.256":                 "",
		"10.0.0.0256":                "",
		"10.0.0":                     "",
		"10.0.0.1.2":                 "",
		"10.0.0.":                    "",
		"10..0.1":                    "",
		"10.0.0.1 ":                  "",
		"10.0.0.-1":                  "",
		"0x10.0.0.1":                 "",
		"99999999999999999999.0.0.1": "",
		"":                           "",
		"fd00::1":                    "fd00::1",
		"FD00:0:0::0001":             "fd00::1",
		"fd00::1%eth0":               "",
		"2001:db8::00001":            "2001:db8::1",
		"00000:00::0ffff":            "::ffff",
		"fd00::010000":               "",
		"fe80::00001%eth0":           "",
		"::ffff:10.0.0.1":            "10.0.0.1",
		"::ffff:10.0.0.01":           "10.0.0.1",
		"fd00::10.0.0.01":            "fd00::a00:1",
		"fd00:::10.0.0.01":           "",
		"example.com":                "",
	} {
		got, err := endpointslice.ParseAddr(in)
		if (err == nil) != (want != "") || err == nil && got.String() != want {
			t.Errorf("ParseAddr(%q) = %v, %v, want %q", in, got, err, want)
		}
	}
}
