package ruleset

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// TestTraceFollowsItsRules checks Trace rule by rule. Node 192.168.0.1 has pods in
// 10.1.0.0/16; endpoint 10.1.0.1 is on it, and 10.2.0.1 on another node.
func TestTraceFollowsItsRules(t *testing.T) {
	node := tracker.NodeInfo{Name: "n1", Addresses: addrs("192.168.0.1", "2001:db8::1")}
	own := addrs("127.0.0.1", "192.168.0.1", "10.1.255.1", "::1", "2001:db8::1")
	tr, e := world(t, Config{
		LocalTraffic:      LocalTraffic{CIDRs: prefixes("10.1.0.0/16")},
		NodePortAddresses: NodePortAddresses{primary: true},
		ServiceCIDRs:      prefixes("172.30.0.0/16", "fd00::/64"),
	}, node)
	policy := func(internal, external bool) func(*v1.Service) {
		return func(s *v1.Service) {
			if internal {
				s.Spec.InternalTrafficPolicy = ptr(v1.ServiceInternalTrafficPolicyLocal)
			}
			if external {
				s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
			}
		}
	}
	lb := func(ip string, nodePort int32, ranges ...string) func(*v1.Service) {
		return func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Spec.Ports[0].NodePort = nodePort
			s.Spec.LoadBalancerSourceRanges = ranges
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ip}}
		}
	}
	affinity := func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr(int32(60))}}
	}
	tr.SetService(service("plain", "172.30.0.1", affinity))
	tr.SetSlice(sliceOn("plain", "n1", "10.1.0.1"))
	tr.SetSlice(sliceOn("plain", "n2", "10.2.0.1"))
	tr.SetService(service("internal", "172.30.0.2", policy(true, false)))
	tr.SetSlice(sliceOn("internal", "n1", "10.1.0.1"))
	tr.SetSlice(sliceOn("internal", "n2", "10.2.0.1"))
	tr.SetService(service("far", "172.30.0.3", lb("203.0.113.3", 30003), policy(true, true)))
	tr.SetSlice(sliceOn("far", "n2", "10.2.0.1"))
	tr.SetService(service("empty", "172.30.0.4", lb("203.0.113.4", 30004, "198.51.100.0/24")))
	tr.SetService(service("open", "172.30.0.5", lb("203.0.113.5", 30005, "198.51.100.0/24", "10.1.0.0/16")))
	tr.SetSlice(sliceOn("open", "n1", "10.1.0.1"))
	tr.SetSlice(sliceOn("open", "n2", "10.2.0.1"))
	tr.SetService(service("local", "172.30.0.6", lb("203.0.113.6", 30006), policy(false, true)))
	tr.SetSlice(sliceOn("local", "n1", "10.1.0.1"))
	tr.SetSlice(sliceOn("local", "n2", "10.2.0.1"))
	tr.SetService(service("six", "fd00::7", lb("2001:db8:1::7", 30007)))
	tr.SetSlice(sliceOn("six", "n1", "fd01::1"))
	s := e.Snapshot()

	const outside, pod, self = "198.51.100.9 eth0", "10.1.0.9 veth1", "192.168.0.1 "
	for _, c := range []struct {
		from string // address and interface
		to   string
		want string // action, endpoints (* if masqueraded), and a part of the rule
	}{
		// Cluster IPs.
		{pod, "172.30.0.1:80", "forward 10.1.0.1 10.2.0.1|cluster endpoints"},
		{"10.1.0.1 veth1", "172.30.0.1:80", "forward 10.1.0.1* 10.2.0.1|"},
		{self, "172.30.0.1:80", "forward 10.1.0.1* 10.2.0.1*|"},
		{outside, "172.30.0.1:80", "forward 10.1.0.1* 10.2.0.1*|"},
		{pod, "[::ffff:172.30.0.1]:80", "forward 10.1.0.1 10.2.0.1|"},
		{pod, "172.30.0.2:80", "forward 10.1.0.1|local endpoints"},
		{pod, "172.30.0.3:80", "drop|none this node may use"},
		{pod, "172.30.0.4:80", "reject|no endpoints"},
		// Closed ports of cluster IPs, and addresses without a Service.
		{pod, "172.30.0.1:81", "reject|closed port"},
		{self, "172.30.0.1:81", "reject|closed port"},
		{pod, "172.30.9.9:80", "drop|in a Service CIDR"},
		{pod, "[fd00::9]:80", "drop|in a Service CIDR"},
		{pod, "203.0.113.5:81", "pass|no Service's address"},
		{pod, "8.8.8.8:53", "pass|"},
		// A load balancer's address, and its source ranges.
		{outside, "203.0.113.5:80", "forward 10.1.0.1* 10.2.0.1*|"},
		{pod, "203.0.113.5:80", "forward 10.1.0.1* 10.2.0.1*|"},
		{self, "203.0.113.5:80", "drop|not among the source ranges"},
		{"8.8.8.8 eth0", "203.0.113.5:80", "drop|not among the source ranges"},
		{"8.8.8.8 eth0", "203.0.113.4:80", "drop|not among the source ranges"},
		{outside, "203.0.113.4:80", "reject|no endpoints"},
		// NodePorts have no source ranges.
		{"8.8.8.8 eth0", "192.168.0.1:30005", "forward 10.1.0.1* 10.2.0.1*|"},
		{"8.8.8.8 eth0", "192.168.0.1:30004", "reject|no endpoints"},
		{self, "192.168.0.1:30005", "forward 10.1.0.1* 10.2.0.1*|"},
		{"127.0.0.1 ", "127.0.0.1:30005", "pass|node's own address"},
		{"8.8.8.8 eth0", "10.1.255.1:30005", "pass|node's own address"},
		{"8.8.8.8 eth0", "192.168.0.2:30005", "pass|no Service's address"},
		{"8.8.8.8 eth0", "0.0.0.0:30005", "pass|"},
		{"8.8.8.8 eth0", "192.168.0.1:22", "pass|node's own address"},
		{"2001:db8::9 eth0", "[2001:db8::1]:30007", "forward fd01::1*|"},
		{"2001:db8::9 eth0", "[2001:db8::1]:30005", "pass|"},
		{"8.8.8.8 eth0", "192.168.0.1:30007", "pass|"},
		{"2001:db8::9 eth0", "[2001:db8:1::7]:80", "forward fd01::1*|"},
		// externalTrafficPolicy Local, and its short circuit.
		{outside, "203.0.113.6:80", "forward 10.1.0.1|local endpoints"},
		{"10.1.0.1 veth1", "203.0.113.6:80", "forward 10.1.0.1* 10.2.0.1|used from this node"},
		{pod, "203.0.113.6:80", "forward 10.1.0.1 10.2.0.1|used from this node"},
		{self, "203.0.113.6:80", "forward 10.1.0.1* 10.2.0.1*|used from this node"},
		{outside, "192.168.0.1:30006", "forward 10.1.0.1|"},
		{self, "192.168.0.1:30006", "forward 10.1.0.1* 10.2.0.1*|"},
		{outside, "203.0.113.3:80", "drop|none this node may use"},
		{pod, "203.0.113.3:80", "forward 10.2.0.1|used from this node"},
	} {
		addr, in, _ := strings.Cut(c.from, " ")
		v := s.Trace(Packet{
			From: netip.MustParseAddr(addr), InInterface: in, Protocol: v1.ProtocolTCP,
			To: netip.MustParseAddrPort(c.to), NodeAddresses: own,
		})
		got := v.Action.String()
		for _, ep := range v.Endpoints {
			got += " " + ep.Addr.Addr().String()
			if v.MasqueradeTo(ep) {
				got += "*"
			}
		}
		want, rule, _ := strings.Cut(c.want, "|")
		if got != want || !strings.Contains(v.Rule, rule) {
			t.Errorf("%s to %s: %s (%s), want %s", c.from, c.to, got, v.Rule, c.want)
		}
		if (v.Port != nil) != (v.Frontend != nil) || v.Rule == "" {
			t.Errorf("%s to %s: %+v", c.from, c.to, v)
		}
		if affine := v.Action == ActionForward && v.Port.Key.Name == "plain"; (v.Affinity == time.Minute) != affine {
			t.Errorf("%s to %s: affinity %s", c.from, c.to, v.Affinity)
		}
	}
	if v := s.Trace(Packet{From: addrs("10.1.0.9")[0], InInterface: "veth1", Protocol: v1.ProtocolUDP, To: netip.MustParseAddrPort("172.30.0.1:80")}); v.Action != ActionReject {
		t.Errorf("other protocol: %+v", v)
	}
	// Malformed packets pass.
	if v := s.Trace(Packet{}); v.Action != ActionPass {
		t.Errorf("zero packet: %+v", v)
	}
}

// TestTraceNamesPreferLocal checks the reason for which a Service with externalTrafficPolicy
// Cluster uses this node's endpoints only.
func TestTraceNamesPreferLocal(t *testing.T) {
	node := &Node{Info: tracker.NodeInfo{Name: "n1", Addresses: addrs("192.168.0.1")}, NodePorts4: NodePorts{All: true}}
	here, there := endpoint("10.1.0.1:80", "n1"), endpoint("10.2.0.1:80", "n2")
	const reason = "local endpoints, which the Service prefers to those of other nodes"
	for _, c := range []struct {
		what, to string
		port     tracker.ServicePort
		eps      []*tracker.Endpoint
		want     string // the end of the rule
	}{
		{"prefers", "192.168.0.1:30080", tracker.ServicePort{PreferLocal: true}, []*tracker.Endpoint{here, there}, reason},
		{"prefers, load-balancer IP", "203.0.113.1:80", tracker.ServicePort{PreferLocal: true}, []*tracker.Endpoint{here, there}, reason},
		{"prefers, but has none here", "192.168.0.1:30080", tracker.ServicePort{PreferLocal: true}, []*tracker.Endpoint{there}, "cluster endpoints"},
		{"prefers, but policy Local", "192.168.0.1:30080", tracker.ServicePort{PreferLocal: true, ExternalLocal: true}, []*tracker.Endpoint{here, there}, "local endpoints"},
		{"prefers, cluster IP", "172.30.0.1:80", tracker.ServicePort{PreferLocal: true, InternalLocal: true}, []*tracker.Endpoint{here, there}, "local endpoints"},
		{"policy Local", "192.168.0.1:30080", tracker.ServicePort{ExternalLocal: true}, []*tracker.Endpoint{here, there}, "local endpoints"},
	} {
		p := c.port
		p.Key, p.ClusterIP, p.Port, p.NodePort, p.LoadBalancerIPs = key("web", tracker.IPv4), netip.MustParseAddr("172.30.0.1"), 80, 30080, addrs("203.0.113.1")
		s := &Snapshot{Node: node, Ports: []*Port{Compile(tracker.PortState{Port: &p, Endpoints: c.eps}, node)}}
		v := s.Trace(Packet{
			From: netip.MustParseAddr("198.51.100.9"), InInterface: "eth0", Protocol: v1.ProtocolTCP,
			To: netip.MustParseAddrPort(c.to), NodeAddresses: addrs("192.168.0.1"),
		})
		if v.Action != ActionForward || !strings.HasSuffix(v.Rule, " "+c.want) {
			t.Errorf("%s: %s: %q, want the end %q", c.what, v.Action, v.Rule, c.want)
		}
	}
}

// TestTraceMayFailSend checks when a socket on the node may get EPERM: not for
// packets to the node itself, but for packets that kube-proxy stops on their way out.
func TestTraceMayFailSend(t *testing.T) {
	node := tracker.NodeInfo{Name: "n1", Addresses: addrs("192.168.0.1")}
	tr, e := world(t, Config{ServiceCIDRs: prefixes("172.30.0.0/16")}, node)
	tr.SetService(service("empty", "172.30.0.1", func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].NodePort = 30001
		s.Spec.ExternalIPs = []string{"198.51.100.1"}
		s.Spec.LoadBalancerSourceRanges = []string{"192.168.0.1/32"}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}}
	}))
	s := e.Snapshot()
	for _, c := range []struct {
		from, to string
		own      []netip.Addr // addresses of the node besides its primary one
		action   Action
		may      bool
	}{
		{"192.168.0.1", "192.168.0.1:30001", nil, ActionReject, false},
		{"192.168.0.1", "10.0.0.1:30001", addrs("10.0.0.1"), ActionReject, false},
		{"192.168.0.1", "203.0.113.1:80", nil, ActionReject, true},
		{"192.168.0.1", "203.0.113.1:80", addrs("203.0.113.1"), ActionReject, false},
		{"10.0.0.1", "203.0.113.1:80", addrs("203.0.113.1", "10.0.0.1"), ActionDrop, true},
		{"192.168.0.1", "198.51.100.1:80", nil, ActionReject, true},
		{"192.168.0.1", "198.51.100.1:80", addrs("198.51.100.1"), ActionReject, false},
		{"192.168.0.1", "172.30.0.1:80", nil, ActionReject, true},
		{"192.168.0.1", "172.30.0.1:80", addrs("172.30.0.1"), ActionReject, true},
		{"192.168.0.1", "172.30.0.1:81", nil, ActionReject, true},
		{"192.168.0.1", "172.30.9.9:80", nil, ActionDrop, true},
		{"192.168.0.1", "192.168.0.1:22", nil, ActionPass, false},
		{"192.168.0.1", "8.8.8.8:53", nil, ActionPass, false},
	} {
		p := Packet{
			From: addrs(c.from)[0], Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort(c.to),
			NodeAddresses: append(addrs("192.168.0.1"), c.own...),
		}
		if v := s.Trace(p); v.Action != c.action || v.MayFailSend != c.may {
			t.Errorf("%s to %s, own %v: %v, may fail %v (%s)", c.from, c.to, c.own, v.Action, v.MayFailSend, v.Rule)
		}
		p.InInterface = "eth0"
		if v := s.Trace(p); v.MayFailSend {
			t.Errorf("%s to %s from another machine: sending may fail", c.from, c.to)
		}
	}
}

// TestTraceRecognizesPodsByInterface configures LocalTraffic by interface.
func TestTraceRecognizesPodsByInterface(t *testing.T) {
	for _, c := range []struct {
		local LocalTraffic
		in    string
		masq  bool
	}{
		{LocalTraffic{}, "veth1", false}, // unknown: never
		{LocalTraffic{Bridge: "cni0"}, "cni0", false},
		{LocalTraffic{Bridge: "cni0"}, "cni01", true},
		{LocalTraffic{InterfacePrefix: "veth"}, "veth1", false},
		{LocalTraffic{InterfacePrefix: "veth"}, "eth0", true},
		{LocalTraffic{InterfacePrefix: "veth"}, "", true},
		{LocalTraffic{CIDRs: prefixes("10.1.0.0/16")}, "eth0", false},
		{LocalTraffic{CIDRs: prefixes("10.9.0.0/16")}, "veth1", true},
	} {
		tr, e := world(t, Config{LocalTraffic: c.local}, tracker.NodeInfo{Name: "n1"})
		tr.SetService(service("a", "172.30.0.1"))
		tr.SetSlice(slice("a", "10.1.0.1"))
		v := e.Snapshot().Trace(Packet{From: addrs("10.1.0.9")[0], InInterface: c.in, Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort("172.30.0.1:80")})
		if len(v.Endpoints) != 1 || v.MasqueradeTo(v.Endpoints[0]) != c.masq {
			t.Errorf("%+v, in by %q: %+v", c.local, c.in, v)
		}
	}
}

// TestAllNodePortsMeansNodeAddresses checks that NodePorts at all addresses include
// only the node's own addresses.
func TestAllNodePortsMeansNodeAddresses(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	tr.SetService(service("a", "172.30.0.1", func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = 30080
	}))
	s := e.Snapshot()
	for to, want := range map[string]Action{
		"192.168.0.1:30080": ActionReject, "10.9.9.9:30080": ActionReject,
		"127.0.0.1:30080": ActionPass, "8.8.8.8:30080": ActionPass,
	} {
		v := s.Trace(Packet{
			From: addrs("1.1.1.1")[0], InInterface: "eth0", Protocol: v1.ProtocolTCP,
			To: netip.MustParseAddrPort(to), NodeAddresses: addrs("127.0.0.1", "192.168.0.1", "10.9.9.9"),
		})
		if v.Action != want {
			t.Errorf("%s: %s (%s), want %s", to, v.Action, v.Rule, want)
		}
	}
}

func TestSnapshotLookupFindsFrontends(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	tr.SetService(service("a", "172.30.0.1", func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = 30080
	}))
	s := e.Snapshot()
	tr.DeleteService(name("a"))
	e.Snapshot()
	for to, want := range map[string]string{
		"172.30.0.1:80": "cluster IP", "[::ffff:172.30.0.1]:80": "cluster IP", "172.30.0.1:81": "", "172.30.0.2:80": "",
		"0.0.0.0:30080": "node port", "[::]:30080": "",
	} {
		svc, f := s.Lookup(netip.MustParseAddrPort(to), v1.ProtocolTCP)
		got := ""
		if f != nil {
			got = fmt.Sprint(f.Kind)
		}
		if got != want || (svc == nil) != (f == nil) {
			t.Errorf("%s is %q, want %q", to, got, want)
		}
	}
}

func TestFrontendAdmitsItsSources(t *testing.T) {
	open, some := &Frontend{}, &Frontend{Sources: prefixes("192.0.2.0/24", "2001:db8::/32")}
	for from, want := range map[string]bool{
		"192.0.2.7": true, "::ffff:192.0.2.7": true, "192.0.3.7": false, "2001:db8::1": true, "2001:db9::1": false,
	} {
		a := netip.MustParseAddr(from)
		if got := some.Admits(a); got != want {
			t.Errorf("admits %s: %t", from, got)
		}
		if !open.Admits(a) {
			t.Errorf("without sources %s is not admitted", from)
		}
	}
}
