package reset

import (
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/fairshare"
	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// pair is an address of a Service and an endpoint that it lost. The address of a NodePort is
// the unspecified address of the family.
type pair struct {
	frontend, endpoint netip.AddrPort
}

// connection is a connection in the table of connection tracking.
type connection struct {
	// original is the destination of the client's packets, and endpoint the source of the replies.
	original, endpoint netip.AddrPort
	// translated is set if the kernel translates the destination (IPS_DST_NAT).
	translated bool
}

// pairs returns the pairs with which the kernel's rules end the connection. A connection that is
// not translated did not use a Service, even if its destination is a Service's address.
func (c connection) pairs() []pair {
	if !c.translated || c.original == c.endpoint {
		return nil
	}
	return []pair{{c.original, c.endpoint}, {netip.AddrPortFrom(anyAddr(c.original.Addr()), c.original.Port()), c.endpoint}}
}

// anyAddr returns the unspecified address of an address's family.
func anyAddr(a netip.Addr) netip.Addr {
	if a.Is6() {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// plan decides which pairs are written. It does no I/O.
type plan struct {
	delay time.Duration
	// endpoints holds the endpoints that vanished, by their address and port.
	endpoints map[netip.Addr]map[uint16]*vanished
	// held holds the entries that count for the limit. Pairs of an earlier process count for the namespace "".
	held *fairshare.Table[*entry]
	// leaving holds the pairs that gave way and are to be removed from the kernel. They no longer
	// count.
	leaving map[*entry]struct{}
	// gaveWay counts the entries of each namespace that gave way, until gaveWayOnce.
	gaveWay map[string]int
	// changed is set when an entry is added.
	changed bool
}

func newPlan(delay time.Duration, limit int) plan {
	return plan{
		delay: delay, held: fairshare.New[*entry](limit),
		endpoints: map[netip.Addr]map[uint16]*vanished{},
		leaving:   map[*entry]struct{}{}, gaveWay: map[string]int{},
	}
}

// vanished is the state of an endpoint.
type vanished struct {
	// pairs holds the endpoint's pairs by their frontend. The kernel does not have unwritten of
	// them.
	pairs     map[netip.AddrPort]*entry
	unwritten int
	// next is the time at which these are to be written or, if there are none, at which the
	// kernel has removed all.
	next time.Time
}

// entry is what counts for the limit: a pair.
type entry struct {
	pair
	namespace string
	written   bool
}

func (p *plan) at(endpoint netip.AddrPort) *vanished {
	return p.endpoints[endpoint.Addr()][endpoint.Port()]
}

// make returns the state of an endpoint, which it adds if it is missing.
func (p *plan) make(endpoint netip.AddrPort) *vanished {
	v := p.at(endpoint)
	if v == nil {
		v = &vanished{pairs: map[netip.AddrPort]*entry{}}
		if p.endpoints[endpoint.Addr()] == nil {
			p.endpoints[endpoint.Addr()] = map[uint16]*vanished{}
		}
		p.endpoints[endpoint.Addr()][endpoint.Port()] = v
	}
	return v
}

func (p *plan) unmake(endpoint netip.AddrPort) {
	delete(p.endpoints[endpoint.Addr()], endpoint.Port())
	if len(p.endpoints[endpoint.Addr()]) == 0 {
		delete(p.endpoints, endpoint.Addr())
	}
}

// hold counts an entry. If there are too many then, another one gives way: the oldest of the namespace that has most.
func (p *plan) hold(e *entry) {
	p.changed = true
	gone, full := p.held.Add(e, fairshare.Holder{Namespace: e.namespace})
	if !full {
		return
	}
	p.gaveWay[gone.namespace]++
	if gone.written {
		p.leaving[gone] = struct{}{}
	} else {
		p.removePair(gone)
	}
}

// removePair deletes an entry from the state of its endpoint.
func (p *plan) removePair(e *entry) {
	v := p.at(e.endpoint)
	if v == nil || v.pairs[e.frontend] != e {
		return
	}
	delete(v.pairs, e.frontend)
	if !e.written {
		v.unwritten--
	}
	if len(v.pairs) == 0 {
		p.unmake(e.endpoint)
	}
}

// gaveWayOnce returns the number of entries that gave way since the last call, and the namespace
// of most of them.
func (p *plan) gaveWayOnce() (n int, namespace string) {
	for other, m := range p.gaveWay {
		n += m
		if m > p.gaveWay[namespace] || m == p.gaveWay[namespace] && other < namespace {
			namespace = other
		}
	}
	clear(p.gaveWay)
	return n, namespace
}

// leavingPairs returns the pairs that are to be removed from the kernel.
func (p *plan) leavingPairs() (out []pair) {
	for e := range p.leaving {
		if v := p.at(e.endpoint); v != nil && v.pairs[e.frontend] == e {
			out = append(out, e.pair)
		}
	}
	return out
}

// left notes that the kernel no longer has leavingPairs.
func (p *plan) left() {
	for e := range p.leaving {
		p.removePair(e)
	}
	clear(p.leaving)
}

// returning forgets the endpoints that d has again and returns the written pairs of these.
func (p *plan) returning(d *ruleset.Delta) (out []pair) {
	if len(p.endpoints) == 0 {
		return nil
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		if c.New == nil || c.Key.Protocol != v1.ProtocolTCP {
			continue
		}
		now := c.New.Endpoints
		if c.Old != nil {
			_, now = listdiff.Trim(c.Old.Endpoints, now)
		}
		for _, ep := range now {
			out = append(out, p.remove(ep.Addr)...)
		}
	}
	return out
}

// remove forgets an endpoint and returns its written pairs.
func (p *plan) remove(endpoint netip.AddrPort) (out []pair) {
	v := p.at(endpoint)
	if v == nil {
		return nil
	}
	p.unmake(endpoint)
	for _, e := range v.pairs {
		p.held.Remove(e)
		if e.written {
			out = append(out, e.pair)
		}
	}
	return out
}

// record notes the endpoints that vanish with an acknowledged change.
func (p *plan) record(c *ruleset.Change, now time.Time) {
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
		p.addPair(pair{frontend(&c.Old.Frontends[i], c.Key.Family), ep.Addr}, c.Key.Namespace, at)
	}
}

// addPair notes a pair to write at a time. Pairs of the same endpoint that wait delay it. A pair of
// an address and itself has no connections that are translated.
func (p *plan) addPair(w pair, namespace string, at time.Time) {
	if w.frontend == w.endpoint {
		return
	}
	if v := p.at(w.endpoint); v != nil && v.pairs[w.frontend] != nil {
		e := v.pairs[w.frontend]
		if _, ok := p.leaving[e]; ok {
			delete(p.leaving, e)
			e.namespace = namespace
			p.hold(e)
		}
		return
	}
	e := &entry{pair: w, namespace: namespace}
	p.hold(e) // the endpoint's last pair may give way
	v := p.make(w.endpoint)
	if v.unwritten == 0 || v.next.Before(at) {
		v.next = at
	}
	v.pairs[w.frontend] = e
	v.unwritten++
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

// all calls f with each endpoint. f may delete it.
func (p *plan) all(f func(netip.AddrPort, *vanished)) {
	for a, ports := range p.endpoints {
		for port, v := range ports {
			f(netip.AddrPortFrom(a, port), v)
		}
	}
}

// due returns the pairs to write. It forgets the endpoints that exist again and those whose
// pairs have expired.
func (p *plan) due(now time.Time, exists func(netip.AddrPort) bool) (out []pair) {
	p.all(func(endpoint netip.AddrPort, v *vanished) {
		if now.Before(v.next) {
			return
		}
		if v.unwritten == 0 {
			p.remove(endpoint) // it has expired
			return
		}
		again := exists(endpoint)
		for _, e := range v.pairs {
			switch {
			case e.written:
			case again:
				p.held.Remove(e)
				p.removePair(e)
			default:
				out = append(out, e.pair)
			}
		}
		if again {
			v.next = v.next.Add(lifetime)
		}
	})
	return out
}

// wrote notes that the kernel has the pairs.
func (p *plan) wrote(pairs []pair, now time.Time) {
	for _, w := range pairs {
		if v := p.at(w.endpoint); v != nil {
			if e := v.pairs[w.frontend]; e != nil && !e.written {
				e.written = true
				v.unwritten--
			}
			v.next = now.Add(lifetime)
		}
	}
}

// next returns the time of the next call of due. ok is false if nothing is waiting.
func (p *plan) next() (at time.Time, ok bool) {
	p.all(func(_ netip.AddrPort, v *vanished) {
		if !ok || v.next.Before(at) {
			at, ok = v.next, true
		}
	})
	return at, ok
}

// adopt takes over a pair that the kernel has.
func (p *plan) adopt(w pair, expires time.Time) {
	v := p.make(w.endpoint)
	if v.pairs[w.frontend] != nil {
		return
	}
	e := &entry{pair: w, written: true}
	v.pairs[w.frontend] = e
	v.next = expires
	p.hold(e)
}
