package tracker_test

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// events collects the events sent to an EventSink.
type events []string

func (e *events) Event(ref v1.ObjectReference, warning bool, reason, message string) {
	*e = append(*e, fmt.Sprintf("%s %s/%s %v %s: %s", ref.Kind, ref.Namespace, ref.Name, warning, reason, message))
}

func newServices(t *testing.T, c tracker.Config) (*tracker.ServiceChangeTracker, *events) {
	t.Helper()
	var e events
	c.Events = &e
	s := must.Get(tracker.NewServiceChangeTracker(c))(t)
	return s, &e
}

// dualStack returns a Service with both families, IPv4 first.
func dualStack() *v1.Service {
	s := service("ns", "svc", "10.96.0.1")
	s.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	s.Spec.ClusterIPs = []string{"10.96.0.1", "fd00::1"}
	return s
}

func prefixes(s ...string) (out []netip.Prefix) {
	for _, s := range s {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func addrs(s ...string) (out []netip.Addr) {
	for _, s := range s {
		out = append(out, addr(s))
	}
	return out
}

// TestServicePorts edits a plain dual-stack Service and checks the resulting ports.
func TestServicePorts(t *testing.T) {
	type edit = func(*v1.Service)
	type ports = map[tracker.Key]*tracker.ServicePort
	four, six := key("svc", "http", tracker.IPv4), key("svc", "http", tracker.IPv6)
	plain := func() ports {
		return ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80},
		}
	}
	both := func(f func(*tracker.ServicePort)) ports {
		p := plain()
		f(p[four])
		f(p[six])
		return p
	}
	only := func(k tracker.Key) ports { return ports{k: plain()[k]} }
	local := v1.ServiceInternalTrafficPolicyLocal
	for _, tt := range []struct {
		name    string
		edit    edit
		want    ports
		reports []string // parts of the events, in order
	}{
		{name: "plain", edit: func(s *v1.Service) {}, want: plain()},

		// Services that are not forwarded.
		{name: "headless", edit: func(s *v1.Service) { s.Spec.ClusterIP = "None"; s.Spec.ClusterIPs = []string{"None"} }},
		{name: "no cluster IP", edit: func(s *v1.Service) { s.Spec.ClusterIP = ""; s.Spec.ClusterIPs = nil }},
		{name: "clusterIPs alone", edit: func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.IPFamilies = "", nil }, reports: []string{"clusterIPs without clusterIP"}},
		{name: "clusterIPs without clusterIP", edit: func(s *v1.Service) { s.Spec.ClusterIP = "" }, reports: []string{"clusterIPs without clusterIP"}},
		{name: "headless by clusterIPs alone", edit: func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", []string{"None"} }},
		{name: "ExternalName with a cluster IP", edit: func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeExternalName }},
		{name: "no ports", edit: func(s *v1.Service) { s.Spec.Ports = nil }},
		{name: "no name", edit: func(s *v1.Service) { s.Name = "" }},
		{name: "no namespace", edit: func(s *v1.Service) { s.Namespace = "" }, reports: []string{"missing name"}},
		{name: "headless label", edit: func(s *v1.Service) { s.Labels = map[string]string{v1.IsHeadlessService: ""} }},
		{name: "another proxy", edit: func(s *v1.Service) { s.Labels = map[string]string{tracker.LabelServiceProxyName: "other"} }},
		{name: "another proxy without a name", edit: func(s *v1.Service) { s.Labels = map[string]string{tracker.LabelServiceProxyName: ""} }},

		// Families.
		{name: "IPv6 first", edit: func(s *v1.Service) {
			slices.Reverse(s.Spec.IPFamilies)
			slices.Reverse(s.Spec.ClusterIPs)
			s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
		}, want: plain()},
		{name: "IPv6 only", edit: func(s *v1.Service) {
			s.Spec.IPFamilies, s.Spec.ClusterIPs, s.Spec.ClusterIP = s.Spec.IPFamilies[1:], s.Spec.ClusterIPs[1:], "fd00::1"
		}, want: only(six)},
		{name: "no ipFamilies: clusterIP only", edit: func(s *v1.Service) { s.Spec.IPFamilies = nil }, want: only(four)},
		{name: "no clusterIPs", edit: func(s *v1.Service) { s.Spec.IPFamilies, s.Spec.ClusterIPs = s.Spec.IPFamilies[:1], nil }, want: only(four)},
		{name: "more families than addresses", edit: func(s *v1.Service) { s.Spec.ClusterIPs = s.Spec.ClusterIPs[:1] }, want: only(four), reports: []string{"2 ipFamilies but 1"}},
		{name: "more addresses than families", edit: func(s *v1.Service) { s.Spec.IPFamilies = s.Spec.IPFamilies[:1] }, want: only(four), reports: []string{"its entry in ipFamilies"}},
		{name: "families in another order than addresses", edit: func(s *v1.Service) { slices.Reverse(s.Spec.IPFamilies) }, reports: []string{"its entry in ipFamilies", "its entry in ipFamilies"}},
		{name: "two of one family", edit: func(s *v1.Service) {
			s.Spec.IPFamilies[1], s.Spec.ClusterIPs[1] = v1.IPv4Protocol, "10.96.0.2"
		}, want: only(four), reports: []string{"another IPv4"}},
		{name: "malformed cluster IP", edit: func(s *v1.Service) { s.Spec.ClusterIPs[0] = "10.96.0.300" }, want: only(six), reports: []string{"10.96.0.300"}},
		{name: "unspecified cluster IP", edit: func(s *v1.Service) { s.Spec.ClusterIPs[1] = "::" }, want: only(four), reports: []string{"not a unicast address"}},
		{name: "leading zeros", edit: func(s *v1.Service) { s.Spec.ClusterIPs[0] = "010.096.000.001" }, want: plain()},

		// Ports.
		{name: "nameless port, default protocol", edit: func(s *v1.Service) { s.Spec.Ports[0] = v1.ServicePort{Port: 65535} }, want: ports{
			key("svc", "", 4): {Key: key("svc", "", 4), ClusterIP: addr("10.96.0.1"), Port: 65535},
			key("svc", "", 6): {Key: key("svc", "", 6), ClusterIP: addr("fd00::1"), Port: 65535},
		}},
		{name: "unusable ports", edit: func(s *v1.Service) {
			s.Spec.Ports = append([]v1.ServicePort{{Name: "a"}, {Name: "b", Port: -1}, {Name: "c", Port: 65536}, {Name: "d", Port: 1, Protocol: "ICMP"}}, s.Spec.Ports...)
		}, want: plain(), reports: []string{`"a": number 0`, "-1", "65536", "ICMP"}},
		{name: "repeated name and number", edit: func(s *v1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "http", Port: 81}, v1.ServicePort{Name: "https", Port: 80})
		}, want: plain(), reports: []string{"repeats", "repeats"}},
		{
			name: "node port", edit: func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeNodePort; s.Spec.Ports[0].NodePort = 30080 },
			want: both(func(p *tracker.ServicePort) { p.NodePort = 30080 }),
		},
		{name: "bad node port", edit: func(s *v1.Service) { s.Spec.Ports[0].NodePort = 70000 }, want: plain(), reports: []string{"70000"}},

		// External addresses.
		{name: "external IPs", edit: func(s *v1.Service) {
			s.Spec.ExternalIPs = []string{"fd01::1", "192.0.2.002", "192.0.2.1", "192.0.2.2", "x"}
		}, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, ExternalIPs: addrs("192.0.2.2", "192.0.2.1")},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80, ExternalIPs: addrs("fd01::1")},
		}, reports: []string{`externalIPs: "x"`}},
		{name: "load-balancer addresses", edit: func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{
				{Hostname: "lb.example.com"},
				{IP: "192.0.2.1"},
				{IP: "fd01::1", IPMode: ptr(v1.LoadBalancerIPModeVIP)},
				{IP: "192.0.2.2", IPMode: ptr(v1.LoadBalancerIPModeProxy)},
				{IP: "192.0.2.3", IPMode: ptr(v1.LoadBalancerIPMode("Other"))},
				{IP: "192.0.2.1"},
				{IP: "bad"},
			}
			s.Spec.LoadBalancerClass = ptr("example.com/lb")
		}, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, LoadBalancerIPs: addrs("192.0.2.1")},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80, LoadBalancerIPs: addrs("fd01::1")},
		}, reports: []string{"load-balancer ingress"}},
		{name: "link-local load-balancer addresses", edit: func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "169.254.7.1"}, {IP: "fe80::7"}, {IP: "169.254.169.254"}}
			s.Spec.ExternalIPs = []string{"169.254.7.2"}
		}, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, LoadBalancerIPs: addrs("169.254.7.1")},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80, LoadBalancerIPs: addrs("fe80::7")},
		}, reports: []string{"load-balancer ingress: 169.254.169.254 is reserved", "externalIPs: 169.254.7.2 is valid on one host or link only"}},
		{name: "addresses that reach no Service", edit: func(s *v1.Service) {
			for _, a := range []string{"127.0.0.1", "::1", "169.254.169.254", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "255.255.255.255", "::ffff:127.0.0.1"} {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, a)
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: a})
			}
		}, want: plain(), reports: []string{"externalIPs: 127.0.0.1 is valid on one host or link only", "and 13 more", "load-balancer ingress: 169.254.169.254 is reserved"}},
		{name: "broadcast cluster IP", edit: func(s *v1.Service) { s.Spec.ClusterIPs[0] = "255.255.255.255" }, want: only(six), reports: []string{"not a unicast address"}},
		{name: "source ranges", edit: func(s *v1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{" 203.0.113.000/025 ", "\tfd02::1/64\n", "203.0.113.77/25", "0.0.0.0/0"}
		}, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, SourceRanges: prefixes("203.0.113.0/25", "0.0.0.0/0")},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80, SourceRanges: prefixes("fd02::/64")},
		}},
		{name: "IPv4-mapped source range", edit: func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"::ffff:203.0.113.9/121"} }, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, SourceRanges: prefixes("203.0.113.0/25")},
			six:  plain()[six],
		}},
		{name: "source ranges of one family restrict only that family", edit: func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"203.0.113.0/25"} }, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, SourceRanges: prefixes("203.0.113.0/25")},
			six:  plain()[six],
		}},
		{name: "some source ranges unusable", edit: func(s *v1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"203.0.113.0/33", "203.0.113.0/24", "fd00::/64"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		}, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, LoadBalancerIPs: addrs("192.0.2.1"), SourceRanges: prefixes("203.0.113.0/24")},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80, SourceRanges: prefixes("fd00::/64")},
		}, reports: []string{"/33"}},
		{name: "all source ranges unusable: closed", edit: func(s *v1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"203.0.113.0", ""}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		}, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, LoadBalancerIPs: addrs("192.0.2.1"), SourceRanges: prefixes("0.0.0.0/32")},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80, SourceRanges: prefixes("::/128")},
		}, reports: []string{`"203.0.113.0" is not a range of addresses; loadBalancerSourceRanges: "" is`, string(tracker.ReasonClosed)}},

		// Affinity.
		{name: "affinity", edit: func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr(int32(5))}}
		}, want: both(func(p *tracker.ServicePort) { p.Affinity = 5 * time.Second })},
		{
			name: "affinity without config", edit: func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP },
			want: both(func(p *tracker.ServicePort) { p.Affinity = 10800 * time.Second }),
		},
		{name: "affinity without timeout", edit: func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{}}
		}, want: both(func(p *tracker.ServicePort) { p.Affinity = 10800 * time.Second })},
		{name: "affinity timeout of zero", edit: func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr(int32(0))}}
		}, want: both(func(p *tracker.ServicePort) { p.Affinity = 10800 * time.Second }), reports: []string{"0 seconds"}},
		{name: "timeout without affinity", edit: func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityNone
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr(int32(5))}}
		}, want: plain()},

		// Traffic policies.
		{
			name: "internal Local", edit: func(s *v1.Service) { s.Spec.InternalTrafficPolicy = &local },
			want: both(func(p *tracker.ServicePort) { p.InternalLocal = true }),
		},
		{name: "external Local, ClusterIP", edit: func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = "Local" }, want: plain()},
		{name: "external Local, ClusterIP with external IPs", edit: func(s *v1.Service) {
			s.Spec.ExternalTrafficPolicy, s.Spec.ExternalIPs = "Local", []string{"192.0.2.1"}
			s.Spec.HealthCheckNodePort = 32000
		}, want: ports{
			four: {Key: four, ClusterIP: addr("10.96.0.1"), Port: 80, ExternalLocal: true, ExternalIPs: addrs("192.0.2.1")},
			six:  {Key: six, ClusterIP: addr("fd00::1"), Port: 80, ExternalLocal: true},
		}},
		{name: "external Local, NodePort", edit: func(s *v1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceTypeNodePort, "Local", 32000
		}, want: both(func(p *tracker.ServicePort) { p.ExternalLocal = true })},
		{name: "external Local, LoadBalancer", edit: func(s *v1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceTypeLoadBalancer, "Local", 32000
		}, want: both(func(p *tracker.ServicePort) { p.ExternalLocal, p.HealthCheckNodePort = true, 32000 })},
		{name: "external Cluster, LoadBalancer", edit: func(s *v1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceTypeLoadBalancer, "Cluster", 32000
		}, want: plain()},
		{name: "no health-check node port", edit: func(s *v1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeLoadBalancer, "Local"
		}, want: both(func(p *tracker.ServicePort) { p.ExternalLocal = true }), reports: []string{"health-check node port 0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, e := newServices(t, tracker.Config{})
			obj := dualStack()
			tt.edit(obj)
			before := obj.DeepCopy()
			changed := s.Set(obj)
			if !reflect.DeepEqual(obj, before) {
				t.Error("the Service was modified")
			}
			if changed != (len(tt.want) > 0) {
				t.Errorf("Set() = %v", changed)
			}
			s.Take()
			got := s.Map()
			if len(got) != len(tt.want) {
				t.Errorf("got %d ports, want %d", len(got), len(tt.want))
			}
			for k, want := range tt.want {
				if !reflect.DeepEqual(got[k], want) {
					t.Errorf("got  %+v\nwant %+v", got[k], want)
				}
			}
			// There is one report for each reason.
			all := strings.Join(*e, "\n")
			if (len(*e) == 0) != (len(tt.reports) == 0) || len(*e) > len(tt.reports) {
				t.Errorf("reported %q, want %q", *e, tt.reports)
			}
			for _, want := range tt.reports {
				if !strings.Contains(all, want) {
					t.Errorf("reported %q, want %q", *e, want)
				}
			}
			for _, one := range *e {
				if !strings.Contains(one, "Service "+obj.Namespace+"/svc true ") {
					t.Errorf("reported %q for another object", one)
				}
			}
			if s.Set(before) {
				t.Error("setting the same Service again counts as a change")
			}
		})
	}
}

func TestUntrackedFamilyIsIgnored(t *testing.T) {
	s, e := newServices(t, tracker.Config{Families: []tracker.Family{tracker.IPv6}})
	s.Set(dualStack())
	s.Take()
	if got := s.Map(); len(got) != 1 || got[key("svc", "http", tracker.IPv6)] == nil {
		t.Error(got)
	}
	if len(*e) > 0 {
		t.Error(*e)
	}
}

// TestIgnoreExternalIPs checks that a Service has the ports of one without external
// IPs, and that the ignored field is not reported.
func TestIgnoreExternalIPs(t *testing.T) {
	with := dualStack()
	with.Spec.Type = v1.ServiceTypeClusterIP
	with.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	with.Spec.ExternalIPs = []string{"192.0.2.1", "fd01::1", "not an address"}
	without := with.DeepCopy()
	without.Spec.ExternalIPs = nil

	s, e := newServices(t, tracker.Config{IgnoreExternalIPs: true})
	s.Set(with)
	s.Take()
	want, _ := newServices(t, tracker.Config{})
	want.Set(without)
	want.Take()
	if got, want := s.Map(), want.Map(); len(got) == 0 || !reflect.DeepEqual(got, want) {
		t.Errorf("ports %v, want %v", got, want)
	}
	if len(*e) > 0 {
		t.Errorf("events: %v", *e)
	}
	if s.Set(without) {
		t.Error("removing the ignored addresses counts as a change")
	}
}

func TestServiceChanges(t *testing.T) {
	s, _ := newServices(t, tracker.Config{})
	two := func(port int32) *v1.Service {
		obj := service("ns", "svc", "10.96.0.1")
		obj.Spec.Ports = append(obj.Spec.Ports, v1.ServicePort{Name: "b", Port: port})
		return obj
	}
	if !s.Update(nil, two(81)) {
		t.Error("a new Service does not count as a change")
	}
	if got := s.Get(named("svc")); got != nil {
		t.Error("Get returns untaken ports:", got)
	}
	first := s.Take()
	if len(first) != 1 || first[0].Old != nil || len(first[0].New) != 2 || first[0].New[0].Key.Port != "b" {
		t.Fatal(first)
	}

	// Fields that do not affect any port.
	labeled := two(81)
	labeled.Labels = map[string]string{"a": "b"}
	labeled.ResourceVersion = "2"
	labeled.Spec.Selector = map[string]string{"a": "b"}
	if s.Update(two(81), labeled) || s.Take() != nil {
		t.Error("a new label counts as a change")
	}

	if !s.Update(two(81), two(82)) || !s.Update(two(82), two(81)) {
		t.Error("Update reports no change")
	}
	if got := s.Take(); got != nil {
		t.Error("a reverted change is taken:", got)
	}
	if got := s.Get(named("svc")); !slices.Equal(got, first[0].New) {
		t.Error("unchanged ports got new pointers")
	}

	s.Set(two(82))
	got := s.Take()
	if len(got) != 1 || got[0].New[0] == got[0].Old[0] || got[0].New[1] != got[0].Old[1] || got[0].Old[0].Port != 81 || got[0].New[0].Port != 82 {
		t.Error("not exactly one port changed", got)
	}

	s.Delete(named("svc"))
	s.Set(two(82))
	if got := s.Take(); got != nil {
		t.Error("a deletion that was reverted is taken:", got)
	}
	// A Service with another name is another Service.
	renamed := two(82)
	renamed.Name = "renamed"
	if !s.Update(two(82), renamed) {
		t.Error("a rename does not count as a change")
	}
	if got := s.Take(); len(got) != 2 || got[0].Name != named("renamed") || got[1].New != nil {
		t.Error(got)
	}
	if !s.Update(renamed, nil) || s.Update(renamed, nil) || s.Update(nil, nil) || s.Set(nil) || s.Delete(named("missing")) {
		t.Error("wrong result for whether anything changed")
	}
	if got := s.Take(); len(got) != 1 || len(s.Map()) != 0 {
		t.Error(got, s.Map())
	}
	s.Set(two(1))
	s.Delete(named("svc"))
	if got := s.Take(); got != nil {
		t.Error("a Service that was added and deleted is taken:", got)
	}
}

// TestServiceTypeChanges changes one Service through all types and back.
func TestServiceTypeChanges(t *testing.T) {
	s, _ := newServices(t, tracker.Config{})
	lb := func() *v1.Service {
		obj := service("ns", "svc", "10.96.0.1")
		obj.Spec.Type = v1.ServiceTypeLoadBalancer
		obj.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		obj.Spec.HealthCheckNodePort = 32000
		obj.Spec.Ports[0].NodePort = 30080
		return obj
	}
	nodePort := lb()
	nodePort.Spec.Type = v1.ServiceTypeNodePort
	name := lb()
	name.Spec = v1.ServiceSpec{Type: v1.ServiceTypeExternalName, ExternalName: "example.com"}
	for i, step := range []struct {
		obj    *v1.Service
		ports  int
		health uint16
	}{
		{service("ns", "svc", "10.96.0.1"), 1, 0}, {lb(), 1, 32000}, {nodePort, 1, 0}, {name, 0, 0}, {lb(), 1, 32000}, {name, 0, 0},
	} {
		if !s.Set(step.obj) {
			t.Error(i, "no change")
		}
		s.Take()
		if len(s.Map()) != step.ports || s.HealthCheckNodePorts()[named("svc")] != step.health || len(s.HealthCheckNodePorts()) != min(1, int(step.health)) {
			t.Error(i, s.Map(), s.HealthCheckNodePorts())
		}
	}
}

type color string

func (c color) Equal(o tracker.Extension) bool { return o == c }

func TestOnService(t *testing.T) {
	refused := errors.New("refused")
	s, e := newServices(t, tracker.Config{OnService: func(obj *v1.Service, port *v1.ServicePort, p *tracker.ServicePort) error {
		if port.Name == "bad" {
			return refused
		}
		p.Ext = color(obj.Annotations["color"])
		p.NeedLocalSet = true
		p.Key.Name = "hijacked"
		return nil
	}})
	obj := service("ns", "svc", "10.96.0.1")
	obj.Annotations = map[string]string{"color": "red"}
	obj.Spec.Ports = append(obj.Spec.Ports, v1.ServicePort{Name: "bad", Port: 81})
	s.Set(obj)
	s.Take()
	got := s.Get(named("svc"))
	if len(got) != 1 || got[0].Ext != color("red") || !got[0].NeedLocalSet || got[0].Key != key("svc", "http", tracker.IPv4) {
		t.Fatal(got)
	}
	if len(*e) != 1 || !strings.Contains((*e)[0], string(tracker.ReasonHookFailed)) || !strings.Contains((*e)[0], "refused") {
		t.Error(*e)
	}
	if s.Set(obj) {
		t.Error("an equal extension counts as a change")
	}
	obj.Annotations["color"] = "blue"
	if !s.Set(obj) {
		t.Error("another extension does not count as a change")
	}
}

func TestSelector(t *testing.T) {
	proxyName := func(name string) *v1.Service {
		s := service("ns", "svc", "10.96.0.1")
		s.Labels = map[string]string{tracker.LabelServiceProxyName: name}
		return s
	}
	unlabeled := service("ns", "svc", "10.96.0.1")
	s, _ := newServices(t, tracker.Config{})
	for i, step := range []struct {
		obj  *v1.Service
		want bool
	}{{unlabeled, true}, {proxyName("mine"), true}, {proxyName("other"), false}, {unlabeled, true}} {
		if got := s.Set(step.obj); got != step.want {
			t.Errorf("default selector, step %d: %v", i, got)
		}
	}
	s, _ = newServices(t, tracker.Config{Selector: tracker.Selector{ProxyNames: []string{"mine"}}})
	for i, step := range []struct {
		obj  *v1.Service
		want bool
	}{{unlabeled, false}, {proxyName("mine"), true}, {proxyName("other"), true}, {proxyName("mine"), true}, {unlabeled, true}, {unlabeled, false}} {
		if got := s.Set(step.obj); got != step.want {
			t.Errorf("named selector, step %d: %v", i, got)
		}
	}
	s, _ = newServices(t, tracker.Config{Selector: tracker.Selector{Filter: func(s *v1.Service) bool { return s.Annotations == nil }}})
	if !s.Set(unlabeled) {
		t.Error("the filter rejects the Service")
	}
	annotated := unlabeled.DeepCopy()
	annotated.Annotations = map[string]string{}
	if !s.Set(annotated) || len(s.Take()) != 0 {
		t.Error("the filter does not remove the Service")
	}

	for _, tt := range []struct {
		selector              tracker.Selector
		service, field, slice string
	}{
		{
			tracker.Selector{},
			"!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless", "spec.clusterIP!=None",
			"!service.kubernetes.io/headless",
		},
		{
			tracker.Selector{ProxyNames: []string{"mine"}},
			"service.kubernetes.io/service-proxy-name in (mine),!service.kubernetes.io/headless", "spec.clusterIP!=None",
			"!service.kubernetes.io/headless",
		},
	} {
		label, field := tt.selector.ServiceListOptions()
		sliceLabel, sliceField := tt.selector.SliceListOptions()
		if label != tt.service || field != tt.field || sliceLabel != tt.slice || sliceField != "" {
			t.Error(label, field, sliceLabel, sliceField)
		}
	}
}

// TestSelectorTakesSeveralNames compares the trackers and the list options with a table.
func TestSelectorTakesSeveralNames(t *testing.T) {
	none := "no label"
	for _, c := range []struct{ names, want []string }{
		{nil, []string{none}},
		{[]string{""}, []string{none}},
		{[]string{"a"}, []string{"a"}},
		{[]string{"a", "b"}, []string{"a", "b"}},
		{[]string{"", "a"}, []string{none, "a"}},
	} {
		selector := tracker.Selector{ProxyNames: c.names}
		text, _ := selector.ServiceListOptions()
		listed := must.Get(labels.Parse(text))(t)
		for _, name := range []string{none, "", "a", "b", "c"} {
			s := service("ns", "svc", "10.96.0.1")
			if name != none {
				s.Labels = map[string]string{tracker.LabelServiceProxyName: name}
			}
			services, _ := newServices(t, tracker.Config{Selector: selector})
			want := slices.Contains(c.want, name)
			if got := services.Set(s); got != want {
				t.Errorf("names %q, label %q: selected %t", c.names, name, got)
			}
			if want && !listed.Matches(labels.Set(s.Labels)) {
				t.Errorf("names %q, label %q: %s does not list the Service", c.names, name, text)
			}
		}
	}
}

func TestInvalidConfigIsRejected(t *testing.T) {
	for _, c := range []tracker.Config{
		{Families: []tracker.Family{}},
		{Families: []tracker.Family{5}},
		{Selector: tracker.Selector{ProxyNames: []string{"no spaces"}}},
	} {
		if _, err := tracker.New(c); err == nil {
			t.Error(err)
		}
		if _, err := tracker.NewServiceChangeTracker(c); err == nil {
			t.Error(err)
		}
		if _, err := tracker.NewEndpointsChangeTracker(c); err == nil {
			t.Error(err)
		}
	}
}
