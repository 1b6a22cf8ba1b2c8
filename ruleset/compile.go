package ruleset

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// Compile answers every question of Service semantics for one Service port on
// node n: which endpoints are used, where the port is reached, and what happens
// to a connection there. It depends on nothing but its arguments and does not
// change them; the result shares their slices. Its ID is 0, and it has every
// frontend the port asks for, also those another Service has too: giving out
// numbers and settling such conflicts is the [Engine]'s work.
//
// Of n it uses Info, LocalTraffic and MasqueradeAll; nil stands for the zero
// Node. It returns nil if p.Port is nil. The cost is that of [tracker.Select] and
// a few steps for each frontend.
func Compile(p tracker.PortState, n *Node, o tracker.TopologyOptions) *Service {
	if p.Port == nil {
		return nil
	}
	if n == nil {
		n = &Node{}
	}
	var s *Service
	if p.Port.ExternallyAccessible() {
		s = &Service{}
		s.Frontends = make([]Frontend, 0, 2+len(p.Port.ExternalIPs)+len(p.Port.LoadBalancerIPs))
	} else {
		// By far the most common number costs one allocation.
		one := &struct {
			service  Service
			frontend [1]Frontend
		}{}
		s = &one.service
		s.Frontends = one.frontend[:0]
	}
	s.Key = p.Port.Key
	s.Port = p.Port
	s.Endpoints = p.Endpoints
	s.uniform = uniform(p.Endpoints)
	s.Selection = tracker.Select(p.Port, weighted(p.Endpoints, s.uniform), n.Info, o)
	s.Frontends = frontends(s.Frontends, p.Port, &s.Selection, n)
	return s
}

// weighted returns the endpoints that may take new connections as far as their
// weights go. One of weight 0 counts as one that neither is ready nor serves.
func weighted(eps []*tracker.Endpoint, uniform bool) []*tracker.Endpoint {
	none := func(ep *tracker.Endpoint) bool { return ep != nil && ep.Weight == 0 }
	if uniform && (len(eps) == 0 || eps[0] != nil && eps[0].Weight != 0) || !slices.ContainsFunc(eps, none) {
		return eps
	}
	return slices.DeleteFunc(slices.Clone(eps), none)
}

// frontends appends to out where p is reached.
func frontends(out []Frontend, p *tracker.ServicePort, sel *tracker.Selection, n *Node) []Frontend {
	external := external(p, sel)
	var sources []netip.Prefix
	if len(p.LoadBalancerIPs) != 0 {
		sources = allowedSources(p.SourceRanges)
	}
	selfAllowed := len(sources) != 0 && containsNode(sources, n)

	for kind, addr := range addresses(p) {
		f := external
		switch kind {
		case ClusterIP:
			f = internal(p, sel, n)
		case NodePort:
			f.Kind, f.Port = NodePort, p.NodePort
			out = append(out, f)
			continue
		case LoadBalancerIP:
			f.Sources = sources
			if selfAllowed {
				f.Sources = withOwn(sources, addr)
			}
		}
		f.Kind, f.Addr, f.Port = kind, addr, p.Port
		out = append(out, f)
	}
	return out
}

// addresses yields the addresses at which p is reached, each once, in the order
// of [Service.Frontends]; the NodePort, if there is one, comes last with the zero
// Addr. They depend on nothing but p.
//
// An address that is given as both an external and a load-balancer IP is a
// load-balancer IP, because only that restricts its sources.
func addresses(p *tracker.ServicePort) iter.Seq2[Kind, netip.Addr] {
	return func(yield func(Kind, netip.Addr) bool) {
		if p.ClusterIP.IsValid() && !yield(ClusterIP, p.ClusterIP) {
			return
		}
		if !p.ExternallyAccessible() {
			return
		}
		usable := func(a netip.Addr) bool {
			return a.IsValid() && !a.IsUnspecified() && a != p.ClusterIP
		}
		self := func(a netip.Addr) netip.Addr { return a }
		lb, ext := newFinder(p.LoadBalancerIPs, self), newFinder(p.ExternalIPs, self)
		for i, a := range p.ExternalIPs {
			if usable(a) && ext.first(a) == i && !lb.has(a) && !yield(ExternalIP, a) {
				return
			}
		}
		for i, a := range p.LoadBalancerIPs {
			if usable(a) && lb.first(a) == i && !yield(LoadBalancerIP, a) {
				return
			}
		}
		if p.NodePort != 0 {
			yield(NodePort, netip.Addr{})
		}
	}
}

// internal is what happens at the cluster IP.
func internal(p *tracker.ServicePort, sel *tracker.Selection, n *Node) Frontend {
	var f Frontend
	if p.InternalLocal {
		f.Target = local(sel)
	} else {
		f.Target = cluster(sel)
	}
	f.Internal = f.Target
	switch {
	case n.MasqueradeAll:
		f.Masquerade = MasqueradeAlways
	case n.LocalTraffic.Detects(p.Key.Family):
		f.Masquerade = MasqueradeNotPods
	}
	return f
}

// external is what happens at every other address.
func external(p *tracker.ServicePort, sel *tracker.Selection) Frontend {
	if p.ExternalLocal {
		// The load balancer chose this node for having endpoints, and they see the
		// client's address. A connection from this node or its pods never met the
		// load balancer, so it may go where the load balancer could have sent it.
		return Frontend{Target: local(sel), Internal: cluster(sel), Masquerade: MasqueradeNode}
	}
	t := cluster(sel)
	return Frontend{Target: t, Internal: t, Masquerade: MasqueradeAlways}
}

// cluster is what a policy of Cluster comes to.
func cluster(sel *tracker.Selection) Target {
	if len(sel.Cluster) != 0 {
		return ToCluster
	}
	return none(sel)
}

// local is what a policy of Local comes to.
func local(sel *tracker.Selection) Target {
	if len(sel.Local) != 0 {
		return ToLocal
	}
	return none(sel)
}

// none is what happens where there is no endpoint to use.
func none(sel *tracker.Selection) Target {
	if sel.HasAny {
		return Drop
	}
	return Reject
}

// allowedSources returns the sources that ranges let in, nil for every source.
func allowedSources(ranges []netip.Prefix) []netip.Prefix {
	for _, r := range ranges {
		if r.IsValid() && r.Bits() == 0 {
			return nil
		}
	}
	return reducePrefixes(ranges)
}

// containsNode reports whether one of the node's own addresses is in sources.
func containsNode(sources []netip.Prefix, n *Node) bool {
	return slices.ContainsFunc(n.Info.Addresses, func(a netip.Addr) bool {
		return containsAddr(sources, a.Unmap())
	})
}

// withOwn adds the frontend's own address to its sources. A node that is allowed
// may reach its own load balancer with the load balancer's address as source:
// where the address is bound to the node, as some load balancers do, the kernel
// chooses it.
func withOwn(sources []netip.Prefix, own netip.Addr) []netip.Prefix {
	if containsAddr(sources, own) {
		return sources
	}
	return reducePrefixes(append(slices.Clip(sources), single(own)))
}
