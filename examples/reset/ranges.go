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
func sendsTo(s *ruleset.Port, first, last uint16) bool {
	return slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool {
		from, to := targets(&f)
		return f.IsRange() && from <= last && first <= to
	})
}

// hasRange reports whether s is a TCP Service with a range.
func hasRange(s *ruleset.Port) bool {
	return s != nil && s.Key.Protocol == v1.ProtocolTCP && slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.IsRange() })
}

// noteRanges records whether a Service has ranges, as acknowledged.
func (p *plan) noteRanges(c *ruleset.Change) {
	switch {
	case hasRange(c.New):
		if p.ranged == nil {
			p.ranged = map[tracker.Key]*ruleset.Port{}
		}
		p.ranged[c.Key] = c.New
	case len(p.ranged) != 0:
		delete(p.ranged, c.Key)
	}
}

// addLost notes that a range lost an endpoint.
func (p *plan) addLost(l *lostRange, namespace string) {
	e := &entry{lost: l, namespace: namespace}
	p.hold(e)
	if p.lost == nil {
		p.lost = map[netip.Addr]map[*lostRange]*entry{}
	}
	a := l.endpoint.Addr.Addr()
	if p.lost[a] == nil {
		p.lost[a] = map[*lostRange]*entry{}
	}
	p.lost[a][l] = e
}

// removeLost forgets that a range lost an endpoint.
func (p *plan) removeLost(l *lostRange) {
	a := l.endpoint.Addr.Addr()
	if e := p.lost[a][l]; e != nil {
		p.release(e)
	}
	delete(p.lost[a], l)
	if len(p.lost[a]) == 0 {
		delete(p.lost, a)
	}
}

// returningTo forgets the endpoints that the ranges of s have again and returns the written pairs of
// these.
func (p *plan) returningTo(s *ruleset.Port) (out []pair) {
	for _, ep := range s.Endpoints {
		a := ep.Addr.Addr()
		for port := range p.endpoints[a] {
			if sendsTo(s, port, port) {
				out = append(out, p.remove(netip.AddrPortFrom(a, port))...)
			}
		}
		for l := range p.lost[a] {
			if first, last := targets(l.frontend); sendsTo(s, first, last) {
				p.removeLost(l)
			}
		}
	}
	return out
}

// endpointReturns forgets the ranges that lost an endpoint with this port.
func (p *plan) endpointReturns(endpoint netip.AddrPort) {
	for l := range p.lost[endpoint.Addr()] {
		if first, last := targets(l.frontend); first <= endpoint.Port() && endpoint.Port() <= last {
			p.removeLost(l)
		}
	}
}

// targetsByAddr holds the first and the last port to which ranges send, by the address of an endpoint.
type targetsByAddr map[netip.Addr][][2]uint16

// targets returns the endpoints' ports to which the ranges of all Services send. It is not nil.
func (p *plan) targets() targetsByAddr {
	out := targetsByAddr{}
	for _, s := range p.ranged {
		for i := range s.Frontends {
			if !s.Frontends[i].IsRange() {
				continue
			}
			first, last := targets(&s.Frontends[i])
			for _, ep := range s.Endpoints {
				a := ep.Addr.Addr()
				if have := out[a]; len(have) == 0 || have[len(have)-1] != [2]uint16{first, last} {
					out[a] = append(have, [2]uint16{first, last})
				}
			}
		}
	}
	return out
}

// has reports whether a range sends to the endpoint.
func (t targetsByAddr) has(endpoint netip.AddrPort) bool {
	return slices.ContainsFunc(t[endpoint.Addr()], func(r [2]uint16) bool { return r[0] <= endpoint.Port() && endpoint.Port() <= r[1] })
}

// dueRanges returns the ranges whose delay has passed.
func (p *plan) dueRanges(now time.Time) (out []*lostRange) {
	for _, ranges := range p.lost {
		for l := range ranges {
			if !now.Before(l.due) {
				out = append(out, l)
			}
		}
	}
	return out
}

// addrs holds the address of a range and that of an endpoint.
type addrs struct{ frontend, endpoint netip.Addr }

// byAddrs returns the ranges by their addresses.
func byAddrs(ranges []*lostRange) map[addrs][]*lostRange {
	out := map[addrs][]*lostRange{}
	for _, l := range ranges {
		at := addrs{l.frontend.Addr, l.endpoint.Addr.Addr()}
		out[at] = append(out[at], l)
	}
	return out
}

// found notes the pairs of the connections through ranges that were due. Of a range whose endpoint
// returned since, it notes none.
func (p *plan) found(due map[addrs][]*lostRange, pairs []pair, now time.Time) {
	waits := map[*lostRange]string{}
	for _, ranges := range due {
		for _, l := range ranges {
			if e := p.lost[l.endpoint.Addr.Addr()][l]; e != nil {
				waits[l] = e.namespace
				p.removeLost(l)
			}
		}
	}
	for _, w := range pairs {
		for _, l := range due[addrs{w.frontend.Addr(), w.endpoint.Addr()}] {
			if namespace, ok := waits[l]; ok && l.has(w) {
				p.addPair(w, namespace, now)
				break
			}
		}
	}
}
