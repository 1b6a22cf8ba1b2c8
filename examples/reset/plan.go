package reset

import (
	"container/heap"
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
	queue     queue // all entries
	// held holds the entries that count for the limit. Pairs of an earlier process count for the namespace "".
	held *fairshare.Table[*entry]
	// leaving holds written pairs that gave way and are to be removed from the kernel before others are written.
	leaving []pair
	// gaveWay is the number of entries that gave way since the last step, and loser the namespace of the last one.
	gaveWay int
	loser   string
}

func newPlan(delay time.Duration, limit int) *plan {
	return &plan{delay: delay, held: fairshare.New[*entry](limit), endpoints: map[netip.AddrPort]map[netip.AddrPort]*entry{}}
}

// entry is a pair of the plan.
type entry struct {
	pair
	namespace string
	// waits means that the pair is to be written, and written that the kernel has it, or may after a failure.
	waits, written bool
	// at is the time at which the pair is to be written, or at which the kernel removes it.
	at time.Time
	// index is the entry's place in the queue, -1 for an entry that was removed.
	index int
}

// queue is a [heap.Interface] with the earliest entry first.
type queue []*entry

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].at.Before(q[j].at) }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

func (q *queue) Push(x any) {
	e := x.(*entry)
	e.index = len(*q)
	*q = append(*q, e)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	e.index, (*q)[last] = -1, nil
	*q = (*q)[:last]
	return e
}

// add adds an entry, unless there is one for the pair.
func (p *plan) add(e *entry) {
	of := p.endpoints[e.endpoint]
	if of == nil {
		of = map[netip.AddrPort]*entry{}
		p.endpoints[e.endpoint] = of
	}
	if of[e.frontend] != nil {
		return
	}
	of[e.frontend] = e
	heap.Push(&p.queue, e)
	// If there are too many, the oldest of the namespace that has most gives way.
	gone, full := p.held.Add(e, fairshare.Holder{Namespace: e.namespace})
	if !full {
		return
	}
	p.gaveWay++
	p.loser = gone.namespace
	if gone.written {
		p.leaving = append(p.leaving, gone.pair)
	}
	p.remove(gone)
}

// remove forgets an entry. An entry may be removed twice.
func (p *plan) remove(e *entry) {
	if e.index < 0 {
		return
	}
	heap.Remove(&p.queue, e.index)
	p.held.Remove(e)
	of := p.endpoints[e.endpoint]
	if delete(of, e.frontend); len(of) == 0 {
		delete(p.endpoints, e.endpoint)
	}
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
				p.add(&entry{pair: w, namespace: c.Key.Namespace, waits: true, at: now.Add(p.delay)})
			}
		}
	}
}

// due returns the entries to write, and changes them as if the kernel had them. It forgets those of endpoints that exist
// again, and those that the kernel has removed.
func (p *plan) due(now time.Time, exists func(netip.AddrPort) bool) (out []*entry) {
	asked := map[netip.AddrPort]bool{}
	for len(p.queue) != 0 && !now.Before(p.queue[0].at) {
		e := p.queue[0]
		again, known := asked[e.endpoint]
		if e.waits && !known {
			again = exists(e.endpoint)
			asked[e.endpoint] = again
		}
		if !e.waits || again {
			p.remove(e)
			continue
		}
		e.written = true
		p.change(e, false, now.Add(lifetime))
		out = append(out, e)
	}
	return out
}

// change changes what an entry waits for, and until when.
func (p *plan) change(e *entry, waits bool, at time.Time) {
	e.waits, e.at = waits, at
	heap.Fix(&p.queue, e.index)
}

// next returns the time of the next call of due, or the zero time if there are no entries.
func (p *plan) next() (at time.Time) {
	if len(p.queue) != 0 {
		at = p.queue[0].at
	}
	return at
}
