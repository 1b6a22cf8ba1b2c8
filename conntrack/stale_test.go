package conntrack

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestChangeMakesFlowStale changes a Service in one way and judges one flow.
func TestChangeMakesFlowStale(t *testing.T) {
	const (
		vip    = "10.96.0.1:53"
		client = "10.9.0.1:1000"
		one    = "10.0.0.1:5300"
		two    = "10.0.0.2:5300"
		moved  = "10.0.0.1:5301" // the first endpoint at another port
	)
	dns := func(e ...string) service { return service{name: "dns", cluster: vip, endpoints: eps(e...)} }
	with := func(s service, f func(*service)) service { f(&s); return s }
	nodePort := func(e ...string) service {
		return with(dns(e...), func(s *service) { s.nodePort = 30053 })
	}
	none := service{}
	for _, c := range []struct {
		name     string
		from, to service
		flow     Flow
		work     bool // whether the table has to be read
		stale    bool
	}{
		{"endpoint removed", dns(one, two), dns(two), flow(client, vip, one), true, true},
		{"endpoint removed, flow of another", dns(one, two), dns(two), flow(client, vip, two), true, false},
		{"endpoint's port changed", dns(one), dns(moved), flow(client, vip, one), true, true},
		{"endpoint added", dns(one), dns(one, two), flow(client, vip, one), false, false},
		{"nothing changed", dns(one), dns(one), flow(client, vip, "10.0.0.9:1"), false, false},
		{"last endpoint removed", dns(one), dns(), flow(client, vip, one), true, true},
		{"first endpoint added, black hole", dns(), dns(one), flow(client, vip, vip), true, true},
		{"last endpoint removed, black hole", dns(one), dns(), flow(client, vip, vip), true, false},
		{"endpoint stops serving", dns(one, two), with(dns(), func(s *service) {
			s.endpoints = append(eps(two), ep(one, "gone"))
		}), flow(client, vip, one), true, true},
		{"endpoint terminates but serves", dns(one, two), with(dns(), func(s *service) {
			s.endpoints = append(eps(two), ep(one, "terminating"))
		}), flow(client, vip, one), false, false},
		{"terminating endpoint goes", with(dns(), func(s *service) {
			s.endpoints = append(eps(two), ep(one, "terminating"))
		}), dns(two), flow(client, vip, one), true, true},
		{"endpoint not serving but published", dns(one), with(dns(), func(s *service) {
			s.endpoints = append(eps(two), ep(one, "published"))
		}), flow(client, vip, one), false, false},
		{"service added, black hole", none, dns(one), flow(client, vip, vip), true, true},
		{"service added without endpoints", none, dns(), flow(client, vip, vip), false, false},
		{"service added, another's flow before", none, dns(one), flow(client, vip, two), true, true},
		{"service deleted", dns(one), none, flow(client, vip, one), true, true},
		{"service deleted, not sent to it", dns(one), none, flow(client, vip, two), true, false},
		{"service deleted, black hole", dns(one), none, flow(client, vip, vip), true, false},
		{"service without endpoints deleted", dns(), none, flow(client, vip, one), false, false},
		{"another port of the address", dns(one), none, flow(client, "10.96.0.1:54", one), true, false},
		{"endpoint asked directly", dns(one), none, flow(client, one, one), true, false},
		{
			"service deleted, external IP is the endpoint's own", with(dns("10.0.0.1:53"), func(s *service) { s.external = []string{"10.0.0.1"} }), none,
			flow(client, "10.0.0.1:53", "10.0.0.1:53"), true, false,
		},
		{
			"external IP added", dns(one), with(dns(one), func(s *service) { s.external = []string{"198.51.100.1"} }),
			flow(client, "198.51.100.1:53", "198.51.100.1:53"), true, true,
		},
		{
			"external IP removed", with(dns(one), func(s *service) { s.external = []string{"198.51.100.1"} }), dns(one),
			flow(client, "198.51.100.1:53", one), true, true,
		},
		{
			"external IP removed, flow to the cluster IP", with(dns(one), func(s *service) { s.external = []string{"198.51.100.1"} }), dns(one),
			flow(client, vip, one), true, false,
		},
		{
			"cluster IP's port changed", dns(one), with(dns(one), func(s *service) { s.cluster = "10.96.0.1:54" }),
			flow(client, vip, one), true, true,
		},
		{
			"TCP service", with(dns(one), func(s *service) { s.protocol = v1.ProtocolTCP }),
			with(dns(two), func(s *service) { s.protocol = v1.ProtocolTCP }), flow(client, vip, one), false, false,
		},
		{"SCTP service", with(dns(one), func(s *service) { s.protocol = v1.ProtocolSCTP }), none, flow(client, vip, one), false, false},
		{"TCP flow", dns(one), dns(two), func() Flow { f := flow(client, vip, one); f.Protocol = 6; return f }(), true, false},

		{"flow in a zone", dns(one), dns(two), func() Flow { f := flow(client, vip, one); f.Zone = 1; return f }(), true, false},

		{"node port, endpoint removed", nodePort(one, two), nodePort(two), flow(client, "192.0.2.1:30053", one), true, true},
		{"node port, endpoint stays", nodePort(one, two), nodePort(two), flow(client, "192.0.2.1:30053", two), true, false},
		{"node port removed", nodePort(one), dns(one), flow(client, "192.0.2.1:30053", one), true, true},
		{"node port added, black hole", dns(one), nodePort(one), flow(client, "192.0.2.1:30053", "192.0.2.1:30053"), true, true},
		{"node port added, loopback", dns(one), nodePort(one), flow(client, "127.0.0.1:30053", "127.0.0.1:30053"), true, true},
		{"node port added, another host's", dns(one), nodePort(one), flow(client, "192.0.2.9:30053", "192.0.2.9:30053"), true, false},
		{"node port, another host's, sent elsewhere by others", nodePort(one), nodePort(two), flow(client, "192.0.2.9:30053", "10.0.0.9:1"), true, false},
		{"node port, an address the node lost", nodePort(one), nodePort(two), flow(client, "192.0.2.9:30053", one), true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := everyAddress()
			p := newStaleFlows(tracker.IPv4)
			compiled := func(s service) *ruleset.Port {
				if s.name == "" {
					return nil
				}
				return s.compile(node)
			}
			from, to := compiled(c.from), compiled(c.to)
			p.setNode(node)
			record := func(ch ruleset.Change) {
				if p.concerns(ch.Key) {
					p.record(&ch)
				}
			}
			if from != nil {
				record(change(nil, from))
				p.clear()
			}
			record(change(from, to))
			if p.pending() != c.work {
				t.Errorf("pending is %v", p.pending())
			}
			local := []netip.Addr{addr("127.0.0.1"), addr("192.0.2.1")}
			if got := p.judge(&p.queue, local)(&c.flow); got != c.stale {
				t.Errorf("stale is %v", got)
			}
		})
	}
}

// inEffect returns the stale flows of a node whose Services have not changed.
func inEffect(node *ruleset.Node, services ...*ruleset.Port) *staleFlows {
	p := newStaleFlows(tracker.IPv4)
	p.setNode(node)
	for _, s := range services {
		ch := change(nil, s)
		p.record(&ch)
	}
	p.clear()
	return p
}

// TestFullDeltaExaminesAllFlows judges every flow to a known frontend after a full delta.
func TestFullDeltaExaminesAllFlows(t *testing.T) {
	node := everyAddress()
	p := inEffect(node, service{name: "a", cluster: "10.96.0.1:53", nodePort: 30053, endpoints: eps("10.0.0.1:53")}.compile(node),
		service{name: "b", cluster: "10.96.0.2:53"}.compile(node))
	p.examineAll()
	stale := p.judge(&p.queue, []netip.Addr{addr("192.0.2.1")})
	for f, want := range map[Flow]bool{
		flow("10.9.0.1:1", "10.96.0.1:53", "10.0.0.1:53"):        false,
		flow("10.9.0.1:1", "10.96.0.1:53", "10.0.0.7:53"):        true,
		flow("10.9.0.1:1", "192.0.2.1:30053", "10.0.0.1:53"):     false,
		flow("10.9.0.1:1", "192.0.2.1:30053", "10.0.0.7:53"):     true,
		flow("10.9.0.1:1", "192.0.2.7:30053", "10.0.0.7:53"):     false,
		flow("10.9.0.1:1", "192.0.2.7:30053", "192.0.2.7:30053"): false,
		flow("10.9.0.1:1", "10.96.0.2:53", "10.0.0.7:53"):        true,  // no endpoints
		flow("10.9.0.1:1", "10.96.0.2:53", "10.96.0.2:53"):       false, //
		flow("10.9.0.1:1", "10.96.0.3:53", "10.0.0.7:53"):        false, // not known
		flow("10.9.0.1:1", "198.51.100.7:53", "198.51.100.7:53"): false,
	} {
		if stale(&f) != want {
			t.Errorf("%v to %v sent to %v: stale is %v", f.Src, f.Dst, f.ReplySrc, !want)
		}
	}
}

// TestServiceEndsFlowsFromBeforeTheStart begins with flows of Services that were deleted while no process
// ran. They are no stale flows until a Service gets their destination, with or without endpoints.
func TestServiceEndsFlowsFromBeforeTheStart(t *testing.T) {
	const one = "10.0.0.1:5300"
	toVIP, toNode := flow("10.9.0.1:1000", "10.96.0.1:53", one), flow("10.9.0.1:1000", "192.0.2.1:30053", one)
	other := flow("10.9.0.1:1000", "10.96.0.3:53", one)
	untranslated := flow("10.9.0.1:1000", "10.96.0.1:53", "10.96.0.1:53")
	b := newBed(t, toVIP, toNode, other, untranslated)
	b.table.local = []netip.Addr{addr("192.0.2.1")}
	b.apply(t, true)
	b.left(t, toVIP, toNode, other, untranslated)
	b.apply(t, false, change(nil, service{name: "vip", cluster: "10.96.0.1:53"}.compile(everyAddress())))
	b.left(t, toNode, other, untranslated)
	b.apply(t, false, change(nil, service{name: "node", cluster: "10.96.0.9:53", nodePort: 30053}.compile(everyAddress())))
	b.left(t, other, untranslated)
	dumps := b.table.dumps
	b.apply(t, false, change(nil, service{name: "new", cluster: "10.96.0.4:53"}.compile(everyAddress())))
	if b.left(t, other, untranslated); b.table.dumps != dumps {
		t.Error("the table is read for a frontend without flows")
	}
}

// TestFrontendMovesToAnotherService has one Service take a frontend over from another, in
// either order.
func TestFrontendMovesToAnotherService(t *testing.T) {
	node := everyAddress()
	a := service{name: "a", cluster: "10.96.0.1:53", external: []string{"198.51.100.1"}, endpoints: eps("10.0.0.1:53", "10.0.0.3:53")}
	b := service{name: "b", cluster: "10.96.0.2:53", endpoints: eps("10.0.0.2:53", "10.0.0.3:53")}
	a1, b1 := a.compile(node), b.compile(node)
	a.external, b.external = nil, a.external
	changes := []ruleset.Change{change(a1, a.compile(node)), change(b1, b.compile(node))}
	for range 2 {
		p := inEffect(node, a1, b1)
		for _, ch := range changes {
			p.record(&ch)
		}
		stale := p.judge(&p.queue, nil)
		for src, want := range map[string]bool{"10.0.0.1:53": true, "10.0.0.2:53": false, "10.0.0.3:53": false} {
			f := flow("10.9.0.1:1", "198.51.100.1:53", src)
			if stale(&f) != want {
				t.Errorf("sent to %s: stale is %v", src, !want)
			}
		}
		slices.Reverse(changes)
	}
}

// TestExternalIPTakesPacketsFromNodePort adds and removes an external IP at an address of the node, with the
// port of another Service's NodePort.
func TestExternalIPTakesPacketsFromNodePort(t *testing.T) {
	node := everyAddress()
	const client, at = "10.9.0.1:1", "192.0.2.1:60" // an address of the node
	compiled := func(s service, endpoints ...string) *ruleset.Port {
		s.endpoints = eps(endpoints...)
		return s.compile(node)
	}
	nodePort := compiled(service{name: "nodeport", cluster: "10.96.0.1:53", nodePort: 60}, "10.0.0.1:53")
	external := service{name: "external", cluster: "10.96.0.2:60", external: []string{"192.0.2.1"}}
	withEndpoint, without := compiled(external, "10.0.0.2:53"), compiled(external)
	toNodePort, toExternal := flow(client, at, "10.0.0.1:53"), flow(client, at, "10.0.0.2:53")
	for _, c := range []struct {
		name   string
		before []*ruleset.Port
		change ruleset.Change
		want   map[Flow]bool // whether a flow is stale
	}{
		{"added", []*ruleset.Port{nodePort}, change(nil, withEndpoint), map[Flow]bool{toNodePort: true, toExternal: false}},
		{"added without endpoints", []*ruleset.Port{nodePort}, change(nil, without), map[Flow]bool{toNodePort: true}},
		{"removed", []*ruleset.Port{nodePort, withEndpoint}, change(withEndpoint, nil), map[Flow]bool{toNodePort: false, toExternal: true}},
		{"removed without endpoints", []*ruleset.Port{nodePort, without}, change(without, nil), map[Flow]bool{flow(client, at, at): true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := inEffect(node, c.before...)
			p.record(&c.change)
			stale := p.judge(&p.queue, []netip.Addr{addr("192.0.2.1")})
			for f, want := range c.want {
				if got := stale(&f); got != want {
					t.Errorf("sent to %v: stale is %v", f.ReplySrc, got)
				}
			}
		})
	}
}

// TestNodePortAddressesChange takes an address from those at which NodePorts answer.
func TestNodePortAddressesChange(t *testing.T) {
	all, some := everyAddress(), everyAddress()
	some.NodePorts4 = ruleset.NodePorts{Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")}}
	p := inEffect(all, service{name: "a", cluster: "10.96.0.1:53", nodePort: 30053, endpoints: eps("10.0.0.1:53")}.compile(all))
	p.setNode(all)
	if p.pending() {
		t.Error("pending without a change")
	}
	p.setNode(some)
	if !p.pending() {
		t.Error("not pending after an address was removed")
	}
	stale := p.judge(&p.queue, []netip.Addr{addr("192.0.2.1"), addr("192.0.2.2")})
	for dst, want := range map[string]bool{"192.0.2.1:30053": false, "192.0.2.2:30053": true} {
		f := flow("10.9.0.1:1", dst, "10.0.0.1:53")
		if stale(&f) != want {
			t.Errorf("to %s: stale is %v", dst, !want)
		}
	}
}

// TestQueueIsBounded records many changes without a successful clean-up.
func TestQueueIsBounded(t *testing.T) {
	t.Parallel()
	node := everyAddress()
	p := inEffect(node, service{name: "stays", cluster: "10.96.0.1:53", endpoints: eps("10.0.0.1:53")}.compile(node))
	for i := range maxQueue + 10 {
		at := fmt.Sprintf("10.%d.%d.%d:53", 97+i>>16, i>>8&255, i&255)
		s := service{name: "comes and goes", cluster: at, endpoints: eps("10.0.0.2:53")}
		c := s.compile(node)
		ch := change(nil, c)
		p.record(&ch)
		ch = change(c, nil)
		p.record(&ch)
	}
	if n := len(p.queue.frontends); n > maxQueue || !p.queue.all {
		t.Errorf("%d frontends, all is %v", n, p.queue.all)
	}
	f := flow("10.9.0.1:1", "10.96.0.1:53", "10.0.0.7:53")
	if !p.judge(&p.queue, nil)(&f) {
		t.Error("a stale flow is not found")
	}
}

// TestRecordAllocatesForDifferences records one endpoint that goes and comes back, in a
// small and a large Service.
func TestRecordAllocatesForDifferences(t *testing.T) {
	allocated := func(endpoints int) uint64 {
		s := service{name: "s", cluster: "10.96.0.1:53"}
		for e := range endpoints {
			s.endpoints = append(s.endpoints, ep(fmt.Sprintf("10.0.%d.%d:53", e>>8, e&255), ""))
		}
		all := s.compile(everyAddress())
		fewer := *all
		fewer.Endpoints, fewer.Selection.Reachable = all.Endpoints[1:], all.Selection.Reachable[1:]
		p := newStaleFlows(tracker.IPv4)
		less, more := change(all, &fewer), change(&fewer, all)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range 100 {
			p.record(&less)
			p.record(&more)
			p.clear()
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	if small, large := allocated(10), allocated(2000); large > 2*small {
		t.Errorf("%d bytes allocated with 10 endpoints, %d with 2000", small, large)
	}
}
