package ruleset

import (
	"iter"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// place is where a [Frontend] is. A NodePort's is at the unspecified address of
// its family, which is no other frontend's. It is laid out to be small and quickly
// hashed, with no pointers and no padding: there is a map of all there are.
type place struct {
	addr  [16]byte // IPv4 addresses in their IPv6-mapped form
	port  uint16
	proto uint16
}

// placeAt returns the place of a valid address without a zone. Protocols that are
// not the API's are all the same here, but have no [Service] either.
func placeAt(a netip.Addr, port uint16, proto v1.Protocol) place {
	p := place{addr: a.As16(), port: port}
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

func placeOf(s *Service, f *Frontend) place {
	if f.Kind == NodePort {
		return nodePortPlace(s.Key.Family, f.Port, s.Key.Protocol)
	}
	return placeAt(f.Addr, f.Port, s.Key.Protocol)
}

func nodePortPlace(f tracker.Family, port uint16, proto v1.Protocol) place {
	if f == tracker.IPv6 {
		return placeAt(netip.IPv6Unspecified(), port, proto)
	}
	return placeAt(netip.IPv4Unspecified(), port, proto)
}

// places yields where p asks to be reached.
func places(p *tracker.ServicePort) iter.Seq2[place, Kind] {
	return func(yield func(place, Kind) bool) {
		for kind, addr := range addresses(p) {
			var at place
			if kind == NodePort {
				at = nodePortPlace(p.Key.Family, p.NodePort, p.Key.Protocol)
			} else {
				at = placeAt(addr, p.Port, p.Key.Protocol)
			}
			if !yield(at, kind) {
				return
			}
		}
	}
}

// samePlaces reports whether a and b, ports of the same key, ask for the same
// places.
func samePlaces(a, b *tracker.ServicePort) bool {
	return a == b || a != nil && b != nil &&
		a.ClusterIP == b.ClusterIP && a.Port == b.Port && a.NodePort == b.NodePort &&
		slices.Equal(a.ExternalIPs, b.ExternalIPs) &&
		slices.Equal(a.LoadBalancerIPs, b.LoadBalancerIPs)
}

// claims settles which Service has a place that several ask for. Nothing in the
// API forbids two Services the same external IP and port, and while an object's
// deletion and another's creation are both in flight the same holds for every
// other kind. Backends' maps have room for one.
//
// A cluster IP wins over anything else, so that nobody can take over another's
// cluster IP by an external IP; then the lowest key wins. The order depends on
// nothing but the claims, so every node and every restart comes to the same.
type claims struct {
	key   func(id uint32) tracker.Key
	owner map[place]claim
	// rivals holds, for the few places that have any, the others in order.
	rivals map[place][]claim
}

type claim struct {
	id   uint32
	kind Kind
}

func newClaims(key func(id uint32) tracker.Key) claims {
	return claims{key: key, owner: map[place]claim{}, rivals: map[place][]claim{}}
}

func (c *claims) compare(a, b claim) int {
	if (a.kind == ClusterIP) != (b.kind == ClusterIP) {
		if a.kind == ClusterIP {
			return -1
		}
		return 1
	}
	return c.key(a.id).Compare(c.key(b.id))
}

// add enters a claim. It returns the Service that loses the place by it, or 0.
func (c *claims) add(at place, n claim) (loser uint32) {
	o, taken := c.owner[at]
	switch {
	case !taken:
		c.owner[at] = n
		return 0
	case c.compare(n, o) < 0:
		c.owner[at] = n
		n, loser = o, o.id
	}
	r := c.rivals[at]
	i, _ := slices.BinarySearchFunc(r, n, c.compare)
	c.rivals[at] = slices.Insert(r, i, n)
	return loser
}

// remove takes back the claim of id. It returns the Service that gains the place
// by it, or 0.
func (c *claims) remove(at place, id uint32) (winner uint32) {
	r := c.rivals[at]
	if o := c.owner[at]; o.id == id {
		if len(r) == 0 {
			delete(c.owner, at)
			return 0
		}
		c.owner[at], winner = r[0], r[0].id
		r = slices.Delete(r, 0, 1)
	} else if i := slices.IndexFunc(r, func(x claim) bool { return x.id == id }); i >= 0 {
		r = slices.Delete(r, i, i+1)
	}
	if len(r) == 0 {
		delete(c.rivals, at)
	} else {
		c.rivals[at] = r
	}
	return winner
}
