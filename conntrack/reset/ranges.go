package reset

import (
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// lostRange is an endpoint that vanished from a frontend with a range of ports. An element for each
// port would be up to 65,535. So the pairs are those of the connections in the table of connection
// tracking when the delay has passed: no connection is new then.
type lostRange struct {
	frontend *ruleset.Frontend
	endpoint *tracker.Endpoint
	due      time.Time
}

// has reports whether a pair is of a connection through the range to the endpoint.
func (l *lostRange) has(w pair) bool {
	f, port := l.frontend, w.frontend.Port()
	return w.frontend.Addr() == f.Addr && f.Matches(port) && w.endpoint == f.Endpoint(l.endpoint, port)
}

// targets returns the endpoints' first and last port for a range.
func targets(f *ruleset.Frontend) (first, last uint16) {
	return f.TargetPort, f.TargetPort + f.LastPort - f.Port
}

// sendsTo reports whether a range of s sends to one of the endpoints' ports from first to last.
func sendsTo(s *ruleset.Service, first, last uint16) bool {
	return slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool {
		from, to := targets(&f)
		return f.IsRange() && from <= last && first <= to
	})
}

// hasRange reports whether s is a TCP Service with a range.
func hasRange(s *ruleset.Service) bool {
	return s != nil && s.Key.Protocol == v1.ProtocolTCP && slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.IsRange() })
}

// noteRanges records whether a Service has ranges, as acknowledged.
func (p *plan) noteRanges(c *ruleset.Change) {
	switch {
	case hasRange(c.New):
		if p.ranged == nil {
			p.ranged = map[tracker.Key]*ruleset.Service{}
		}
		p.ranged[c.Key] = c.New
	case len(p.ranged) != 0:
		delete(p.ranged, c.Key)
	}
}

// returningTo forgets the endpoints that the ranges of s have again and returns the written pairs of
// these.
func (p *plan) returningTo(s *ruleset.Service) (out []pair) {
	has := make(map[netip.Addr]struct{}, len(s.Endpoints))
	for _, ep := range s.Endpoints {
		has[ep.Addr.Addr()] = struct{}{}
	}
	for endpoint := range p.endpoints {
		if _, ok := has[endpoint.Addr()]; ok && sendsTo(s, endpoint.Port(), endpoint.Port()) {
			out = append(out, p.remove(endpoint)...)
		}
	}
	p.lost = slices.DeleteFunc(p.lost, func(l *lostRange) bool {
		_, ok := has[l.endpoint.Addr.Addr()]
		first, last := targets(l.frontend)
		return ok && sendsTo(s, first, last)
	})
	return out
}

// endpointReturns forgets the ranges that lost an endpoint with this port.
func (p *plan) endpointReturns(endpoint netip.AddrPort) {
	p.lost = slices.DeleteFunc(p.lost, func(l *lostRange) bool {
		first, last := targets(l.frontend)
		return l.endpoint.Addr.Addr() == endpoint.Addr() && first <= endpoint.Port() && endpoint.Port() <= last
	})
}

// inRange reports whether a Service has the endpoint in a range.
func (p *plan) inRange(endpoint netip.AddrPort) bool {
	for _, s := range p.ranged {
		if sendsTo(s, endpoint.Port(), endpoint.Port()) &&
			slices.ContainsFunc(s.Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr.Addr() == endpoint.Addr() }) {
			return true
		}
	}
	return false
}

// dueRanges returns the ranges whose delay has passed.
func (p *plan) dueRanges(now time.Time) (out []*lostRange) {
	for _, l := range p.lost {
		if !now.Before(l.due) {
			out = append(out, l)
		}
	}
	return out
}

// found notes the pairs of the connections through ranges that were due. Of a range whose endpoint
// returned since, it notes none.
func (p *plan) found(ranges []*lostRange, pairs []pair, now time.Time) {
	waits, due := map[*lostRange]bool{}, map[*lostRange]bool{}
	for _, l := range p.lost {
		waits[l] = true
	}
	for _, l := range ranges {
		due[l] = true
	}
	for _, w := range pairs {
		if slices.ContainsFunc(ranges, func(l *lostRange) bool { return waits[l] && l.has(w) }) {
			p.addPair(w, now)
		}
	}
	p.lost = slices.DeleteFunc(p.lost, func(l *lostRange) bool { return due[l] })
}
