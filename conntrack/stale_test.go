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
	// The range's ports are 53 to 99.
	ranged := func(e ...string) service { return with(dns(e...), func(s *service) { s.last = 99 }) }
	shifted := func(e ...string) service { return with(ranged(e...), func(s *service) { s.target = 1053 }) }
	toRange := func(src string) Flow { return flow(client, "10.96.0.1:60", src) }
	const rangeOne, rangeTwo = "10.0.0.1:60", "10.0.0.2:60"
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
		{"range, endpoint removed", ranged(one, two), ranged(two), toRange(rangeOne), true, true},
		{"range, endpoint removed, first port", ranged(one, two), ranged(two), flow(client, vip, "10.0.0.1:53"), true, true},
		{"range, endpoint removed, last port", ranged(one, two), ranged(two), flow(client, "10.96.0.1:99", "10.0.0.1:99"), true, true},
		{"range, endpoint removed, flow of another", ranged(one, two), ranged(two), toRange(rangeTwo), true, false},
		{"range, endpoint removed, port before", ranged(one, two), ranged(two), flow(client, "10.96.0.1:52", "10.0.0.1:52"), true, false},
		{"range, endpoint removed, port behind", ranged(one, two), ranged(two), flow(client, "10.96.0.1:100", "10.0.0.1:100"), true, false},
		{"range, endpoint removed, another address", ranged(one, two), ranged(two), flow(client, "10.96.0.2:60", rangeOne), true, false},
		{"range, endpoint's own port changed", ranged(one), ranged(moved), toRange(rangeOne), true, false},
		{"range, endpoint added", ranged(one), ranged(one, two), toRange(rangeOne), false, false},
		{"range, last endpoint removed", ranged(one), ranged(), toRange(rangeOne), true, true},
		{"range, first endpoint added, black hole", ranged(), ranged(one), toRange("10.96.0.1:60"), true, true},
		{"range, endpoint terminates but serves", ranged(one, two), with(ranged(), func(s *service) {
			s.endpoints = append(eps(two), ep(one, "terminating"))
		}), toRange(rangeOne), false, false},
		{"range, endpoint stops serving", ranged(one, two), with(ranged(), func(s *service) {
			s.endpoints = append(eps(two), ep(one, "gone"))
		}), toRange(rangeOne), true, true},
		{"range added, black hole", none, ranged(one), toRange("10.96.0.1:60"), true, true},
		{"range removed", ranged(one), none, toRange(rangeOne), true, true},
		{"range removed, not sent to it", ranged(one), none, toRange(rangeTwo), true, false},
		{"range removed, sent to another port of an endpoint", ranged(one), none, toRange("10.0.0.1:61"), true, false},
		{"range removed, black hole", ranged(one), none, toRange("10.96.0.1:60"), true, false},
		{"range becomes smaller", ranged(one), with(ranged(one), func(s *service) { s.last = 59 }), toRange(rangeOne), true, true},
		{"range becomes smaller, port stays", ranged(one), with(ranged(one), func(s *service) { s.last = 60 }), toRange(rangeOne), true, false},
		{"range becomes a single port", ranged(one), dns(one), toRange(rangeOne), true, true},
		{"single port becomes a range", dns(one), ranged(one), flow(client, vip, one), true, true},
		{"range shifted, endpoint removed", shifted(one, two), shifted(two), toRange("10.0.0.1:1060"), true, true},
		{"range shifted, endpoint stays", shifted(one, two), shifted(two), toRange("10.0.0.2:1060"), true, false},
		{"range is shifted now", ranged(one), shifted(one), toRange(rangeOne), true, true},
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

// TestFullDeltaExaminesAllFlows judges every flow to a known frontend after a full delta.
func TestFullDeltaExaminesAllFlows(t *testing.T) {
	node := everyAddress()
	p := newStaleFlows(tracker.IPv4)
	p.setNode(node)
	ch := change(nil, service{name: "a", cluster: "10.96.0.1:53", nodePort: 30053, endpoints: eps("10.0.0.1:53")}.compile(node))
	p.record(&ch)
	ch = change(nil, service{name: "b", cluster: "10.96.0.2:53"}.compile(node))
	p.record(&ch)
	p.clear()
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
	toRange, other := flow("10.9.0.1:1000", "10.96.0.2:60", "10.0.0.1:60"), flow("10.9.0.1:1000", "10.96.0.3:53", one)
	untranslated := flow("10.9.0.1:1000", "10.96.0.1:53", "10.96.0.1:53")
	b := newBed(t, toVIP, toNode, toRange, other, untranslated)
	b.table.local = []netip.Addr{addr("192.0.2.1")}
	b.apply(t, true)
	b.left(t, toVIP, toNode, toRange, other, untranslated)
	b.apply(t, false, change(nil, service{name: "vip", cluster: "10.96.0.1:53"}.compile(everyAddress())))
	b.left(t, toNode, toRange, other, untranslated)
	b.apply(t, false, change(nil, service{name: "node", cluster: "10.96.0.9:53", nodePort: 30053}.compile(everyAddress())))
	b.left(t, toRange, other, untranslated)
	b.apply(t, false, change(nil, service{name: "range", cluster: "10.96.0.2:50", last: 99}.compile(everyAddress())))
	b.left(t, other, untranslated)
	dumps := b.table.dumps
	b.apply(t, false, change(nil, service{name: "new", cluster: "10.96.0.4:53"}.compile(everyAddress())))
	if b.left(t, other, untranslated); b.table.dumps != dumps {
		t.Error("the table is read for a frontend without flows")
	}
}

// TestFullDeltaExaminesFlowsToRanges has no frontend with a single port.
func TestFullDeltaExaminesFlowsToRanges(t *testing.T) {
	p := newStaleFlows(tracker.IPv4)
	ch := change(nil, service{name: "a", cluster: "10.96.0.1:53", last: 99, endpoints: eps("10.0.0.1:53")}.compile(everyAddress()))
	p.record(&ch)
	p.clear()
	p.examineAll()
	if !p.pending() {
		t.Error("not pending")
	}
	stale := p.judge(&p.queue, nil)
	for src, want := range map[string]bool{"10.0.0.1:60": false, "10.0.0.7:60": true} {
		f := flow("10.9.0.1:1", "10.96.0.1:60", src)
		if stale(&f) != want {
			t.Errorf("sent to %s: stale is %v", src, !want)
		}
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
		p := newStaleFlows(tracker.IPv4)
		for _, ch := range []ruleset.Change{change(nil, a1), change(nil, b1)} {
			p.record(&ch)
		}
		p.clear()
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

// TestSinglePortWinsInRange adds a single port of another Service in a range, and removes it, as
// the only change and beside one of the range.
func TestSinglePortWinsInRange(t *testing.T) {
	node := everyAddress()
	const client, lb = "10.9.0.1:1", "192.0.2.1:60" // an address of the node
	compiled := func(s service, endpoints ...string) *ruleset.Port {
		s.endpoints = eps(endpoints...)
		return s.compile(node)
	}
	ports := service{name: "range", cluster: "10.96.0.1:50", last: 99, external: []string{"192.0.2.1"}}
	single := service{name: "single", cluster: "10.96.0.2:60", external: []string{"192.0.2.1"}}
	nodePort := service{name: "single", cluster: "10.96.0.2:53", nodePort: 60}
	viaRange, viaSingle, untranslated := flow(client, lb, "10.0.0.1:60"), flow(client, lb, "10.0.0.2:5300"), flow(client, lb, lb)
	r := compiled(ports, "10.0.0.1:1")
	for name, s := range map[string]service{"external IP": single, "NodePort": nodePort} {
		withEndpoint, without := compiled(s, "10.0.0.2:5300"), compiled(s)
		for _, c := range []struct {
			name    string
			before  []*ruleset.Port
			changes []ruleset.Change
			want    map[Flow]bool // whether a flow is stale
		}{
			{"added", []*ruleset.Port{r}, []ruleset.Change{change(nil, withEndpoint)}, map[Flow]bool{viaRange: true, viaSingle: false}},
			{"added without endpoints", []*ruleset.Port{r}, []ruleset.Change{change(nil, without)}, map[Flow]bool{viaRange: true}},
			{"removed", []*ruleset.Port{r, withEndpoint}, []ruleset.Change{change(withEndpoint, nil)}, map[Flow]bool{viaRange: false, viaSingle: true}},
			{"removed without endpoints", []*ruleset.Port{r, without}, []ruleset.Change{change(without, nil)}, map[Flow]bool{untranslated: true}},
			{"range added", []*ruleset.Port{withEndpoint}, []ruleset.Change{change(nil, r)}, map[Flow]bool{viaSingle: false}},
			{"range removed", []*ruleset.Port{r, withEndpoint}, []ruleset.Change{change(r, nil)}, map[Flow]bool{viaSingle: false}},
			{"in place of the range", []*ruleset.Port{r}, []ruleset.Change{change(r, nil), change(nil, without)}, map[Flow]bool{viaRange: true}},
			{"replaced by the range", []*ruleset.Port{withEndpoint}, []ruleset.Change{change(withEndpoint, nil), change(nil, r)}, map[Flow]bool{viaSingle: true}},
		} {
			for order := range 2 {
				t.Run(fmt.Sprintf("%s %s, order %d", name, c.name, order), func(t *testing.T) {
					p := newStaleFlows(tracker.IPv4)
					p.setNode(node)
					for _, s := range c.before {
						ch := change(nil, s)
						p.record(&ch)
					}
					p.clear()
					changes := slices.Clone(c.changes)
					if order == 1 {
						slices.Reverse(changes)
					}
					for _, ch := range changes {
						p.record(&ch)
					}
					stale := p.judge(&p.queue, []netip.Addr{addr("192.0.2.1")})
					for f, want := range c.want {
						if got := stale(&f); got != want {
							t.Errorf("sent to %v: stale is %v", f.ReplySrc, got)
						}
					}
				})
			}
		}
	}
}

// TestRangesMoveBetweenServices has one range grow into another, which shrinks or goes, in either
// order.
func TestRangesMoveBetweenServices(t *testing.T) {
	node := everyAddress()
	compiled := func(name string, first, last uint16, endpoint string) *ruleset.Port {
		s := service{name: name, cluster: fmt.Sprintf("10.96.0.%d:%d", len(name), first), last: last, external: []string{"198.51.100.1"}, endpoints: eps(endpoint)}
		return s.compile(node)
	}
	a, b := compiled("a", 10, 19, "10.0.0.1:1"), compiled("bb", 20, 29, "10.0.0.2:1")
	for name, changes := range map[string][]ruleset.Change{
		"into a part": {change(a, compiled("a", 10, 24, "10.0.0.1:1")), change(b, compiled("bb", 25, 29, "10.0.0.2:1"))},
		"into all":    {change(a, compiled("a", 10, 29, "10.0.0.1:1")), change(b, nil)},
		"in between":  {change(a, compiled("a", 22, 24, "10.0.0.1:1")), change(b, nil)},
	} {
		for range 2 {
			p := newStaleFlows(tracker.IPv4)
			for _, ch := range []ruleset.Change{change(nil, a), change(nil, b)} {
				p.record(&ch)
			}
			p.clear()
			for _, ch := range changes {
				p.record(&ch)
			}
			stale := p.judge(&p.queue, nil)
			for _, port := range []int{15, 23} {
				for n, endpoint := range []string{"10.0.0.1", "10.0.0.2"} {
					f := flow("10.9.0.1:1", fmt.Sprintf("198.51.100.1:%d", port), fmt.Sprintf("%s:%d", endpoint, port))
					// In the third case, no Service has port 15 any more.
					want := n == 1
					if port == 15 && name == "in between" {
						want = n == 0
					}
					if got := stale(&f); got != want {
						t.Errorf("%s: port %d sent to %s: stale is %v", name, port, endpoint, got)
					}
				}
			}
			slices.Reverse(changes)
		}
	}
}

// TestNodePortAddressesChange takes an address from those at which NodePorts answer.
func TestNodePortAddressesChange(t *testing.T) {
	all, some := everyAddress(), everyAddress()
	some.NodePorts4 = ruleset.NodePorts{Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")}}
	p := newStaleFlows(tracker.IPv4)
	p.setNode(all)
	ch := change(nil, service{name: "a", cluster: "10.96.0.1:53", nodePort: 30053, endpoints: eps("10.0.0.1:53")}.compile(all))
	p.record(&ch)
	p.clear()
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
	p := newStaleFlows(tracker.IPv4)
	stays := change(nil, service{name: "stays", cluster: "10.96.0.1:53", endpoints: eps("10.0.0.1:53")}.compile(node))
	p.record(&stays)
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

// TestQueuedRangesAreBounded records many ranges at one address without a successful clean-up.
func TestQueuedRangesAreBounded(t *testing.T) {
	t.Parallel()
	node := everyAddress()
	p := newStaleFlows(tracker.IPv4)
	for i := range 2 * maxRanges {
		s := service{name: fmt.Sprint(i), cluster: fmt.Sprintf("10.96.0.1:%d", 10*i+1), last: uint16(10*i + 5), endpoints: eps("10.0.0.2:53")}
		ch := change(nil, s.compile(node))
		p.record(&ch)
	}
	if n := len(p.queue.ranges); n > maxRanges || !p.queue.all {
		t.Errorf("%d ranges, all is %v", n, p.queue.all)
	}
	stale := p.judge(&p.queue, nil)
	for dst, want := range map[int]bool{11: true, 15: true, 16: false, 20: false, 15005: true} {
		f := flow("10.9.0.1:1", fmt.Sprintf("10.96.0.1:%d", dst), "10.0.0.7:53")
		if stale(&f) != want {
			t.Errorf("port %d: stale is %v", dst, !want)
		}
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
