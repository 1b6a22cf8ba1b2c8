package annotations

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/ruleset"
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
		scheduler, forwarding, limit string
		want                         tracker.Extension
		warnings                     int
	}{
		{"", "", "", nil, 0},
		{"lc", "", "", Server{Scheduler: "lc"}, 0},
		{"mh, port", "", "", Server{Scheduler: "mh", Port: true}, 0},
		{"rr,one-packet", "direct", "", Server{Scheduler: "rr", OnePacket: true, Forwarding: "direct"}, 0},
		{"", "tunnel", "1m30s", Server{Forwarding: "tunnel", DrainLimit: 90 * time.Second}, 0},
		{"", "gre", "", Server{Forwarding: "gre"}, 0},
		{"", "", "1s", Server{DrainLimit: time.Second}, 0},
		{"rr,often", "far", "soon", nil, 3},
		{",port", "", "", nil, 1},
		{"averyveryverylongname", "", "0s", nil, 2},
		{"", "", "-1h", nil, 1},
		{"", "", "0.000000000000000000001h", nil, 1},
	} {
		s, p := &v1.Service{}, &tracker.ServicePort{}
		s.Annotations = map[string]string{Scheduler: c.scheduler, Forwarding: c.forwarding, DrainLimit: c.limit}
		if warned := count(t, allowing(t, Known()...).OnService(s, nil, p)); p.Ext != c.want || warned != c.warnings {
			t.Errorf("%q, %q, %q: %v, %d warnings", c.scheduler, c.forwarding, c.limit, p.Ext, warned)
		}
	}
}

// TestPortRangesExtendPorts reads the annotation for a Service with the ports sip, rtp and one
// without a name.
func TestPortRangesExtendPorts(t *testing.T) {
	const sip, rtp, unnamed = "sip 5060", "rtp 10000", " 30000"
	for _, c := range []struct {
		value    string
		want     map[string][3]uint16 // the ports that are ranges: first, last and target
		warnings string               // a part of the warnings, or "" if there must be none
	}{
		{"", nil, ""},
		{"rtp=10000-20000", map[string][3]uint16{rtp: {10000, 20000, 10000}}, ""},
		{"rtp=10000-20000, sip = 5060 - 5061 ,", map[string][3]uint16{rtp: {10000, 20000, 10000}, sip: {5060, 5061, 5060}}, ""},
		{"rtp=10000-20000:30000", map[string][3]uint16{rtp: {10000, 20000, 30000}}, ""},
		{"rtp=9000-10000:1", map[string][3]uint16{rtp: {9000, 10000, 1}}, ""},
		{"sip=all", map[string][3]uint16{sip: {1, 65535, 1}}, ""},
		{"30000-30100,rtp=all:1", map[string][3]uint16{unnamed: {30000, 30100, 30000}, rtp: {1, 65535, 1}}, ""},
		{"rtp=10000-65535:20000", nil, `"10000-65535:20000" is not a range of ports`},
		{"rtp=all:2", nil, "is not a range"},
		{"rtp=0-10000", nil, "is not a range"},
		{"rtp=10000-10000", nil, "is not a range"},
		{"rtp=20000-10000", nil, "is not a range"},
		{"rtp=10000", nil, "is not a range"},
		{"rtp=10000-70000", nil, "is not a range"},
		{"rtp=10000-20000:0", nil, "is not a range"},
		{"rtp=10000-20000:", nil, "is not a range"},
		{"rtp=10000-20000-30000", nil, "is not a range"},
		{"rtp=", nil, "is not a range"},
		{"rtp=10001-20000,sip=5060-5061", map[string][3]uint16{sip: {5060, 5061, 5060}}, "ports 10001 to 20000 do not contain the port itself, 10000"},
		{"rtp=10000-11000,rtp=12000-13000", nil, "it has 2 ranges for the port"},
		{"rpt=10000-20000,sip=5060-5061", map[string][3]uint16{sip: {5060, 5061, 5060}}, `the Service has no port "rpt"`},
		{"rtp=10000-20000" + strings.Repeat(" ", 4096), nil, "it has more than 4096 bytes"},
	} {
		ranges, warnings := readRanges(t, allowing(t, "port-ranges"), c.value, nil)
		for _, name := range []string{sip, rtp, unnamed} {
			if ranges[name] != c.want[name] {
				t.Errorf("%q: %s is %v, want %v", c.value, name, ranges[name], c.want[name])
			}
		}
		if c.warnings == "" && warnings != "" || !strings.Contains(warnings, c.warnings) {
			t.Errorf("%q: warnings %q, want %q", c.value, warnings, c.warnings)
		}
	}
}

// TestPortRangesAreBounded checks that only an allowed annotation extends ports, only as far as the
// data plane has ranges, and never at addresses that the Service's author chose.
func TestPortRangesAreBounded(t *testing.T) {
	external := func(p *tracker.ServicePort) { p.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.1")} }
	for _, c := range []struct {
		allowed  []string
		ranges   ruleset.PortRanges
		value    string
		edit     func(*tracker.ServicePort)
		extended bool
		warning  string
	}{
		{[]string{"port-ranges"}, ruleset.PortRangesShifted, "rtp=10000-20000:1", nil, true, ""},
		{[]string{"port-ranges"}, ruleset.PortRangesKept, "rtp=10000-20000", nil, true, ""},
		{[]string{"port-ranges"}, ruleset.PortRangesKept, "rtp=10000-20000:10000", nil, true, ""},
		{[]string{"port-ranges"}, ruleset.PortRangesKept, "rtp=10000-20000:1", nil, false, "this mode cannot shift a range"},
		{[]string{"port-ranges"}, ruleset.PortRangesNone, "rtp=10000-20000", nil, false, "this mode has no ranges of ports"},
		{[]string{"port-ranges"}, ruleset.PortRangesShifted, "rtp=10000-20000", external, false, "the Service has external IPs"},
		{[]string{"balance"}, ruleset.PortRangesShifted, "rtp=10000-20000", nil, false, "it is not allowed"},
		{[]string{"port-ranges"}, ruleset.PortRangesShifted, "rtp=10000-20000" + strings.Repeat(",other=1-2", 7), nil, true, "no port"},
		{[]string{"port-ranges"}, ruleset.PortRangesShifted, "rtp=10000-20000" + strings.Repeat(",other=1-2", 8), nil, false, "it has 9 ranges, at most 8 are possible"},
	} {
		r, err := NewReader(c.allowed, c.ranges)
		if err != nil {
			t.Fatal(err)
		}
		ranges, warnings := readRanges(t, r, c.value, c.edit)
		if extended := len(ranges) != 0; extended != c.extended {
			t.Errorf("%q, allowed %v, %v: %v", c.value, c.allowed, c.ranges, ranges)
		}
		if (warnings == "") != (c.warning == "") || !strings.Contains(warnings, c.warning) {
			t.Errorf("%q, allowed %v, %v: warnings %q, want %q", c.value, c.allowed, c.ranges, warnings, c.warning)
		}
	}
}

// TestChangedRangesAreRead reads different values with one reader.
func TestChangedRangesAreRead(t *testing.T) {
	r := allowing(t, "port-ranges")
	for _, last := range []uint16{20000, 20001, 0, 20001, 20002} {
		value, want := "", [3]uint16{}
		if last != 0 {
			value, want = fmt.Sprintf("rtp=10000-%d", last), [3]uint16{10000, last, 10000}
		}
		if ranges, warnings := readRanges(t, r, value, nil); ranges["rtp 10000"] != want || warnings != "" {
			t.Errorf("%q: %v, warnings %q", value, ranges, warnings)
		}
	}
}

// readRanges gives a Service with three ports the annotation PortRanges. It returns the first, last
// and target port of those that are ranges, by name and number, and all warnings. edit may be nil.
func readRanges(t *testing.T, r *Reader, value string, edit func(*tracker.ServicePort)) (map[string][3]uint16, string) {
	t.Helper()
	s := &v1.Service{}
	s.Annotations = map[string]string{PortRanges: value}
	s.Spec.Ports = []v1.ServicePort{{Name: "sip", Port: 5060}, {Name: "rtp", Port: 10000}, {Port: 30000}}
	ranges, warnings := map[string][3]uint16{}, ""
	for i := range s.Spec.Ports {
		of := &s.Spec.Ports[i]
		p := &tracker.ServicePort{Key: tracker.Key{ServicePortName: tracker.ServicePortName{Port: of.Name}}, Port: uint16(of.Port)}
		if edit != nil {
			edit(p)
		}
		err := r.OnService(s, of, p)
		count(t, err) // fails if the port would not be served
		if err != nil {
			warnings += err.Error() + "\n"
		}
		if p.LastPort != 0 {
			ranges[of.Name+" "+strconv.Itoa(int(of.Port))] = [3]uint16{p.Port, p.LastPort, p.TargetPort}
		} else if p.Port != uint16(of.Port) || p.TargetPort != 0 {
			t.Errorf("%q: port %d is %d with target %d", value, of.Port, p.Port, p.TargetPort)
		}
	}
	return ranges, warnings
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
			if err := r.OnEndpoint(s, &s.Endpoints[at], e); err != nil {
				t.Fatal(err)
			}
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
	r, err := NewReader(names, ruleset.PortRangesShifted)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// count returns the number of ignored annotations in a warning. Any other error is fatal.
func count(t testing.TB, err error) int {
	t.Helper()
	var w *tracker.WarningError
	if err != nil && !errors.As(err, &w) {
		t.Fatal(err)
	}
	if err == nil {
		return 0
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
	if _, err := NewReader([]string{"bogus"}, ruleset.PortRangesNone); err == nil {
		t.Error("an unknown annotation is accepted")
	}
}

func FuzzWarningsAreBounded(f *testing.F) {
	f.Add("10.0.0.1=3, fd00::1 = 65535", "source", "65535", "7", "p=1-2:3")
	f.Add(strings.Repeat("x", 1<<17), strings.Repeat("\x1b", 1<<17), strings.Repeat("9", 1<<17), "-1", strings.Repeat("x=,", 1000))
	f.Fuzz(func(t *testing.T, weights, balance, slots, weight, ranges string) {
		r := allowing(t, Known()...)
		s := &v1.Service{}
		s.Annotations = map[string]string{Balance: balance, Slots: slots, PortRanges: ranges}
		s.Spec.Ports = []v1.ServicePort{{Name: "p", Port: 1}}
		short := func(err error) {
			if err != nil && len(err.Error()) > 1500 {
				t.Errorf("a warning of %d bytes", len(err.Error()))
			}
		}
		port := &tracker.ServicePort{Key: tracker.Key{ServicePortName: tracker.ServicePortName{Port: "p"}}, Port: 1}
		short(r.OnService(s, &s.Spec.Ports[0], port))
		if end := int(cmp.Or(port.TargetPort, port.Port)) + int(port.LastPort) - int(port.Port); port.IsRange() && (port.Port != 1 || end > 65535) {
			t.Errorf("ports %d to %d with targets from %d", port.Port, port.LastPort, port.TargetPort)
		}
		es := &discovery.EndpointSlice{Endpoints: make([]discovery.Endpoint, 2)}
		es.Annotations = map[string]string{Weights: weights, Weight: weight}
		for i := range es.Endpoints {
			short(r.OnEndpoint(es, &es.Endpoints[i], &tracker.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:80")}))
		}
	})
}
