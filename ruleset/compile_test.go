package ruleset

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/cidr"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/tracker"
)

// TestTargetsMatchTable tries every combination of policies and kinds of endpoints
// and compares with a table.
func TestTargetsMatchTable(t *testing.T) {
	here, there := endpoint("10.0.0.1:80", "n1"), endpoint("10.0.0.2:80", "n2")
	dead := endpoint("10.0.0.3:80", "n2")
	dead.Ready, dead.Serving = false, false
	leaving := endpoint("10.0.0.4:80", "n1")
	leaving.Ready, leaving.Terminating = false, true
	leavingThere := endpoint("10.0.0.5:80", "n2")
	leavingThere.Ready, leavingThere.Terminating = false, true
	idle, idleThere := endpoint("10.0.0.6:80", "n1"), endpoint("10.0.0.7:80", "n2")
	idle.Weight, idleThere.Weight = 0, 0

	for _, c := range []struct {
		name      string
		endpoints []*tracker.Endpoint
		// cluster and local are the targets of policies Cluster and Local.
		cluster, local Target
	}{
		{"no endpoints", nil, TargetReject, TargetReject},
		{"only dead ones", []*tracker.Endpoint{dead}, TargetReject, TargetReject},
		{"one here", []*tracker.Endpoint{here}, TargetCluster, TargetLocal},
		{"one there", []*tracker.Endpoint{there}, TargetCluster, TargetDrop},
		{"both", []*tracker.Endpoint{here, there}, TargetCluster, TargetLocal},
		{"one leaving here", []*tracker.Endpoint{leaving}, TargetCluster, TargetLocal},
		{"one leaving there", []*tracker.Endpoint{leavingThere}, TargetCluster, TargetDrop},
		{"one of weight 0 here", []*tracker.Endpoint{idle}, TargetReject, TargetReject},
		{"one of weight 0 here, one there", []*tracker.Endpoint{idle, there}, TargetCluster, TargetDrop},
		{"one here, one of weight 0 there", []*tracker.Endpoint{here, idleThere}, TargetCluster, TargetLocal},
		{"one of weight 0 there, one leaving here", []*tracker.Endpoint{idleThere, leaving}, TargetCluster, TargetLocal},
		{"one leaving here, one there", []*tracker.Endpoint{there, leaving}, TargetCluster, TargetLocal},
	} {
		for policies := range 4 {
			internalLocal, externalLocal := policies&1 != 0, policies&2 != 0
			p := &tracker.ServicePort{
				Key: key("s", tracker.IPv4), ClusterIP: netip.MustParseAddr("172.30.0.1"), Port: 80, NodePort: 30080,
				ExternalIPs:     addrs("192.0.2.1"),
				LoadBalancerIPs: addrs("203.0.113.1"),
				InternalLocal:   internalLocal, ExternalLocal: externalLocal,
			}
			s := Compile(tracker.PortState{Port: p, Endpoints: c.endpoints}, &Node{Info: tracker.NodeInfo{Name: "n1"}})

			inside := Frontend{Target: c.cluster, Internal: c.cluster}
			if internalLocal {
				inside = Frontend{Target: c.local, Internal: c.local}
			}
			outside := Frontend{Target: c.cluster, Internal: c.cluster, Masquerade: MasqueradeAlways}
			if externalLocal {
				outside = Frontend{Target: c.local, Internal: c.cluster, Masquerade: MasqueradeNode}
			}
			at := func(f Frontend, k Kind, addr string, port uint16) Frontend {
				f.Kind, f.Port = k, port
				if addr != "" {
					f.Addr = netip.MustParseAddr(addr)
				}
				return f
			}
			want := []Frontend{
				at(inside, KindClusterIP, "172.30.0.1", 80),
				at(outside, KindExternalIP, "192.0.2.1", 80),
				at(outside, KindLoadBalancerIP, "203.0.113.1", 80),
				at(outside, KindNodePort, "", 30080),
			}
			if !slices.EqualFunc(s.Frontends, want, equalFrontends) {
				t.Errorf("%s, internal local %v, external local %v:\n got %v\nwant %v",
					c.name, internalLocal, externalLocal, s.Frontends, want)
			}
			for _, f := range s.Frontends {
				if (len(s.Pool(f.Target)) != 0) != (f.Target == TargetCluster || f.Target == TargetLocal) {
					t.Errorf("%s: %s with pool %v", c.name, show(f), s.Pool(f.Target))
				}
				if f.ShortCircuit() != (externalLocal && f.Kind != KindClusterIP) {
					t.Errorf("%s: ShortCircuit %v of %s", c.name, f.ShortCircuit(), show(f))
				}
			}
		}
	}
}

// TestMasqueradeDependsOnNode checks that only a cluster IP's masquerading depends on the configuration of the node.
func TestMasqueradeDependsOnNode(t *testing.T) {
	pods4 := LocalTraffic{CIDRs: prefixes("10.0.0.0/8")}
	for _, c := range []struct {
		name          string
		local         LocalTraffic
		all           bool
		family        tracker.Family
		externalLocal bool
		inside        Masquerade
		outside       Masquerade
	}{
		{"nothing known", LocalTraffic{}, false, tracker.IPv4, false, MasqueradeNever, MasqueradeAlways},
		{"pod range", pods4, false, tracker.IPv4, false, MasqueradeNotPods, MasqueradeAlways},
		{"pod range of the other family", pods4, false, tracker.IPv6, false, MasqueradeNever, MasqueradeAlways},
		{"bridge", LocalTraffic{Bridge: "cni0"}, false, tracker.IPv6, false, MasqueradeNotPods, MasqueradeAlways},
		{"interfaces", LocalTraffic{InterfacePrefix: "veth"}, false, tracker.IPv4, false, MasqueradeNotPods, MasqueradeAlways},
		{"all", LocalTraffic{}, true, tracker.IPv4, false, MasqueradeAlways, MasqueradeAlways},
		{"all, with a pod range", pods4, true, tracker.IPv4, false, MasqueradeAlways, MasqueradeAlways},
		{"policy Local", pods4, false, tracker.IPv4, true, MasqueradeNotPods, MasqueradeNode},
		{"policy Local, all", pods4, true, tracker.IPv4, true, MasqueradeAlways, MasqueradeNode},
	} {
		own := "172.30.0.1"
		if c.family == tracker.IPv6 {
			own = "fd00::1"
		}
		p := &tracker.ServicePort{
			Key: key("s", c.family), ClusterIP: netip.MustParseAddr(own), Port: 80, NodePort: 30080, ExternalLocal: c.externalLocal,
		}
		s := Compile(tracker.PortState{Port: p}, &Node{LocalTraffic: c.local, MasqueradeAll: c.all})
		if got := s.Frontends[0].Masquerade; got != c.inside {
			t.Errorf("%s: cluster IP masquerades %s, want %s", c.name, got, c.inside)
		}
		if got := s.Frontends[1].Masquerade; got != c.outside {
			t.Errorf("%s: node port masquerades %s, want %s", c.name, got, c.outside)
		}
	}
}

func TestSourceRangesRestrictLoadBalancerIPs(t *testing.T) {
	for _, c := range []struct {
		name   string
		ranges []netip.Prefix
		node   []netip.Addr
		want   []netip.Prefix // of the load-balancer IP 203.0.113.1
	}{
		{"none", nil, nil, nil},
		{"one", prefixes("198.51.100.0/24"), nil, prefixes("198.51.100.0/24")},
		{
			"sorted, masked, without what is within another",
			prefixes("198.51.100.7/24", "10.1.0.0/16", "10.0.0.0/8", "10.0.0.0/8", "198.51.100.128/25"), nil,
			prefixes("10.0.0.0/8", "198.51.100.0/24"),
		},
		{"everything", prefixes("198.51.100.0/24", "0.0.0.0/0"), nil, nil},
		{"node outside", prefixes("198.51.100.0/24"), addrs("192.0.2.9"), prefixes("198.51.100.0/24")},
		{
			"node within", prefixes("198.51.100.0/24", "192.0.2.0/24"), addrs("fd00::9", "192.0.2.9"),
			prefixes("192.0.2.0/24", "198.51.100.0/24", "203.0.113.1/32"),
		},
		{
			"node within, frontend too", prefixes("192.0.2.0/24", "203.0.113.0/24"), addrs("192.0.2.9"),
			prefixes("192.0.2.0/24", "203.0.113.0/24"),
		},
	} {
		for _, eps := range [][]*tracker.Endpoint{nil, {endpoint("10.0.0.1:80", "n1")}} {
			p := &tracker.ServicePort{
				Key: key("s", tracker.IPv4), ClusterIP: netip.MustParseAddr("172.30.0.1"), Port: 80, NodePort: 30080,
				ExternalIPs: addrs("192.0.2.1"), LoadBalancerIPs: addrs("203.0.113.1"), SourceRanges: c.ranges,
			}
			s := Compile(tracker.PortState{Port: p, Endpoints: eps}, &Node{Info: tracker.NodeInfo{Addresses: c.node}})
			for _, f := range s.Frontends {
				want := c.want
				if f.Kind != KindLoadBalancerIP {
					want = nil
				}
				if !slices.Equal(f.Sources, want) {
					t.Errorf("%s, %d endpoints: sources of %s are %v, want %v", c.name, len(eps), f.Kind, f.Sources, want)
				}
			}
		}
	}
}

// TestLoadBalancerIPAdmitsItself has a node inside a Service's source ranges. Each
// load-balancer IP must admit itself as a source, and not the others.
func TestLoadBalancerIPAdmitsItself(t *testing.T) {
	p := &tracker.ServicePort{
		Key: key("s", tracker.IPv4), ClusterIP: netip.MustParseAddr("172.30.0.1"), Port: 80,
		LoadBalancerIPs: addrs("203.0.113.1", "203.0.113.2"), SourceRanges: prefixes("192.0.2.0/24"),
	}
	s := Compile(tracker.PortState{Port: p}, &Node{Info: tracker.NodeInfo{Addresses: addrs("192.0.2.9")}})
	n := 0
	for _, f := range s.Frontends {
		if f.Kind != KindLoadBalancerIP {
			continue
		}
		n++
		for _, source := range p.LoadBalancerIPs {
			if got, want := f.Admits(source), source == f.Addr; got != want {
				t.Errorf("%v admits %v: %v, want %v", f.Addr, source, got, want)
			}
		}
		if !f.Admits(netip.MustParseAddr("192.0.2.9")) {
			t.Errorf("%v does not admit the node", f.Addr)
		}
	}
	if n != 2 {
		t.Errorf("%d load-balancer frontends", n)
	}
}

// TestRepeatedAddressIsOneFrontend checks that a repeated address gives one frontend, the more restricted one.
func TestRepeatedAddressIsOneFrontend(t *testing.T) {
	p := &tracker.ServicePort{
		Key: key("s", tracker.IPv4), ClusterIP: netip.MustParseAddr("172.30.0.1"), Port: 80,
		ExternalIPs:     addrs("192.0.2.1", "203.0.113.1", "192.0.2.1", "172.30.0.1", "0.0.0.0"),
		LoadBalancerIPs: addrs("203.0.113.1", "172.30.0.1", "203.0.113.1"),
		SourceRanges:    prefixes("198.51.100.0/24"),
	}
	s := Compile(tracker.PortState{Port: p}, nil)
	var got []string
	for _, f := range s.Frontends {
		got = append(got, show(f))
	}
	want := []string{
		"cluster IP 172.30.0.1:80 to reject, masquerade never",
		"external IP 192.0.2.1:80 to reject, masquerade always",
		"load-balancer IP 203.0.113.1:80 to reject, masquerade always, from [198.51.100.0/24]",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

// randomPort returns a random port. It uses few values, so that they collide.
func randomPort(r *rand.Rand) *tracker.ServicePort {
	family, base := tracker.IPv4, []string{"172.30.0.1", "192.0.2.1", "192.0.2.2", "203.0.113.1", "203.0.113.2", "0.0.0.0"}
	ranges := []string{"0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "192.0.2.0/24", "192.0.2.1/32"}
	if r.IntN(2) == 0 {
		family, base = tracker.IPv6, []string{"fd00::1", "2001:db8::1", "2001:db8::2", "2001:db8:1::1", "2001:db8:1::2", "::"}
		ranges = []string{"::/0", "2001:db8::/32", "2001:db8:1::/48", "fd00::/8", "2001:db8::1/128"}
	}
	some := func(list []string, n int) []string {
		var out []string
		for range r.IntN(n + 1) {
			out = append(out, list[r.IntN(len(list))])
		}
		return out
	}
	p := &tracker.ServicePort{
		Key: key("s", family), ClusterIP: netip.MustParseAddr(base[0]), Port: uint16(1 + r.IntN(3)),
		ExternalIPs: addrs(some(base, 3)...), LoadBalancerIPs: addrs(some(base, 40)...),
		SourceRanges:  prefixes(some(ranges, 3)...),
		InternalLocal: r.IntN(2) == 0, ExternalLocal: r.IntN(2) == 0, NeedLocalSet: r.IntN(4) == 0,
		PreferLocal: r.IntN(3) == 0,
		Affinity:    time.Duration(r.IntN(2)) * time.Hour,
	}
	if r.IntN(2) == 0 {
		p.NodePort = uint16(30000 + r.IntN(3))
	}
	return p
}

func randomEndpoints(r *rand.Rand, f tracker.Family) []*tracker.Endpoint {
	var out []*tracker.Endpoint
	for i := range r.IntN(5) {
		a := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
		if f == tracker.IPv6 {
			a = netip.AddrFrom16([16]byte{0xfd, 15: byte(i)})
		}
		out = append(out, &tracker.Endpoint{
			Addr: netip.AddrPortFrom(a, 8080), Node: []string{"", "n1", "n2"}[r.IntN(3)],
			Ready: r.IntN(2) == 0, Serving: r.IntN(2) == 0, Terminating: r.IntN(2) == 0, Weight: 1,
		})
	}
	return out
}

// FuzzCompile checks the invariants of every compiled Service.
func FuzzCompile(f *testing.F) {
	for seed := range uint64(32) {
		f.Add(seed, seed*7)
	}
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, seed1, seed2 uint64) {
		r := rand.New(rand.NewPCG(seed1, seed2))
		p := randomPort(r)
		eps := randomEndpoints(r, p.Key.Family)
		n := &Node{
			Info:          tracker.NodeInfo{Name: "n1", Addresses: addrs("192.0.2.1", "2001:db8::1")[:r.IntN(3)]},
			MasqueradeAll: r.IntN(2) == 0,
		}
		if r.IntN(2) == 0 {
			n.LocalTraffic.Bridge = "cni0"
		}
		s := Compile(tracker.PortState{Port: p, Endpoints: eps}, n)
		if s.Key != p.Key || s.Spec != p || s.ID != 0 {
			t.Fatalf("identity: %+v", s)
		}
		if again := Compile(tracker.PortState{Port: p, Endpoints: eps}, n); diff(s, again) != 0 {
			t.Fatalf("compiled twice: %v", diff(s, again))
		}
		seen := map[l4Key]bool{}
		for i := range s.Frontends {
			fe := &s.Frontends[i]
			at := l4KeyOf(s, fe)
			if seen[at] {
				t.Errorf("twice: %s", show(*fe))
			}
			seen[at] = true
			if (fe.Kind == KindNodePort) == fe.Addr.IsValid() || fe.Port == 0 {
				t.Errorf("address of %s", show(*fe))
			}
			if want := map[bool]uint16{true: p.NodePort, false: p.Port}[fe.Kind == KindNodePort]; fe.Port != want {
				t.Errorf("%s: port %d, want %d", show(*fe), fe.Port, want)
			}
			for _, target := range []Target{fe.Target, fe.Internal} {
				if (target == TargetCluster || target == TargetLocal) != (len(s.Pool(target)) != 0) {
					t.Errorf("%s: pool of %s is %v", show(*fe), target, s.Pool(target))
				}
				if target == TargetReject && s.Selection.HasAny || target == TargetDrop && !s.Selection.HasAny {
					t.Errorf("%s: HasAny %v", show(*fe), s.Selection.HasAny)
				}
			}
			if p.PreferLocal && !p.ExternalLocal && fe.Kind != KindClusterIP {
				if want := wantsLocal(eps, n.Info.Name); (fe.Target == TargetLocal) != want {
					t.Errorf("%s: prefers local endpoints: %v, want %v", show(*fe), !want, want)
				}
			}
			if fe.Internal != fe.Target && !fe.ShortCircuit() {
				t.Errorf("%s: no short circuit", show(*fe))
			}
			if len(fe.Sources) != 0 && fe.Kind != KindLoadBalancerIP {
				t.Errorf("%s: has sources", show(*fe))
			}
			if !slices.Equal(fe.Sources, cidr.Reduce(fe.Sources)) {
				t.Errorf("%s: sources not reduced", show(*fe))
			}
			// Sources admits exactly the addresses in the ranges.
			for _, from := range addrs("10.0.0.1", "10.1.0.1", "192.0.2.1", "192.0.2.77", "1.1.1.1", "2001:db8::1", "2001:db8:1::9", "fd00::7", "::2") {
				if fe.Kind != KindLoadBalancerIP || tracker.FamilyOf(from) != p.Key.Family || from == fe.Addr {
					continue
				}
				want := len(p.SourceRanges) == 0 || containsAddr(p.SourceRanges, from)
				if got := len(fe.Sources) == 0 || containsAddr(fe.Sources, from); got != want {
					t.Errorf("%s: admits %s: %v, want %v (ranges %v)", show(*fe), from, got, want, p.SourceRanges)
				}
			}
		}
	})
}

// wantsLocal reports whether external traffic stays on the node under PreferLocal: one of its
// endpoints is ready, or it has one that still serves and no endpoint is ready anywhere.
func wantsLocal(eps []*tracker.Endpoint, node string) bool {
	ready := func(e *tracker.Endpoint) bool { return e.Ready }
	local := func(e *tracker.Endpoint) bool { return e.Ready && e.IsLocal(node) }
	serving := func(e *tracker.Endpoint) bool { return e.Serving && e.Terminating && e.IsLocal(node) }
	return slices.ContainsFunc(eps, local) || !slices.ContainsFunc(eps, ready) && slices.ContainsFunc(eps, serving)
}

// TestMasqueradeApplies lists the replaced sources for each value of Masquerade.
func TestMasqueradeApplies(t *testing.T) {
	type source struct{ pod, node bool }
	remote, pod, node, nodeAsPod := source{}, source{pod: true}, source{node: true}, source{true, true}
	for m, want := range map[Masquerade][]source{
		MasqueradeNever:    {},
		MasqueradeAlways:   {remote, pod, node, nodeAsPod},
		MasqueradeNotPods:  {remote, node},
		MasqueradeNode:     {node},
		MasqueradeNode + 1: {},
	} {
		for _, s := range []source{remote, pod, node, nodeAsPod} {
			if got := m.Applies(s.pod, s.node); got != slices.Contains(want, s) {
				t.Errorf("%v: Applies(%v, %v) = %v", m, s.pod, s.node, got)
			}
		}
	}
}
