package reset

import (
	"container/list"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/fairshare"
	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset"
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
	// endpoints holds the entries of the endpoints that vanished, by endpoint and frontend.
	endpoints map[netip.AddrPort]map[netip.AddrPort]*entry
	// held holds the entries that count for the limit. Pairs of an earlier process count for the namespace "".
	held *fairshare.Table[*entry]
	// waiting holds the entries to write, and written those that the kernel has, in the order of their times. leaving holds
	// the ones that gave way and are to be removed from the kernel. They no longer count.
	waiting, written, leaving list.List
	// gaveWay counts the entries of each namespace that gave way, until gaveWayOnce.
	gaveWay map[string]int
	// changed is set when an entry is added.
	changed bool
}

func newPlan(delay time.Duration, limit int) *plan {
	return &plan{
		delay: delay, held: fairshare.New[*entry](limit),
		endpoints: map[netip.AddrPort]map[netip.AddrPort]*entry{}, gaveWay: map[string]int{},
	}
}

// entry is a pair, in one of the lists of the plan.
type entry struct {
	pair
	namespace string
	// at is the time at which the pair is to be written, or at which the kernel removes it.
	at      time.Time
	in      *list.List
	element *list.Element
}

// move moves an entry to the end of a list.
func (e *entry) move(to *list.List, at time.Time) {
	if e.in != nil {
		e.in.Remove(e.element)
	}
	e.in, e.element, e.at = to, to.PushBack(e), at
}

// add adds an entry, unless there is one for the pair.
func (p *plan) add(w pair, namespace string, to *list.List, at time.Time) {
	of := p.endpoints[w.endpoint]
	if of == nil {
		of = map[netip.AddrPort]*entry{}
		p.endpoints[w.endpoint] = of
	}
	e := of[w.frontend]
	switch {
	case e == nil:
		e = &entry{pair: w, namespace: namespace}
		of[w.frontend] = e
		e.move(to, at)
	case e.in == &p.leaving: // the kernel still has it
		e.namespace = namespace
		e.move(&p.written, e.at)
	default:
		return
	}
	p.changed = true
	// If there are too many, the oldest of the namespace that has most gives way.
	gone, full := p.held.Add(e, fairshare.Holder{Namespace: namespace})
	if !full {
		return
	}
	p.gaveWay[gone.namespace]++
	if gone.in == &p.written {
		gone.move(&p.leaving, gone.at)
	} else {
		p.remove(gone)
	}
}

// remove forgets an entry. An entry may be removed twice.
func (p *plan) remove(e *entry) {
	e.in.Remove(e.element)
	p.held.Remove(e)
	of := p.endpoints[e.endpoint]
	if delete(of, e.frontend); len(of) == 0 {
		delete(p.endpoints, e.endpoint)
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

// returning returns the entries of the endpoints that d has again.
func (p *plan) returning(d *ruleset.Delta) (out []*entry) {
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
			out = slices.AppendSeq(out, maps.Values(p.endpoints[ep.Addr]))
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
		for i := range c.Old.Frontends {
			f := &c.Old.Frontends[i]
			w := pair{netip.AddrPortFrom(f.Addr, f.Port), ep.Addr}
			if f.Kind == ruleset.KindNodePort {
				w.frontend = netip.AddrPortFrom(anyAddr(ep.Addr.Addr()), f.Port)
			}
			if w.frontend != w.endpoint { // their connections are not translated
				p.add(w, c.Key.Namespace, &p.waiting, now.Add(p.delay))
			}
		}
	}
}

// due returns the pairs to write. It forgets the pairs of endpoints that exist again and those that the kernel has removed.
func (p *plan) due(now time.Time, exists func(netip.AddrPort) bool) (out []pair) {
	for e := range entries(&p.written) {
		if now.Before(e.at) {
			break
		}
		p.remove(e)
	}
	var last netip.AddrPort // most entries of an endpoint follow each other
	again := false
	for e := range entries(&p.waiting) {
		if now.Before(e.at) {
			break
		}
		if e.endpoint != last {
			last, again = e.endpoint, exists(e.endpoint)
		}
		if again {
			p.remove(e)
		} else {
			out = append(out, e.pair)
		}
	}
	return out
}

// entries yields the entries of a list, which may be removed.
func entries(l *list.List) iter.Seq[*entry] {
	return func(yield func(*entry) bool) {
		for at := l.Front(); at != nil; {
			e := at.Value.(*entry)
			if at = at.Next(); !yield(e) {
				return
			}
		}
	}
}

// wrote notes that the kernel has the pairs of due.
func (p *plan) wrote(pairs []pair, now time.Time) {
	for _, w := range pairs {
		p.endpoints[w.endpoint][w.frontend].move(&p.written, now.Add(lifetime))
	}
}

// next returns the time of the next call of due, or the zero time if nothing is waiting.
func (p *plan) next() (at time.Time) {
	for _, l := range []*list.List{&p.waiting, &p.written} {
		if first := l.Front(); first != nil {
			if e := first.Value.(*entry); at.IsZero() || e.at.Before(at) {
				at = e.at
			}
		}
	}
	return at
}
