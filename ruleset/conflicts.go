package ruleset

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// l4Key is the address, port and protocol of a [Frontend] or an endpoint. A NodePort has the unspecified address of
// its family. Without pointers and padding, large maps of it are small and fast.
type l4Key struct {
	addr  [16]byte // IPv4 addresses in their IPv6-mapped form
	port  uint16
	proto uint16
}

// l4KeyAt returns the key of a valid address without a zone. Protocols that the API does not define get one number;
// no [Port] has them.
func l4KeyAt(a netip.Addr, port uint16, proto v1.Protocol) l4Key {
	p := l4Key{addr: a.As16(), port: port}
	switch proto {
	case v1.ProtocolTCP:
		p.proto = 1
	case v1.ProtocolUDP:
		p.proto = 2
	case v1.ProtocolSCTP:
		p.proto = 3
	}
	return p
}

func l4KeyOf(s *Port, f *Frontend) l4Key {
	if f.Kind == KindNodePort {
		return nodePortKey(s.Key.Family, f.Port, s.Key.Protocol)
	}
	return l4KeyAt(f.Addr, f.Port, s.Key.Protocol)
}

func nodePortKey(f tracker.Family, port uint16, proto v1.Protocol) l4Key {
	if f == tracker.IPv6 {
		return l4KeyAt(netip.IPv6Unspecified(), port, proto)
	}
	return l4KeyAt(netip.IPv4Unspecified(), port, proto)
}

func frontendKeys(p *tracker.ServicePort) iter.Seq2[l4Key, Kind] {
	return func(yield func(l4Key, Kind) bool) {
		for kind, addr := range addresses(p) {
			var at l4Key
			if kind == KindNodePort {
				at = nodePortKey(p.Key.Family, p.NodePort, p.Key.Protocol)
			} else {
				at = l4KeyAt(addr, p.Port, p.Key.Protocol)
			}
			if !yield(at, kind) {
				return
			}
		}
	}
}

// uses yields the keys of the NodePorts in whose place p would use a port of the node: as health-check node port, in
// both families, or with an external or load-balancer IP that is an address of the node.
func (n *Node) uses(p *tracker.ServicePort) iter.Seq2[l4Key, Kind] {
	return func(yield func(l4Key, Kind) bool) {
		check := p.HealthCheckNodePort
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			if check != 0 && !yield(nodePortKey(f, check, v1.ProtocolTCP), kindHealthCheck) {
				return
			}
		}
		if check == p.Port && p.Key.Protocol == v1.ProtocolTCP {
			return
		}
		for kind, addr := range addresses(p) {
			if n.servesNodePorts(kind, addr) {
				yield(nodePortKey(p.Key.Family, p.Port, p.Key.Protocol), KindExternalIP)
				return
			}
		}
	}
}

func (n *Node) servesNodePorts(kind Kind, addr netip.Addr) bool {
	return (kind == KindExternalIP || kind == KindLoadBalancerIP) && slices.Contains(n.Info.Addresses, addr) &&
		n.NodePorts(tracker.FamilyOf(addr)).Allows(addr)
}

// sameFrontends reports whether a and b, ports of the same key, ask for the same frontends and health-check node
// port.
func sameFrontends(a, b *tracker.ServicePort) bool {
	return a == b || a != nil && b != nil &&
		a.ClusterIP == b.ClusterIP && a.Port == b.Port && a.NodePort == b.NodePort &&
		a.HealthCheckNodePort == b.HealthCheckNodePort &&
		slices.Equal(a.ExternalIPs, b.ExternalIPs) &&
		slices.Equal(a.LoadBalancerIPs, b.LoadBalancerIPs)
}

// ownership decides which Service owns a frontend that several ask for, in the order of the package documentation.
// The API allows several Services with the same external IP and port, and, while one object replaces another, with a
// frontend of any kind. External IPs come last because any user who may edit a Service chooses them. The result
// depends only on the contenders.
type ownership struct {
	port  func(id uint32) *tracker.ServicePort
	owner map[l4Key]contender
	// conflicts holds the other contenders in order, for frontends with several.
	conflicts map[l4Key][]contender
}

type contender struct {
	id   uint32
	kind Kind
}

func newOwnership(port func(id uint32) *tracker.ServicePort) ownership {
	return ownership{port: port, owner: map[l4Key]contender{}, conflicts: map[l4Key][]contender{}}
}

// compare orders contenders for the same frontend, the owner first.
func (c *ownership) compare(a, b contender) int {
	p, q := c.port(a.id), c.port(b.id)
	return cmp.Or(
		cmp.Compare(a.kind.rank(), b.kind.rank()),
		p.CompareAge(q),
		p.Key.Compare(q.Key))
}

// rank orders the kinds of frontends that can have the same address. NodePorts compete only with each other.
func (k Kind) rank() int {
	switch k {
	case KindClusterIP, kindHealthCheck:
		return 0
	case KindLoadBalancerIP:
		return 1
	}
	return 2
}

// add adds a contender. It returns the ID of the Service that loses the frontend, or 0.
func (c *ownership) add(at l4Key, n contender) (loser uint32) {
	o, taken := c.owner[at]
	switch {
	case !taken:
		c.owner[at] = n
		return 0
	case c.compare(n, o) < 0:
		c.owner[at] = n
		n, loser = o, o.id
	}
	r := c.conflicts[at]
	i, _ := slices.BinarySearchFunc(r, n, c.compare)
	c.conflicts[at] = slices.Insert(r, i, n)
	return loser
}

// remove removes the contender with the ID. It returns the ID of the Service that gains
// the frontend, or 0.
func (c *ownership) remove(at l4Key, id uint32) (winner uint32) {
	r := c.conflicts[at]
	if o := c.owner[at]; o.id == id {
		if len(r) == 0 {
			delete(c.owner, at)
			return 0
		}
		c.owner[at], winner = r[0], r[0].id
		r = slices.Delete(r, 0, 1)
	} else if i := slices.IndexFunc(r, func(x contender) bool { return x.id == id }); i >= 0 {
		r = slices.Delete(r, i, i+1)
	}
	if len(r) == 0 {
		delete(c.conflicts, at)
	} else {
		c.conflicts[at] = r
	}
	return winner
}

// at yields the contenders for a key, the owner first.
func (c *ownership) at(at l4Key) iter.Seq[contender] {
	return func(yield func(contender) bool) {
		if o, ok := c.owner[at]; ok && yield(o) {
			slices.Values(c.conflicts[at])(yield)
		}
	}
}

// contest recompiles the Services that want a port of the node.
func (e *Engine) contest(at l4Key) {
	e.recompile(e.ownership.owner[at].id)
	for c := range e.uses.at(at) {
		e.recompile(c.id)
	}
}

// holder returns the ID of the Service that keeps p from using a port of the node, or 0: the one that was created
// first. An external or load-balancer IP keeps no NodePort or health-check node port from being used, because it
// takes them at that address only, and hidden reports that.
func (e *Engine) holder(at l4Key, p *tracker.ServicePort, kind Kind) (id uint32, hidden bool) {
	earlier := func(o contender) bool {
		q := e.slots[o.id].port
		return q.Key.NamespacedName != p.Key.NamespacedName && cmp.Or(q.CompareAge(p), q.Key.Compare(p.Key)) < 0
	}
	if o, ok := e.ownership.owner[at]; ok && kind != KindNodePort && earlier(o) {
		return o.id, false
	}
	for o := range e.uses.at(at) {
		if (o.kind == kindHealthCheck || kind != KindExternalIP) && earlier(o) {
			return o.id, o.kind == KindExternalIP
		}
	}
	return 0, false
}
