package worldgen

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/tracker"
)

// params returns the parameters of a world like those of package conformance.
func params() Params {
	addr := func(four, six string) func(tracker.Family, int) netip.Addr {
		return func(f tracker.Family, n int) netip.Addr {
			if f == tracker.IPv4 {
				return netip.MustParseAddr(fmt.Sprintf("%s%d", four, n))
			}
			return netip.MustParseAddr(fmt.Sprintf("%s%x", six, n))
		}
	}
	pods := addr("10.244.1.", "fd00:10:244:1::")
	p := Params{
		Families:  []tracker.Family{tracker.IPv4, tracker.IPv6},
		Node:      tracker.NodeInfo{Name: "node", Zone: "zone-a", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}},
		ClusterIP: addr("10.96.0.", "fd00:96::"), ExternalIP: addr("203.0.113.", "2001:db8:e::"), LoadBalancerIP: addr("198.51.100.", "2001:db8:1b::"),
		Sources:   []string{"192.0.2.0/24", "2001:db8::/32"},
		Protocols: []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP},
		Affinity:  true, Weights: true, Hash: true,
	}
	for n := range 6 {
		p.Backends = append(p.Backends, Backend{Node: []string{"node", "other"}[n%2], Addr: func(f tracker.Family) netip.Addr { return pods(f, n+1) }, Ports: []uint16{8080, 9090}})
	}
	own := func(f tracker.Family) netip.Addr {
		return p.Node.Addresses[slices.IndexFunc(p.Node.Addresses, func(a netip.Addr) bool { return tracker.FamilyOf(a) == f })]
	}
	p.Backends = append(p.Backends, Backend{Node: "node", Addr: own, Ports: []uint16{8080}})
	return p
}

// world returns the steps of a seed.
func world(seed uint64) Steps {
	g := New(seed, params())
	out := Steps{g.Start()}
	for range 4 {
		out = append(out, g.Step())
	}
	return out
}

// TestWorldsHaveUnusualCases generates the worlds in which the backends are tested
// and counts the worlds with each unusual case.
func TestWorldsHaveUnusualCases(t *testing.T) {
	const worlds = 50
	found := map[string]int{}
	for seed := range uint64(worlds) {
		for c := range corners(world(seed + 1)) {
			found[c]++
		}
	}
	for _, c := range strings.Split(`type ClusterIP, type NodePort, type LoadBalancer, type ExternalName, headless, type changed,
		one family, both families, one port number in two protocols, twenty ports, source ranges, IP mode Proxy, LoadBalancer without address,
		external policy Local, internal policy Local, prefers local endpoints, health check node port, affinity, hash by address, hash by address and port,
		external IP of two Services, load balancer IP of two Services, NodePort in two protocols, NodePort of two Services,
		Service without slices, Service without endpoints, all terminating, some terminating, neither ready nor serving,
		zone hints, hints of some only, node hints, endpoint at the node's address, endpoint in two slices, two slices, weight 0, weight above 1,
		Service deleted, deleted Service comes back, slice deleted, slice before its Service, node without zone, node in another zone`, ",") {
		c = strings.TrimSpace(c)
		// One world in ten, so that no case depends on a single seed.
		if found[c] < worlds/10 {
			t.Errorf("%q is in %d worlds of %d", c, found[c], worlds)
		}
		delete(found, c)
	}
	for c := range found {
		t.Errorf("%q is found and not in the list", c)
	}
}

// corners returns the unusual cases of a world, at any step.
func corners(steps Steps) map[string]bool {
	out := map[string]bool{}
	services, slicesOf := map[string]*v1.Service{}, map[string]*discovery.EndpointSlice{}
	gone := map[string]bool{}
	note := func(c string, is bool) {
		if is {
			out[c] = true
		}
	}
	for n, step := range steps {
		for _, o := range step {
			switch {
			case o.SetService != nil:
				s := o.SetService
				old := services[s.Name]
				note("type changed", old != nil && old.Spec.Type != s.Spec.Type)
				note("deleted Service comes back", gone[s.Name])
				services[s.Name] = s
			case o.DeleteService != nil:
				note("Service deleted", true)
				gone[o.DeleteService.Name] = true
				delete(services, o.DeleteService.Name)
			case o.SetSlice != nil:
				note("slice before its Service", services[o.SetSlice.Labels[discovery.LabelServiceName]] == nil)
				slicesOf[o.SetSlice.Name] = o.SetSlice
			case o.DeleteSlice != nil:
				note("slice deleted", true)
				delete(slicesOf, o.DeleteSlice.Name)
			case o.SetNode != nil:
				note("node without zone", o.SetNode.Zone == "")
				note("node in another zone", o.SetNode.Zone == "zone-b")
			}
			if n == 0 {
				continue // the first step is incomplete until its end
			}
		}
		ofServices(services, note)
		for name := range services {
			for _, f := range []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6} {
				ofEndpoints(slices.DeleteFunc(slices.Collect(maps.Values(slicesOf)), func(es *discovery.EndpointSlice) bool {
					return es.AddressType != f || es.Labels[discovery.LabelServiceName] != name
				}), note)
			}
		}
	}
	return out
}

func ofServices(services map[string]*v1.Service, note func(string, bool)) {
	external, balancer := map[string]string{}, map[string]string{}
	nodePorts := map[int32]v1.ServicePort{}
	owner := map[int32]string{}
	for _, s := range services {
		note("type "+string(s.Spec.Type), true)
		note("headless", s.Spec.ClusterIP == v1.ClusterIPNone)
		note("one family", len(s.Spec.IPFamilies) == 1)
		note("both families", len(s.Spec.IPFamilies) == 2)
		note("twenty ports", len(s.Spec.Ports) == 20)
		note("source ranges", len(s.Spec.LoadBalancerSourceRanges) != 0)
		note("external policy Local", s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal)
		note("internal policy Local", s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == v1.ServiceInternalTrafficPolicyLocal)
		note("health check node port", s.Spec.HealthCheckNodePort != 0)
		note("affinity", s.Spec.SessionAffinity == v1.ServiceAffinityClientIP)
		var port tracker.ServicePort
		if err := OnService(s, nil, &port); err != nil {
			panic(err)
		}
		note("prefers local endpoints", port.PreferLocal)
		note("hash by address", port.Hash == tracker.HashSource)
		note("hash by address and port", port.Hash == tracker.HashSourcePort)
		note("LoadBalancer without address", s.Spec.Type == v1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) == 0)
		for _, ip := range s.Spec.ExternalIPs {
			note("external IP of two Services", external[ip] != "")
			external[ip] = s.Name
		}
		for _, in := range s.Status.LoadBalancer.Ingress {
			note("IP mode Proxy", in.IPMode != nil && *in.IPMode == v1.LoadBalancerIPModeProxy)
			note("load balancer IP of two Services", balancer[in.IP] != "")
			balancer[in.IP] = s.Name
		}
		protocol := map[int32]v1.Protocol{}
		for _, p := range s.Spec.Ports {
			other, is := protocol[p.Port]
			note("one port number in two protocols", is && other != p.Protocol)
			protocol[p.Port] = p.Protocol
			if p.NodePort != 0 {
				q, is := nodePorts[p.NodePort]
				note("NodePort in two protocols", is && q.Protocol != p.Protocol)
				note("NodePort of two Services", is && owner[p.NodePort] != s.Name)
				nodePorts[p.NodePort], owner[p.NodePort] = p, s.Name
			}
		}
	}
}

// ofEndpoints notes the unusual cases of a Service's endpoints in one family.
func ofEndpoints(list []*discovery.EndpointSlice, note func(string, bool)) {
	note("Service without slices", len(list) == 0)
	note("two slices", len(list) == 2)
	in := map[string]string{}
	var all, terminating, dead, zones, nodes int
	for _, es := range list {
		for i, ep := range es.Endpoints {
			a := ep.Addresses[0]
			note("endpoint in two slices", in[a] != "" && in[a] != es.Name)
			in[a] = es.Name
			all++
			if *ep.Conditions.Terminating {
				terminating++
			}
			if !*ep.Conditions.Ready && !*ep.Conditions.Serving {
				dead++
			}
			if h := ep.Hints; h != nil {
				zones, nodes = zones+min(1, len(h.ForZones)), nodes+min(1, len(h.ForNodes))
			}
			note("endpoint at the node's address", a == "192.0.2.1" || a == "2001:db8::1")
			e := tracker.Endpoint{Weight: 1}
			if err := OnEndpoint(es, &es.Endpoints[i], &e); err != nil {
				panic(err)
			}
			note("weight 0", e.Weight == 0)
			note("weight above 1", e.Weight > 1)
		}
	}
	note("Service without endpoints", len(list) != 0 && all == 0)
	note("all terminating", all != 0 && terminating == all)
	note("some terminating", terminating != 0 && terminating < all)
	note("neither ready nor serving", dead != 0)
	note("zone hints", all != 0 && zones == all)
	note("node hints", nodes != 0)
	note("hints of some only", zones != 0 && zones < all)
}

// TestSameSeedMakesSameWorld generates worlds twice: they must be equal, and differ
// from those of another seed.
func TestSameSeedMakesSameWorld(t *testing.T) {
	for seed := range uint64(20) {
		a, b, c := world(seed).String(), world(seed).String(), world(seed+1).String()
		if a != b {
			t.Errorf("seed %d makes two worlds:\n%s\n%s", seed, a, b)
		}
		if a == c {
			t.Errorf("seeds %d and %d make the same world", seed, seed+1)
		}
	}
}

// TestMinimizeKeepsFailingChanges lets worlds fail because of two of their changes.
// Only these must remain.
func TestMinimizeKeepsFailingChanges(t *testing.T) {
	for seed := range uint64(20) {
		w := world(seed)
		a, b := w[0][1].String(), w[0][len(w[0])-1].String()
		fails := func(s Steps) bool { return strings.Contains(s.String(), a) && strings.Contains(s.String(), b) }
		got := Minimize(w, fails, func() bool { return false })
		if !fails(got) || got.Ops() != 2 || len(got) != 1 {
			t.Errorf("seed %d: of %d changes these remain:\n%s", seed, w.Ops(), got)
		}
		if stopped := Minimize(w, fails, func() bool { return true }); stopped.Ops() != w.Ops() {
			t.Errorf("seed %d: it continued after stop reported true", seed)
		}
	}
}
