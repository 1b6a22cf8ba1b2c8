package reset

import (
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// pair is an address of a Service and an endpoint that it lost. The address of a NodePort is
// the unspecified address of the family.
type pair struct {
	frontend, endpoint netip.AddrPort
}

// plan decides which pairs are written. It does no I/O.
type plan struct {
	delay time.Duration
	limit int
	// endpoints holds the endpoints that vanished.
	endpoints map[netip.AddrPort]*vanished
	pairs     int
	// lost holds the endpoints that vanished from ranges of ports and whose delay runs.
	lost []*lostRange
	// ranged holds the Services with ranges of ports, as acknowledged. It is nil until there is
	// one.
	ranged map[tracker.Key]*ruleset.Service
}

// vanished is the state of an endpoint. The kernel has the first frontends, as many as
// written says.
type vanished struct {
	frontends []netip.AddrPort
	written   int
	// next is the time at which the other frontends are to be written or, if there are
	// none, at which the kernel has removed all.
	next time.Time
}

// returning forgets the endpoints that d has again and returns the written pairs of these.
func (p *plan) returning(d *ruleset.Delta) (out []pair) {
	if len(p.endpoints) == 0 && len(p.lost) == 0 {
		return nil
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		if c.New == nil || c.Key.Protocol != v1.ProtocolTCP {
			continue
		}
		now := c.New.Endpoints
		if c.Old != nil && len(c.Attempted) == 0 {
			_, now = listdiff.Trim(c.Old.Endpoints, now)
		}
		for _, ep := range now {
			out = append(out, p.remove(ep.Addr)...)
			p.endpointReturns(ep.Addr)
		}
		if hasRange(c.New) {
			out = append(out, p.returningTo(c.New)...)
		}
	}
	return out
}

// remove forgets an endpoint and returns its written pairs.
func (p *plan) remove(endpoint netip.AddrPort) (out []pair) {
	v := p.endpoints[endpoint]
	if v == nil {
		return nil
	}
	delete(p.endpoints, endpoint)
	p.pairs -= len(v.frontends)
	for _, f := range v.frontends[:v.written] {
		out = append(out, pair{f, endpoint})
	}
	return out
}

// record notes the endpoints that vanish with an acknowledged change.
func (p *plan) record(c *ruleset.Change, now time.Time) {
	p.noteRanges(c)
	if c.Old == nil || c.New == nil || c.Key.Protocol != v1.ProtocolTCP {
		return
	}
	before, after := listdiff.Trim(c.Old.Endpoints, c.New.Endpoints)
	if len(before) == 0 {
		return
	}
	stays := make(map[netip.AddrPort]struct{}, len(after))
	for _, ep := range after {
		stays[ep.Addr] = struct{}{}
	}
	for _, ep := range before {
		if _, ok := stays[ep.Addr]; ok || ep.Terminating && ep.Serving {
			continue
		}
		p.add(ep, c, now)
	}
}

// add notes that a Service lost an endpoint.
func (p *plan) add(ep *tracker.Endpoint, c *ruleset.Change, now time.Time) {
	at := now.Add(p.delay)
	for i := range c.Old.Frontends {
		switch f := &c.Old.Frontends[i]; {
		case !f.IsRange():
			p.addPair(pair{frontend(f, c.Key.Family), ep.Addr}, at)
		case p.pairs+len(p.lost) < p.limit:
			p.lost = append(p.lost, &lostRange{f, ep, at})
		}
	}
}

// addPair notes a pair to write at a time. Pairs of the same endpoint that wait delay it.
func (p *plan) addPair(w pair, at time.Time) {
	v := p.endpoints[w.endpoint]
	if p.pairs >= p.limit || v != nil && slices.Contains(v.frontends, w.frontend) {
		return
	}
	if v == nil {
		v = &vanished{}
		p.endpoints[w.endpoint] = v
	}
	if v.written == len(v.frontends) || v.next.Before(at) {
		v.next = at
	}
	v.frontends = append(v.frontends, w.frontend)
	p.pairs++
}

// frontend returns the address of f in a pair.
func frontend(f *ruleset.Frontend, family tracker.Family) netip.AddrPort {
	a := f.Addr
	if f.Kind == ruleset.KindNodePort {
		a = netip.IPv4Unspecified()
		if family == tracker.IPv6 {
			a = netip.IPv6Unspecified()
		}
	}
	return netip.AddrPortFrom(a, f.Port)
}

// due returns the pairs to write. It forgets the endpoints that exist again and those whose
// pairs have expired.
func (p *plan) due(now time.Time, exists func(netip.AddrPort) bool) (out []pair) {
	for endpoint, v := range p.endpoints {
		switch {
		case now.Before(v.next):
		case v.written == len(v.frontends):
			p.remove(endpoint) // it has expired
		case exists(endpoint) || p.inRange(endpoint):
			p.forgetUnwritten(endpoint, v)
		default:
			for _, f := range v.frontends[v.written:] {
				out = append(out, pair{f, endpoint})
			}
		}
	}
	return out
}

// forgetUnwritten forgets the frontends of an endpoint that the kernel does not have.
func (p *plan) forgetUnwritten(endpoint netip.AddrPort, v *vanished) {
	p.pairs -= len(v.frontends) - v.written
	if v.frontends = v.frontends[:v.written]; v.written == 0 {
		delete(p.endpoints, endpoint)
		return
	}
	v.next = v.next.Add(lifetime)
}

// wrote notes that the kernel has the pairs.
func (p *plan) wrote(pairs []pair, now time.Time) {
	for _, w := range pairs {
		if v := p.endpoints[w.endpoint]; v != nil {
			v.written, v.next = len(v.frontends), now.Add(lifetime)
		}
	}
}

// next returns the time of the next call of due. ok is false if nothing is waiting.
func (p *plan) next() (at time.Time, ok bool) {
	for _, v := range p.endpoints {
		if !ok || v.next.Before(at) {
			at, ok = v.next, true
		}
	}
	for _, l := range p.lost {
		if !ok || l.due.Before(at) {
			at, ok = l.due, true
		}
	}
	return at, ok
}

// adopt takes over a pair that the kernel has.
func (p *plan) adopt(w pair, expires time.Time) {
	v := p.endpoints[w.endpoint]
	if v == nil {
		v = &vanished{}
		p.endpoints[w.endpoint] = v
	}
	v.frontends = slices.Insert(v.frontends, v.written, w.frontend)
	v.written++
	v.next = expires
	p.pairs++
}
