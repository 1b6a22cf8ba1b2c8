package conntrack

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// place is the address of a frontend in owners, with its ports.
type place struct {
	at netip.AddrPort
	// last is the last port of a range, and target the endpoints' port for the first one. Both
	// are 0 for a single port.
	last, target uint16
}

func (w place) isRange() bool { return w.last != 0 }

// has reports whether a range has the port.
func (w place) has(port uint16) bool { return w.at.Port() <= port && port <= w.last }

// endpoint returns the key, in the endpoints of a range, of the endpoint that a flow was sent to.
// ok is false if the range sends no packet to that port.
func (w place) endpoint(f *Flow) (key netip.AddrPort, ok bool) {
	return anyPort(f.ReplySrc.Addr()), f.ReplySrc.Port() == f.Dst.Port()-w.at.Port()+w.target
}

// anyPort returns the key of an endpoint of a range, whose port follows from the flow's.
func anyPort(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, 0) }

// span is a part of a range, or all of it.
type span struct {
	first, last uint16
	place       place
	service     *ruleset.Port
}

// spans holds the owners of ranges at each address, in the order of their ports. No two overlap.
// The nil map has none.
type spans map[netip.Addr][]span

// set gives a range to a Service. It takes those ports from other Services, whose changes may
// be recorded later.
func (x spans) set(w place, s *ruleset.Port) {
	all := x[w.at.Addr()]
	first, last := w.at.Port(), w.last
	from, _ := slices.BinarySearchFunc(all, first, func(a span, port uint16) int { return int(a.last) - int(port) })
	parts := []span{{first, last, w, s}}
	to := from
	for ; to < len(all) && all[to].first <= last; to++ {
		if o := all[to]; o.first < first {
			o.last = first - 1
			parts = slices.Insert(parts, 0, o)
		}
		if o := all[to]; o.last > last {
			o.first = last + 1
			parts = append(parts, o)
		}
	}
	x[w.at.Addr()] = slices.Replace(all, from, to, parts...)
}

// remove takes a range from a Service.
func (x spans) remove(w place, k tracker.Key) {
	all := slices.DeleteFunc(x[w.at.Addr()], func(a span) bool { return a.place == w && a.service.Key == k })
	if len(all) == 0 {
		delete(x, w.at.Addr())
		return
	}
	x[w.at.Addr()] = all
}

// find returns the span at a destination.
func (x spans) find(dst netip.AddrPort) (span, bool) {
	if len(x) == 0 {
		return span{}, false
	}
	all := x[dst.Addr()]
	i, _ := slices.BinarySearchFunc(all, dst.Port(), func(a span, port uint16) int { return int(a.last) - int(port) })
	if i == len(all) || all[i].first > dst.Port() {
		return span{}, false
	}
	return all[i], true
}

// queuedRange is a range in the queue.
type queuedRange struct {
	place
	*lost
}

// queuedRanges returns the ranges in the queue by address, or nil if there are none.
func (q *queue) queuedRanges() map[netip.Addr][]queuedRange {
	if len(q.ranges) == 0 {
		return nil
	}
	out := make(map[netip.Addr][]queuedRange)
	for w, l := range q.ranges {
		out[w.at.Addr()] = append(out[w.at.Addr()], queuedRange{w, l})
	}
	return out
}

// inQueuedRange reports whether the queue has a range with the destination.
func (j *judge) inQueuedRange(dst netip.AddrPort) bool {
	return len(j.queued) != 0 && slices.ContainsFunc(j.queued[dst.Addr()], func(q queuedRange) bool { return q.has(dst.Port()) })
}

// lostByRange returns the Service of a flow that was sent to an endpoint that a range has lost, or
// nil.
func (j *judge) lostByRange(f *Flow) *ruleset.Port {
	if len(j.queued) == 0 {
		return nil
	}
	for _, q := range j.queued[f.Dst.Addr()] {
		if at, ok := q.endpoint(f); ok && q.has(f.Dst.Port()) {
			if s := q.of(at); s != nil {
				return s
			}
		}
	}
	return nil
}
