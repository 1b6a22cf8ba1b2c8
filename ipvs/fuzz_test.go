package ipvs

import (
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// FuzzPlan compares plans with a simple model that checks each frontend by itself.
func FuzzPlan(f *testing.F) {
	f.Add(uint16(0), uint16(80), uint16(30080), int64(0), []byte{1, 2, 3}, uint32(0x3001))
	f.Add(uint16(0xffff), uint16(1), uint16(0), int64(10800), []byte{}, uint32(0))
	f.Add(uint16(0b10110), uint16(65535), uint16(1), int64(-1), []byte{0, 0, 255, 7}, uint32(math.MaxUint32))
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, bits, port, nodePort uint16, seconds int64, eps []byte, mark uint32) {
		is := func(n int) bool { return bits&(1<<n) != 0 }
		key := tracker.Key{Family: tracker.IPv4}
		key.Name, key.Protocol = "svc", v1.ProtocolTCP
		sp := &tracker.ServicePort{Key: key, ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: port, NodePort: nodePort, Affinity: time.Duration(seconds) * time.Second, ExternalLocal: is(0)}
		if is(1) {
			sp.Key.Protocol = v1.ProtocolUDP
		}
		if is(2) {
			sp.ExternalIPs = []netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("198.18.0.9")}
		}
		if is(3) {
			sp.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("203.0.113.1")}
		}
		if is(4) {
			sp.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.7/32"), netip.MustParsePrefix("172.16.0.0/12")}
		}
		if is(5) {
			sp.HealthCheckNodePort = nodePort
		}
		var endpoints []*tracker.Endpoint
		for i, b := range eps {
			ep := testEndpoint(netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}).String(), []string{"here", "there", ""}[b%3])
			ep.Ready, ep.Weight = b&4 == 0, uint16(b>>5)
			endpoints = append(endpoints, ep)
		}
		s := ruleset.Compile(tracker.PortState{Port: sp, Endpoints: endpoints}, &ruleset.Node{Info: tracker.NodeInfo{Name: "here"}})
		c := must.Get(Config{}.withDefaults())(t)
		got, again := c.makePlan(s, testLocal, mark), c.makePlan(s, testLocal, mark)
		if !slices.Equal(describePlan(got), describePlan(again)) {
			t.Fatalf("the same Service has the plans %q and %q", describePlan(got), describePlan(again))
		}
		proto := inet.Protocol(sp.Key.Protocol)
		// at holds the target of each address and port. Those in internal treat internal
		// traffic differently.
		at, bound, internal := map[netip.AddrPort]ruleset.Target{}, map[netip.Addr]bool{}, map[netip.AddrPort]bool{}
		for _, fe := range s.Frontends {
			addrs := []netip.Addr{fe.Addr}
			if fe.Kind == ruleset.KindNodePort {
				addrs = testLocal.nodePorts
			} else if !testLocal.own(fe.Addr) {
				bound[fe.Addr] = true
			}
			for _, a := range addrs {
				at[netip.AddrPortFrom(a, fe.Port)] = fe.Target
				if fe.ShortCircuit() && fe.Internal != fe.Target {
					internal[netip.AddrPortFrom(a, fe.Port)] = true
				}
			}
		}
		seen := map[netip.AddrPort]bool{}
		for _, v := range got.virtuals {
			if v.key.mark != 0 {
				if len(internal) == 0 || v.key.mark != mark {
					t.Errorf("unexpected %s", v.key)
				}
				continue
			}
			target, ok := at[v.key.at]
			if !ok || v.key.proto != proto || seen[v.key.at] {
				t.Fatalf("unexpected %s", v.key)
			}
			seen[v.key.at] = true
			for i, ep := range v.pool {
				// The ruleset decides which endpoints a target has.
				if !slices.Contains(s.Pool(target), ep) || v.weight(i) == 0 {
					t.Errorf("%s has %s with weight %d", v.key, ep.Addr, v.weight(i))
				}
			}
			if len(v.pool) != len(s.Pool(target)) {
				t.Errorf("%s has %d real servers, want %d", v.key, len(v.pool), len(s.Pool(target)))
			}
			if (v.flags&flagPersistent != 0) != (sp.Affinity > 0) || v.timeout > math.MaxInt32/1000 || (v.timeout != 0) != (sp.Affinity > 0) {
				t.Errorf("%s: affinity %s, flags %#x, timeout %d", v.key, sp.Affinity, v.flags, v.timeout)
			}
		}
		if len(seen) != len(at) {
			t.Errorf("virtual servers %v, want %v", seen, at)
		}
		for _, a := range got.bind {
			if !bound[a] {
				t.Errorf("unexpected bound address %s", a)
			}
			delete(bound, a)
		}
		if len(bound) != 0 {
			t.Errorf("%v are not bound", bound)
		}
		if len(got.internal) != len(internal) {
			t.Errorf("internal is %v, want %v", got.internal, internal)
		}
		// The backend must recognize every virtual server as its own.
		st := newState(tracker.IPv4)
		for _, e := range got.entries {
			st.hasEntry(e, 0)
		}
		for _, v := range got.virtuals {
			if v.key.mark == 0 && !st.recognized(c, v.key, v.virtual) {
				t.Errorf("%s would not be recognized", v.key)
			}
		}
	})
}

// FuzzSaved parses arbitrary input as the output of iptables-save. The input of
// iptables-restore must contain only the backend's own chains and jumps.
func FuzzSaved(f *testing.F) {
	f.Add("*nat\n:KUBE-IPVS-SERVICES - [0:0]\n-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-IPVS-SERVICES\n-A KUBE-IPVS-SERVICES -j MINE\nCOMMIT\n")
	f.Add("*nat\n:KUBE-NODE-PORT -\n*nat\nCOMMIT\n*mangle\n-A INPUT -j KUBE-IPVS-IN\n")
	f.Add("-A\n*filter")
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, text string) {
		saved := iptext.Parse(text)
		tables := rules{family: tracker.IPv4, mark: uint32(dataplane.DefaultMasqueradeMark), node: &ruleset.Node{}}.tables()
		clean := restoreAll(tables, nil)
		for _, input := range []string{restoreAll(tables, saved), removeAll(tables, saved)} {
			current := table{}
			for l := range strings.Lines(input) {
				if name, ok := strings.CutPrefix(l, "*"); ok {
					i := slices.IndexFunc(tables, func(x table) bool { return x.name+"\n" == name })
					if i < 0 {
						t.Fatalf("unexpected table %q", name)
					}
					current = tables[i]
					continue
				}
				verb, rest, _ := strings.Cut(l, " ")
				rule := strings.TrimSpace(rest)
				name, _, _ := strings.Cut(rule, " ")
				own := slices.ContainsFunc(current.chains, func(c chain) bool { return c.name == name })
				switch verb {
				case "-A", "-F", "-X":
					if !own {
						t.Errorf("it changes the foreign chain %q: %s", name, l)
					}
				case "-I", "-D":
					if !slices.ContainsFunc(current.jumps, func(j jump) bool { return rest == j.from+" "+j.rule+"\n" || rest == j.from+" 1 "+j.rule+"\n" }) {
						t.Errorf("it changes a foreign jump: %s", l)
					}
				default:
					if l != "COMMIT\n" && !strings.Contains(clean, "\n"+l) {
						t.Errorf("unexpected line %q", l)
					}
				}
			}
		}
		if own := ownRules(tables, saved); strings.Count(own, "\n") > strings.Count(text, "\n")+len(tables)+1 {
			t.Errorf("own rules of\n%s\nare\n%s", text, own)
		}
	})
}
