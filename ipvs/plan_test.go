package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// testService returns a Service port with one endpoint on this node, one on another node, and
// one without a node.
func testService(edit func(*tracker.ServicePort), eps ...*tracker.Endpoint) *ruleset.Port {
	key := tracker.Key{Family: tracker.IPv4}
	key.NamespacedName = types.NamespacedName{Namespace: "default", Name: "web"}
	key.Protocol = v1.ProtocolTCP
	p := &tracker.ServicePort{Key: key, ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80}
	edit(p)
	if eps == nil {
		eps = []*tracker.Endpoint{testEndpoint("10.244.1.1", "here"), testEndpoint("10.244.2.1", "there"), testEndpoint("10.244.3.1", "")}
	}
	return ruleset.Compile(tracker.PortState{Port: p, Endpoints: eps}, &ruleset.Node{Info: tracker.NodeInfo{Name: "here"}})
}

func testEndpoint(addr, node string) *tracker.Endpoint {
	return &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(addr), 8080), Node: node, Ready: true, Serving: true, Weight: 1}
}

var testLocal = local{
	node:      "here",
	nodePorts: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("198.51.100.1")},
	own:       func(a netip.Addr) bool { return a == netip.MustParseAddr("198.18.0.9") },
}

// describePlan returns a plan as lines of text.
func describePlan(p plan) []string {
	var out []string
	for _, v := range p.virtuals {
		var pool []string
		for _, ep := range v.pool {
			pool = append(pool, ep.Addr.Addr().String())
		}
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s flags=%#x timeout=%d %s", v.key, v.scheduler, v.flags, v.timeout, strings.Join(pool, " "))))
	}
	for _, e := range slices.Concat(p.entries, p.internal) {
		s := fmt.Sprintf("%s %s,%d:%d", e.set.name(tracker.IPv4), e.addr, e.proto, e.port)
		if e.other.IsValid() {
			s += "," + e.other.String()
		}
		if e.set == setShortCircuit {
			s += fmt.Sprintf(" mark=%#x", p.mark)
		}
		out = append(out, s)
	}
	for _, a := range p.bind {
		out = append(out, "bind "+a.String())
	}
	return out
}

func TestEveryKindOfServiceIsPlanned(t *testing.T) {
	t.Parallel()
	const all, here = "10.244.1.1 10.244.2.1 10.244.3.1", "10.244.1.1"
	hairpins := []string{"KUBE-LOOP-BACK 10.244.1.1,6:8080,10.244.1.1/32", "KUBE-LOOP-BACK 10.244.3.1,6:8080,10.244.3.1/32"}
	cluster := func(pool string) []string {
		return []string{
			strings.TrimSpace("TCP 10.96.0.1:80 rr flags=0x0 timeout=0 " + pool),
			"KUBE-CLUSTER-IP 10.96.0.1,6:80", "KUBE-IPVS-IPS 10.96.0.1,0:0", "bind 10.96.0.1",
		}
	}
	addr := netip.MustParseAddr
	for _, c := range []struct {
		name   string
		config Config
		edit   func(*tracker.ServicePort)
		eps    []*tracker.Endpoint
		want   []string
	}{
		{"cluster IP", Config{}, func(*tracker.ServicePort) {}, nil, slices.Concat(cluster(all), hairpins)},
		{"no endpoints", Config{}, func(*tracker.ServicePort) {}, []*tracker.Endpoint{}, append(cluster(""), "KUBE-NO-ENDPOINTS 10.96.0.1,6:80")},
		{"affinity", Config{}, func(p *tracker.ServicePort) { p.Affinity = 3 * time.Hour }, nil, slices.Concat([]string{
			"TCP 10.96.0.1:80 rr flags=0x1 timeout=10800 " + all,
		}, cluster(all)[1:], hairpins)},
		{"Maglev", Config{Scheduler: Maglev}, func(*tracker.ServicePort) {}, nil, slices.Concat([]string{
			"TCP 10.96.0.1:80 mh flags=0x18 timeout=0 " + all,
		}, cluster(all)[1:], hairpins)},
		{"source hash", Config{Scheduler: SourceHash}, func(*tracker.ServicePort) {}, nil, slices.Concat([]string{
			"TCP 10.96.0.1:80 sh flags=0x8 timeout=0 " + all,
		}, cluster(all)[1:], hairpins)},
		{"hash of the source and port without Maglev", Config{noMaglev: true}, func(p *tracker.ServicePort) { p.Hash = tracker.HashSourcePort }, nil, slices.Concat([]string{
			"TCP 10.96.0.1:80 sh flags=0x18 timeout=0 " + all,
		}, cluster(all)[1:], hairpins)},
		{"scheduler without a constant", Config{Scheduler: "twos"}, func(*tracker.ServicePort) {}, nil, slices.Concat([]string{
			"TCP 10.96.0.1:80 twos flags=0x0 timeout=0 " + all,
		}, cluster(all)[1:], hairpins)},
		{"hash of the source and port", Config{Scheduler: "lc"}, func(p *tracker.ServicePort) { p.Hash = tracker.HashSourcePort }, nil, slices.Concat([]string{
			"TCP 10.96.0.1:80 mh flags=0x18 timeout=0 " + all,
		}, cluster(all)[1:], hairpins)},
		{"hash of the source, with affinity", Config{}, func(p *tracker.ServicePort) { p.Hash, p.Affinity = tracker.HashSource, time.Hour }, nil, slices.Concat([]string{
			"TCP 10.96.0.1:80 mh flags=0x9 timeout=3600 " + all,
		}, cluster(all)[1:], hairpins)},
		{"weights", Config{}, func(*tracker.ServicePort) {}, []*tracker.Endpoint{
			{Addr: netip.MustParseAddrPort("10.244.2.1:8080"), Node: "there", Ready: true, Serving: true, Weight: 3},
			{Addr: netip.MustParseAddrPort("10.244.2.2:8080"), Node: "there", Ready: true, Serving: true, Weight: 1},
		}, slices.Concat([]string{"TCP 10.96.0.1:80 wrr flags=0x0 timeout=0 10.244.2.1 10.244.2.2"}, cluster("")[1:])},
		{"an endpoint of weight 0 is no real server", Config{}, func(*tracker.ServicePort) {}, []*tracker.Endpoint{
			{Addr: netip.MustParseAddrPort("10.244.2.1:8080"), Node: "there", Ready: true, Serving: true, Weight: 3},
			{Addr: netip.MustParseAddrPort("10.244.2.2:8080"), Node: "there", Ready: true, Serving: true},
		}, slices.Concat([]string{"TCP 10.96.0.1:80 rr flags=0x0 timeout=0 10.244.2.1"}, cluster("")[1:])},
		{"external IPs, one of them the node's own", Config{}, func(p *tracker.ServicePort) {
			p.ExternalIPs = []netip.Addr{addr("198.18.0.1"), addr("198.18.0.9")}
		}, nil, slices.Concat(cluster(all), hairpins, []string{
			"TCP 198.18.0.1:80 rr flags=0x0 timeout=0 " + all, "KUBE-EXTERNAL-IP 198.18.0.1,6:80",
			"KUBE-IPVS-IPS 198.18.0.1,0:0", "KUBE-IPVS-EXTERNAL-IPS 198.18.0.1,0:0", "bind 198.18.0.1",
			"TCP 198.18.0.9:80 rr flags=0x0 timeout=0 " + all, "KUBE-EXTERNAL-IP 198.18.0.9,6:80",
		})},
		{"load balancer with source ranges", Config{}, func(p *tracker.ServicePort) {
			p.LoadBalancerIPs = []netip.Addr{addr("203.0.113.1")}
			p.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.7/32"), netip.MustParsePrefix("172.16.0.0/12")}
		}, nil, slices.Concat(cluster(all), hairpins, []string{
			"TCP 203.0.113.1:80 rr flags=0x0 timeout=0 " + all, "KUBE-LOAD-BALANCER 203.0.113.1,6:80",
			"KUBE-LOAD-BALANCER-FW 203.0.113.1,6:80", "KUBE-LOAD-BALANCER-SOURCE-IP 203.0.113.1,6:80,192.0.2.7/32",
			"KUBE-LOAD-BALANCER-SOURCE-CIDR 203.0.113.1,6:80,172.16.0.0/12",
			"KUBE-IPVS-IPS 203.0.113.1,0:0", "KUBE-IPVS-EXTERNAL-IPS 203.0.113.1,0:0", "bind 203.0.113.1",
		})},
		{"NodePort and its health check", Config{}, func(p *tracker.ServicePort) { p.NodePort, p.HealthCheckNodePort = 30080, 32000 }, nil, slices.Concat(cluster(all), hairpins, []string{
			"TCP 192.0.2.1:30080 rr flags=0x0 timeout=0 " + all, "TCP 198.51.100.1:30080 rr flags=0x0 timeout=0 " + all,
			"KUBE-NODE-PORT-TCP invalid IP,0:30080", "KUBE-HEALTH-CHECK-NODE-PORT invalid IP,0:32000",
		})},
		{"external policy Local", Config{}, func(p *tracker.ServicePort) {
			p.ExternalLocal, p.NodePort, p.LoadBalancerIPs = true, 30080, []netip.Addr{addr("203.0.113.1")}
		}, nil, slices.Concat(cluster(all), hairpins, []string{
			"TCP 192.0.2.1:30080 rr flags=0x0 timeout=0 " + here, "TCP 198.51.100.1:30080 rr flags=0x0 timeout=0 " + here,
			"TCP 203.0.113.1:80 rr flags=0x0 timeout=0 " + here, "FWM 12295 IPv4 rr flags=0x0 timeout=1300437 " + all,
			"KUBE-NODE-PORT-TCP invalid IP,0:30080", "KUBE-NODE-PORT-LOCAL-TCP invalid IP,0:30080",
			"KUBE-LOAD-BALANCER 203.0.113.1,6:80", "KUBE-LOAD-BALANCER-LOCAL 203.0.113.1,6:80",
			"KUBE-SHORT-CIRCUIT 192.0.2.1,6:30080 mark=0x3007", "KUBE-SHORT-CIRCUIT 198.51.100.1,6:30080 mark=0x3007", "KUBE-SHORT-CIRCUIT 203.0.113.1,6:80 mark=0x3007",
			"KUBE-IPVS-IPS 203.0.113.1,0:0", "KUBE-IPVS-EXTERNAL-IPS 203.0.113.1,0:0", "bind 203.0.113.1",
		})},
		{"external policy Local with affinity and no local endpoint", Config{}, func(p *tracker.ServicePort) {
			p.ExternalLocal, p.ExternalIPs, p.Affinity = true, []netip.Addr{addr("198.18.0.9")}, time.Minute
		}, []*tracker.Endpoint{testEndpoint("10.244.2.1", "there")}, slices.Concat([]string{
			"TCP 10.96.0.1:80 rr flags=0x1 timeout=60 10.244.2.1", "TCP 198.18.0.9:80 rr flags=0x1 timeout=60",
			"FWM 12295 IPv4 mh flags=0x8 timeout=1300437 10.244.2.1",
			"KUBE-EXTERNAL-IP-LOCAL 198.18.0.9,6:80", "KUBE-NO-LOCAL-ENDPOINTS 198.18.0.9,6:80", "KUBE-SHORT-CIRCUIT 198.18.0.9,6:80 mark=0x3007",
		}, cluster("")[1:])},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := must.Get(c.config.withDefaults())(t)
			config.Scheduler = c.config.Scheduler
			got := describePlan(config.makePlan(testService(c.edit, c.eps...), testLocal, 0x3007))
			if c.eps != nil && len(c.eps) == 0 {
				s := testService(c.edit)
				s.Selection = tracker.Selection{}
				s.Frontends[0].Target, s.Frontends[0].Internal = ruleset.TargetReject, ruleset.TargetReject
				got = describePlan(config.makePlan(s, testLocal, 0x3007))
			}
			slices.Sort(got)
			slices.Sort(c.want)
			for _, l := range missing(got, c.want) {
				t.Errorf("unexpected: %s", l)
			}
			for _, l := range missing(c.want, got) {
				t.Errorf("missing: %s", l)
			}
			if len(got) != len(c.want) {
				t.Errorf("%d lines, want %d: %q", len(got), len(c.want), got)
			}
		})
	}
}

func TestMissingReturnsTheDifference(t *testing.T) {
	t.Parallel()
	var a, b []int
	for i := range 100 {
		a, b = append(a, i), append(b, 2*i)
	}
	got := missing(a, b)
	small := append(missing(a[:5], b[:5]), missing(a[:3], nil)...)
	if len(got) != 50 || got[0] != 1 || got[49] != 99 || !slices.Equal(small, []int{1, 3, 0, 1, 2}) || missing(nil, a) != nil {
		t.Errorf("%v, %v", got, small)
	}
}

func TestMarksAreAllocatedOnce(t *testing.T) {
	t.Parallel()
	s := newState(tracker.IPv4)
	s.marks, _ = driver.NewIDs[tracker.Key](1, 3)
	taken := virtualKey{family: tracker.IPv4, mark: 0x3002}
	s.virtuals[taken] = &virtualState{}
	s.reserveMarks()
	allocate := func(name string) uint32 {
		k := tracker.Key{Family: tracker.IPv4}
		k.Name = name
		n, err := s.marks.Get(k)
		if err != nil {
			return 0
		}
		return markDrop + n
	}
	got := []uint32{allocate("a"), allocate("b"), allocate("c"), allocate("a")}
	if !slices.Equal(got, []uint32{0x3001, 0x3003, 0, 0x3001}) {
		t.Errorf("%#x", got)
	}
	// A mark stays reserved while it has a virtual server.
	k := tracker.Key{Family: tracker.IPv4}
	k.Name = "b"
	retired := virtualKey{family: tracker.IPv4, mark: 0x3003}
	s.virtuals[retired] = &virtualState{}
	s.freeMark(k)
	if m := allocate("c"); m != 0 {
		t.Errorf("the mark of a retired virtual server was allocated again: %#x", m)
	}
	delete(s.virtuals, retired)
	s.marks.Unreserve(retired.mark - markDrop)
	if m := allocate("c"); m != 0x3003 {
		t.Errorf("%#x, want the free mark 0x3003", m)
	}
	for m, want := range map[uint32]bool{0x2fff: false, 0x3000: false, 0x3001: true, 0x3fff: true, 0x4000: false, 0x13001: false} {
		if namesServer(m) != want {
			t.Errorf("%#x: %t", m, !want)
		}
	}
}
