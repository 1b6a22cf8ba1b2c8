package endpointslice

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/complaint"
)

// maxEndpoints is the maximum number of endpoints (addresses times ports) that a [Cache] stores for one
// EndpointSlice. The API allows 1,000 addresses and 20,000 ports. The last ports in the order of their names are left
// out.
const maxEndpoints = 20_000

// parsedEndpoint is an endpoint of the slice being parsed. The port of its Addr
// changes while parse iterates over the ports.
type parsedEndpoint struct {
	Endpoint
	index int // in the slice's Endpoints
}

// parsedPort is a valid port of the slice being parsed.
type parsedPort struct {
	name     string
	protocol v1.Protocol
	number   uint16
}

func (p parsedPort) compare(o parsedPort) int {
	return cmp.Or(
		strings.Compare(p.name, o.name),
		strings.Compare(string(p.protocol), string(o.protocol)),
		cmp.Compare(p.number, o.number),
	)
}

// parsePorts returns the valid ports, sorted and without duplicates.
func (c *Cache[E]) parsePorts(s *discovery.EndpointSlice) []parsedPort {
	out := c.numbers
	for i := range s.Ports {
		p := &s.Ports[i]
		if p.Name == nil {
			c.leave(LeftOut{Reason: ReasonPortName}, "port %d has a nil name", i)
			continue
		}
		if p.Port == nil || *p.Port == 0 {
			c.leave(LeftOut{Reason: ReasonNoPortNumber, Port: p.Name, Expected: true}, "port %q has no number", complaint.Value(*p.Name))
			continue
		}
		if *p.Port < 0 || *p.Port > 65535 {
			c.leave(LeftOut{Reason: ReasonPortNumber, Port: p.Name}, "port %q: number %d is out of range", complaint.Value(*p.Name), *p.Port)
			continue
		}
		proto := v1.ProtocolTCP
		if p.Protocol != nil && *p.Protocol != "" {
			// Use a constant, so that the object's string is not kept.
			switch *p.Protocol {
			case v1.ProtocolTCP:
			case v1.ProtocolUDP:
				proto = v1.ProtocolUDP
			case v1.ProtocolSCTP:
				proto = v1.ProtocolSCTP
			default:
				c.leave(LeftOut{Reason: ReasonProtocol, Port: p.Name}, "port %q: unknown protocol %q", complaint.Value(*p.Name), complaint.Value(*p.Protocol))
				continue
			}
		}
		out = append(out, parsedPort{c.interned.name(*p.Name), proto, uint16(*p.Port)})
	}
	slices.SortFunc(out, parsedPort.compare)
	c.numbers = slices.Compact(out)
	return c.numbers
}

// parseEndpoints returns the valid endpoints, sorted by address and without
// duplicates.
func (c *Cache[E]) parseEndpoints(s *discovery.EndpointSlice) []parsedEndpoint {
	out := slices.Grow(c.parsed, len(s.Endpoints))
	for i := range s.Endpoints {
		ep := &s.Endpoints[i]
		if len(ep.Addresses) == 0 {
			c.leave(LeftOut{Reason: ReasonAddress}, "endpoint %d has no address", i)
			continue
		}
		a, err := ParseAddr(ep.Addresses[0])
		if err != nil {
			c.leave(LeftOut{Reason: ReasonAddress}, "endpoint %d: %w", i, err)
			continue
		}
		if a.Is4() != (s.AddressType == discovery.AddressTypeIPv4) {
			c.leave(LeftOut{Reason: ReasonFamilyMismatch}, "endpoint %d: %s in a slice of type %s", i, a, s.AddressType)
			continue
		}
		if !IsUnicast(a) {
			c.leave(LeftOut{Reason: ReasonAddress}, "endpoint %d: %s is not a unicast address", i, a)
			continue
		}
		if len(ep.Addresses) > 1 {
			c.leave(LeftOut{Reason: ReasonFurtherAddress, Expected: true}, "endpoint %d has %d addresses; only the first is used", i, len(ep.Addresses))
		}
		// Fill the element in place: benchmarks show the cost of copying a struct of
		// this size.
		out = append(out, parsedEndpoint{})
		p := &out[len(out)-1]
		p.index = i
		p.Addr = netip.AddrPortFrom(a, 0)
		p.Ready = ep.Conditions.Ready == nil || *ep.Conditions.Ready
		p.Serving = ep.Conditions.Serving == nil || *ep.Conditions.Serving
		p.Terminating = ep.Conditions.Terminating != nil && *ep.Conditions.Terminating
		if ep.NodeName != nil {
			p.Node = c.interned.name(*ep.NodeName)
		}
		if ep.Zone != nil {
			p.Zone = c.interned.name(*ep.Zone)
		}
		if ep.Hints != nil {
			for _, h := range ep.Hints.ForNodes {
				c.interned.list = append(c.interned.list, h.Name)
			}
			p.ForNodes = c.interned.set()
			for _, h := range ep.Hints.ForZones {
				c.interned.list = append(c.interned.list, h.Name)
			}
			p.ForZones = c.interned.set()
		}
	}
	c.parsed = out
	if !slices.IsSortedFunc(out, compareParsed) {
		slices.SortStableFunc(out, compareParsed)
	}
	return slices.CompactFunc(out, func(a, b parsedEndpoint) bool {
		if a.Addr != b.Addr {
			return false
		}
		c.leave(LeftOut{Reason: ReasonDuplicate, Expected: true}, "endpoint %d repeats the address %s of another", a.index, a.Addr.Addr())
		return true
	})
}

// compareParsed orders endpoints by address, the preferred one of several with the same address first, whatever their
// positions in the slice.
func compareParsed(a, b parsedEndpoint) int {
	if c := a.Addr.Compare(b.Addr); c != 0 {
		return c
	}
	return cmp.Or(
		cmp.Compare(b.rank(), a.rank()),
		strings.Compare(a.Node, b.Node),
		strings.Compare(a.Zone, b.Zone),
	)
}
