package ruleset

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/cidr"
	"github.com/go-proxier/proxier/tracker"
)

// Compile compiles one Service port for node n. It depends only on its arguments and does not change them; the result
// shares their slices. The ID of the result is 0. The result has every frontend that the port asks for: the [Engine]
// assigns IDs and resolves conflicts.
//
// Compile uses the fields Info, LocalTraffic and MasqueradeAll of n. Nil means the zero Node. p.Port and the
// endpoints must not be nil. Compile costs a call of [tracker.Select] and a few steps per frontend.
func Compile(p tracker.PortState, n *Node) *Port {
	if n == nil {
		n = &Node{}
	}
	var s *Port
	if p.Port.ExternallyAccessible() {
		s = &Port{}
		s.Frontends = make([]Frontend, 0, 2+len(p.Port.ExternalIPs)+len(p.Port.LoadBalancerIPs))
	} else {
		// Most Services have one frontend: use one allocation.
		one := &struct {
			service  Port
			frontend [1]Frontend
		}{}
		s = &one.service
		s.Frontends = one.frontend[:0]
	}
	s.Key = p.Port.Key
	s.Spec = p.Port
	s.Endpoints = p.Endpoints
	s.uniform = uniform(p.Endpoints)
	s.Selection = tracker.Select(p.Port, weighted(p.Endpoints, s.uniform), n.Info)
	s.Frontends = frontends(s.Frontends, p.Port, &s.Selection, n)
	return s
}

// weighted returns the endpoints of non-zero weight. Others count as neither ready
// nor serving.
func weighted(eps []*tracker.Endpoint, uniform bool) []*tracker.Endpoint {
	none := func(ep *tracker.Endpoint) bool { return ep.Weight == 0 }
	if uniform && (len(eps) == 0 || eps[0].Weight != 0) || !slices.ContainsFunc(eps, none) {
		return eps
	}
	return slices.DeleteFunc(slices.Clone(eps), none)
}

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
		case KindClusterIP:
			f = internal(p, sel, n)
		case KindNodePort:
			f.Kind, f.Port = KindNodePort, p.NodePort
			out = append(out, f)
			continue
		case KindLoadBalancerIP:
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

// addresses yields the addresses of p, each once, in the order of [Port].Frontends. The NodePort comes last with the
// zero Addr. An address that is both an external and a load-balancer IP counts as a load-balancer IP, because only
// that kind restricts its sources.
func addresses(p *tracker.ServicePort) iter.Seq2[Kind, netip.Addr] {
	return func(yield func(Kind, netip.Addr) bool) {
		if p.ClusterIP.IsValid() && !yield(KindClusterIP, p.ClusterIP) {
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
			if usable(a) && ext.first(a) == i && !lb.has(a) && !yield(KindExternalIP, a) {
				return
			}
		}
		for i, a := range p.LoadBalancerIPs {
			if usable(a) && lb.first(a) == i && !yield(KindLoadBalancerIP, a) {
				return
			}
		}
		if p.NodePort != 0 {
			yield(KindNodePort, netip.Addr{})
		}
	}
}

// internal returns the rules of the cluster IP.
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

// external returns the rules of all other addresses.
func external(p *tracker.ServicePort, sel *tracker.Selection) Frontend {
	if p.ExternalLocal {
		// The load balancer chose this node because it has endpoints, and they see the client's address. Connections
		// from this node or its pods did not pass the load balancer and may use every endpoint.
		return Frontend{Target: local(sel), Internal: cluster(sel), Masquerade: MasqueradeNode}
	}
	t := cluster(sel)
	if p.PreferLocal && prefersLocal(sel) {
		t = TargetLocal
	}
	return Frontend{Target: t, Internal: t, Masquerade: MasqueradeAlways}
}

// prefersLocal reports whether endpoints on this node are as good as others: some are ready, or none is ready
// anywhere.
func prefersLocal(sel *tracker.Selection) bool {
	return len(sel.Local) != 0 && (sel.Local[0].Ready || len(sel.Cluster) == 0 || !sel.Cluster[0].Ready)
}

// cluster returns the target of a policy of Cluster.
func cluster(sel *tracker.Selection) Target {
	if len(sel.Cluster) != 0 {
		return TargetCluster
	}
	return none(sel)
}

// local returns the target of a policy of Local.
func local(sel *tracker.Selection) Target {
	if len(sel.Local) != 0 {
		return TargetLocal
	}
	return none(sel)
}

// none returns the target if there is no usable endpoint.
func none(sel *tracker.Selection) Target {
	if sel.HasAny {
		return TargetDrop
	}
	return TargetReject
}

func allowedSources(ranges []netip.Prefix) []netip.Prefix {
	for _, r := range ranges {
		if r.IsValid() && r.Bits() == 0 {
			return nil
		}
	}
	return cidr.Reduce(ranges)
}

func containsNode(sources []netip.Prefix, n *Node) bool {
	return slices.ContainsFunc(n.Info.Addresses, func(a netip.Addr) bool {
		return cidr.Contain(sources, a.Unmap())
	})
}

// withOwn adds the frontend's own address to its sources, if the node is allowed: some load balancers bind the
// address to the node, and the kernel then chooses it as the source.
func withOwn(sources []netip.Prefix, own netip.Addr) []netip.Prefix {
	if cidr.Contain(sources, own) {
		return sources
	}
	return cidr.Reduce(append(slices.Clip(sources), single(own)))
}

// On returns the Service as node n has it: with the same ID, the same frontends and the pools that n may use. A
// process that computes the rules of several nodes calls it; see package placement. Nil stays nil.
func (s *Port) On(n *Node) *Port {
	if s == nil {
		return nil
	}
	out := Compile(tracker.PortState{Port: s.Spec, Endpoints: s.Endpoints}, n)
	out.ID = s.ID
	out.Frontends = slices.DeleteFunc(out.Frontends, func(f Frontend) bool {
		return !slices.ContainsFunc(s.Frontends, func(o Frontend) bool { return o.Addr == f.Addr && o.Port == f.Port })
	})
	return out
}

// On returns the change of the Service's rules on another node: Old and New as [Port.On] returns them, and the Fields
// in which they differ. After a failed attempt, Fields stays FieldAll.
func (c Change) On(n *Node) Change {
	out := c
	out.Old, out.New = c.Old.On(n), c.New.On(n)
	if c.Fields != FieldAll {
		out.Fields = diff(out.Old, out.New)
	}
	return out
}
