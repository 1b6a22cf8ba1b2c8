package ipvs

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// TestOldKernelsTranslateInsteadOfGUE asks for each forwarding in kernels with and without tunnels of
// other types than IPIP.
func TestOldKernelsTranslateInsteadOfGUE(t *testing.T) {
	t.Parallel()
	s := testService(func(*tracker.ServicePort) {})
	for _, how := range []Forwarding{ForwardingTranslated, ForwardingTunnel, ForwardingDirect, ForwardingGUE, ForwardingGRE} {
		for _, old := range []bool{true, false} {
			c := Config{Properties: func(*ruleset.Port) Properties { return Properties{Forwarding: how} }, onlyIPIP: old}
			lacks := old && (how == ForwardingGUE || how == ForwardingGRE)
			if got := c.properties(s).Forwarding; (got == how) == lacks {
				t.Errorf("%v, old kernel %t: %v", how, old, got)
			}
			if got := c.ignored(s); (got != nil) != lacks {
				t.Errorf("%v, old kernel %t: %v", how, old, got)
			}
		}
	}
}

// TestPropertiesWithoutEffectAreReported asks for what the other properties, or the frontends, rule out.
func TestPropertiesWithoutEffectAreReported(t *testing.T) {
	t.Parallel()
	external := func(s *tracker.ServicePort) { s.ExternalIPs = []netip.Addr{netip.MustParseAddr("198.51.100.1")} }
	none := func(*tracker.ServicePort) {}
	for _, c := range []struct {
		name     string
		edit     func(*tracker.ServicePort)
		p        Properties
		reported bool
	}{
		{"one packet, translated", external, Properties{OnePacket: true}, true},
		{"one packet, direct", external, Properties{OnePacket: true, Forwarding: ForwardingDirect}, false},
		{"one packet, direct, cluster IP", none, Properties{OnePacket: true, Forwarding: ForwardingDirect}, true},
		{"hashed port", none, Properties{Scheduler: Maglev, HashPort: true}, false},
		{"hashed port without a hash", none, Properties{Scheduler: "lc", HashPort: true}, true},
	} {
		for _, proto := range []v1.Protocol{v1.ProtocolUDP, v1.ProtocolTCP} {
			s := testService(func(s *tracker.ServicePort) { s.Key.Protocol = proto; c.edit(s) })
			config := Config{Properties: func(*ruleset.Port) Properties { return c.p }, Schedulers: Schedulers()}
			want := c.reported && (proto == v1.ProtocolUDP || !c.p.OnePacket) // it is for UDP
			if got := config.ignored(s); (got != nil) != want {
				t.Errorf("%s, %s: %v", c.name, proto, got)
			}
		}
	}
}

// TestDefaultBudgetFitsIntoSets plans a costly Service. No set gets more elements than the Service costs, so a set that
// holds the budget of all Services is never full.
func TestDefaultBudgetFitsIntoSets(t *testing.T) {
	t.Parallel()
	if total := ruleset.DefaultBudget().Total; total > maxElements {
		t.Errorf("a set holds %d elements, less than the budget of %d", maxElements, total)
	}
	s := testService(func(s *tracker.ServicePort) {
		s.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")}
		for i := range 100 {
			s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 32))
		}
	})
	used := map[setID]int{}
	for _, e := range (Config{}).makePlan(s, local{own: func(netip.Addr) bool { return false }}, 0).entries {
		used[e.set]++
	}
	if used[setLoadBalancerSourceIP] != 200 {
		t.Errorf("%d sources in the plan, want 200", used[setLoadBalancerSourceIP])
	}
	for set, n := range used {
		if n > s.Cost() {
			t.Errorf("set %s gets %d elements of a Service that costs %d", set.name(tracker.IPv4), n, s.Cost())
		}
	}
}

// TestScarceMarksGoToTheOldest has more Services that need a packet mark than there are marks. In a
// full delta the oldest get them, whatever their names, and later a Service keeps its mark.
func TestScarceMarksGoToTheOldest(t *testing.T) {
	t.Parallel()
	b := newBackend(Config{Log: slog.New(slog.DiscardHandler)}, nil)
	s := newState(tracker.IPv4)
	s.marks, _ = driver.NewIDs[tracker.Key](1, 1)
	s.node = &ruleset.Node{Info: tracker.NodeInfo{Name: "here"}}
	service := func(n int, created int64) *ruleset.Port {
		return testService(func(p *tracker.ServicePort) {
			p.Key.Name = fmt.Sprint("s", n)
			if created != 0 {
				p.Created = time.Unix(created, 0)
			}
			p.ExternalIPs = []netip.Addr{netip.AddrFrom4([4]byte{198, 51, 100, byte(n)})}
			p.ExternalLocal = true
		})
	}
	marked := func(full bool, list ...*ruleset.Port) (names []string) {
		u := newUpdate(b, s, map[tracker.Key]error{})
		for _, svc := range list {
			u.add(svc.Key, owner(svc.ID), svc)
		}
		u.makePlans(full)
		for _, it := range u.items {
			if it.plan.mark != 0 {
				names = append(names, it.key.Name)
			}
		}
		return names
	}
	one, two, three := service(1, 0), service(2, 300), service(3, 200)
	if got := marked(true, one, two, three); fmt.Sprint(got) != "[s3]" {
		t.Errorf("marks for %v", got)
	}
	if got := marked(false, service(0, 100), three); fmt.Sprint(got) != "[s3]" {
		t.Errorf("marks for %v after another Service came", got)
	}
}

// skips lists the features of the suite that IPVS lacks; see "Differences from the other
// backends" in DESIGN.md.
var skips = map[conformance.Feature]string{
	conformance.LoopbackNodePorts: "a packet from a loopback address cannot leave the node",
	conformance.HashOfEndpoints:   "the kernel's table depends on the order in which servers were added, and contains draining servers",
	conformance.AffinityInternal:  "the kernel's hash table replaces affinity for internal traffic",
	conformance.OtherPorts:        "an external IP is bound as a whole",
	conformance.TrafficAtOnce:     "the kernel sums up its statistics every two seconds",
	conformance.AffinityTimeout:   "IPVS remembers a client while the client has connections, and expires clients once a minute",
}
