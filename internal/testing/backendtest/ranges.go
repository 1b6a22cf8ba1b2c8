package backendtest

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// changeRanges moves a load-balancer IP between Services with other source ranges and endpoints. After each write, a
// client that both admit is forwarded, and one that one of them admits does not reach the other's endpoints.
func changeRanges(t *testing.T, plane func(testing.TB, conformance.SimEnv) conformance.Fake) {
	p, env := NewNode(t, tracker.Config{}), SimEnv()
	rng := rand.New(rand.NewPCG(*Seed, 11))
	var packets []ruleset.Packet
	for _, a := range []string{"203.0.113.1", "203.0.113.2", "203.0.113.200"} {
		packets = append(packets, ruleset.Packet{From: netip.MustParseAddr(a), InInterface: "eth0", To: netip.MustParseAddrPort("198.18.0.1:80"), Protocol: v1.ProtocolTCP})
	}
	var before, after *ruleset.Snapshot
	var fake conformance.Fake
	env.Look = func() {
		for _, p := range packets {
			was, is, now := before.Trace(p), after.Trace(p), fake.Handle(p)
			if len(now.Endpoints) == 0 && len(was.Endpoints) != 0 && len(is.Endpoints) != 0 {
				t.Errorf("%s is not forwarded", p.From)
			}
			for _, c := range now.Endpoints {
				if !slices.ContainsFunc(slices.Concat(was.Endpoints, is.Endpoints), func(ep *tracker.Endpoint) bool { return ep.Addr == c.Addr }) {
					t.Errorf("%s reaches %s", p.From, c.Addr)
				}
			}
		}
	}
	fake = plane(t, env)
	cursor := p.Engine.Attach("backend", fake.Backend())
	for round := range 100 {
		before = p.Engine.Snapshot()
		ranges := slices.DeleteFunc([]string{"203.0.113.0/24", "203.0.113.0/25", "203.0.113.1/32", "203.0.113.2/32", "203.0.113.128/25"},
			func(string) bool { return rng.IntN(2) == 0 })
		edits := []func(*v1.Service){func(s *v1.Service) {
			s.Spec.Type, s.Spec.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, ranges
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "198.18.0.1"}}
		}}
		if rng.IntN(8) == 0 {
			edits[0] = ExternalIPs("198.18.0.1") // admits all
		}
		if rng.IntN(2) == 0 {
			edits = append(edits, ExternalLocal)
		}
		i := rng.IntN(2)
		p.Tracker.DeleteService(ServiceName(1 - i))
		p.Tracker.SetService(Numbered(i, edits...))
		p.Tracker.SetSlice(NumberedSlice(i, tracker.IPv4, []int{2 * round, 2*round + 2, 2*round + 1}[rng.IntN(3):][:rng.IntN(2)]...))
		after = p.Engine.Snapshot()
		if err := cursor.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
