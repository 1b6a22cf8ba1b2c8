package ruleset

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// ErrRefused is wrapped by the error of a Service in [PartialError].Failed if the backend cannot
// program the Service and wrote nothing of it. What was in effect of it before this Apply still is,
// and so is what was in effect of each Service that loses a frontend to it or to one of those: see
// [Change.Staying]. The [Cursor] then offers what may stay of them in a second delta of the same
// Sync: the refused Service without the frontends and endpoints that are gone, and with the endpoints
// that return. A Service of which parts of an earlier version may be in effect ([Change].Attempted)
// has failed, whatever its error, unless a full delta [PartialError].Restored what Staying
// returns.
//
// An error of Apply that wraps ErrRefused, and is neither a [*PartialError] nor [ErrNeedFull], means
// that the backend wrote nothing of the delta, for example because of a lock. The next Sync offers
// all of it again, without Attempted.
var ErrRefused = errors.New("refused")

// left is the change of a Service that a delta left as it was, and what may stay of the Service.
type left struct {
	Change
	fallback *Port
	refused  bool
	// unsure: an earlier attempt failed, or the Service also loses a frontend to one that failed.
	// So it has failed itself, and there is no fallback.
	unsure bool
}

// fall sets the fallbacks of what the last delta left as it was. n is the delta's node.
func (c *Cursor) fall(n *Node) {
	for _, l := range c.left {
		if l.unsure {
			continue
		}
		id := l.ID()
		if l.refused && l.Old != nil && c.whole[id] == nil {
			c.whole[id] = l.Old
		}
		l.fall(c.left, c.whole[id], n)
	}
}

// fall sets the fallback. A refused Service gets no frontend and no endpoint that it did not have,
// and releases those that it lacks now. It gets back the endpoints of whole, the version before it
// was first refused. A Service that was to lose a frontend to it keeps the frontend.
func (l *left) fall(all map[tracker.Key]*left, whole *Port, n *Node) {
	if l.New == nil {
		return
	}
	keep := map[l4Key]bool{}
	for _, m := range l.lost {
		if w := all[m.key]; w != nil && (w.refused || w.unsure) && !m.had && hasFrontend(l.Old, m.at) {
			keep[m.at] = true
		}
	}
	l.fallback = l.New.keeping(keep, n)
	if l.refused && l.Old == nil {
		l.fallback = nil
	} else if l.refused {
		l.fallback = whole.with(l.Old.Frontends).remaining(l.fallback)
	}
}

// with returns s with those of its frontends that are in list, which is a part of them.
func (s *Port) with(list []Frontend) *Port {
	if len(list) == len(s.Frontends) {
		return s
	}
	out := *s
	has := &Port{Key: s.Key, Frontends: list}
	out.Frontends = slices.DeleteFunc(slices.Clone(s.Frontends), func(f Frontend) bool { return !hasFrontend(has, l4KeyOf(s, &f)) })
	return &out
}

// keeping returns s with those frontends of keep that its Service port asks for.
func (s *Port) keeping(keep map[l4Key]bool, n *Node) *Port {
	if len(keep) == 0 {
		return s
	}
	has := make(map[l4Key]bool, len(s.Frontends))
	for i := range s.Frontends {
		has[l4KeyOf(s, &s.Frontends[i])] = true
	}
	out := *s
	out.Frontends = nil
	for _, f := range frontends(nil, s.Spec, &s.Selection, n) {
		if at := l4KeyOf(s, &f); has[at] || keep[at] {
			out.Frontends = append(out.Frontends, f)
		}
	}
	if len(out.Frontends) == len(s.Frontends) {
		return s
	}
	return &out
}

func hasFrontend(s *Port, at l4Key) bool {
	return s != nil && slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return l4KeyOf(s, &f) == at })
}

// Staying returns the version in effect after an Apply that left the Service as it was: Old without
// the frontends that accepted Services took. left reports whether Apply also left the Service with
// the given key as it was. Staying returns Old itself if no frontend was taken.
func (c Change) Staying(left func(tracker.Key) bool) *Port {
	taken := map[l4Key]bool{}
	for _, m := range c.lost {
		if m.had || !left(m.key) {
			taken[m.at] = true
		}
	}
	gone := func(f Frontend) bool { return taken[l4KeyOf(c.Old, &f)] }
	if len(taken) == 0 || c.Old == nil || !slices.ContainsFunc(c.Old.Frontends, gone) {
		return c.Old
	}
	out := *c.Old
	out.Frontends = slices.DeleteFunc(slices.Clone(c.Old.Frontends), gone)
	return &out
}

// fallBack returns the delta that follows d, of which the backend left Services as they were, or
// nil if there are none or they may stay as they are. After it, the next Sync offers the wanted
// versions again.
func (c *Cursor) fallBack(d *Delta) *Delta {
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	all := c.left
	c.left = nil
	if len(all) == 0 || c.detached {
		return nil
	}
	out := &Delta{Gen: d.Gen, Node: d.Node, OldNode: d.Node, cursor: c, second: true}
	holders := map[l4Key]tracker.Key{} // after the delta
	for _, l := range all {
		if l.unsure {
			continue
		}
		old := c.states[l.ID()].acked
		ch := Change{Key: l.Key, Old: old, New: l.fallback, Fields: diff(old, l.fallback)}
		if ch.Fields != 0 {
			out.Changes = append(out.Changes, ch)
		}
		if l.fallback != nil {
			for i := range l.fallback.Frontends {
				holders[l4KeyOf(l.fallback, &l.fallback.Frontends[i])] = l.Key
			}
		}
	}
	if len(out.Changes) == 0 {
		return nil
	}
	for i := range out.Changes {
		ch := &out.Changes[i]
		for at := range ch.dropped() {
			if to, ok := holders[at]; ok {
				ch.lost = append(ch.lost, move{at: at, key: to})
			}
		}
	}
	slices.SortFunc(out.Changes, func(a, b Change) int { return a.Key.Compare(b.Key) })
	link(out.Changes)
	c.offered(out.Changes)
	return out
}

// remaining returns what may stay of s, the Service that a backend has programmed, when the
// backend cannot program now, which replaces it: s without the frontends that now lacks and
// without the endpoints that are not among now.Selection.Reachable. So a backend that must refuse
// a change still stops sending connections to endpoints that are gone, and releases addresses
// that another Service may own now. It keeps s's pools, affinity and policies, and takes the
// allowed sources that now has. A frontend whose pool is empty does what now's frontend at the same address
// and port does, or rejects if that one has endpoints.
//
// The result shares unchanged slices with s and now. Its ID and Key are those of s. If now is
// nil, there is nothing left and the result is nil.
func (s *Port) remaining(now *Port) *Port {
	if s == nil || now == nil {
		return nil
	}
	out := *s
	out.Endpoints = now.Endpoints
	reachable := make(map[netip.AddrPort]bool, len(now.Selection.Reachable))
	for _, ep := range now.Selection.Reachable {
		reachable[ep.Addr] = true
	}
	keep := func(list []*tracker.Endpoint) []*tracker.Endpoint {
		gone := func(ep *tracker.Endpoint) bool { return !reachable[ep.Addr] }
		if !slices.ContainsFunc(list, gone) {
			return list
		}
		return slices.DeleteFunc(slices.Clone(list), gone)
	}
	out.Selection.Cluster, out.Selection.Local = keep(s.Selection.Cluster), keep(s.Selection.Local)
	out.Selection.Reachable = keep(s.Selection.Reachable)

	target := func(had, wanted Target) Target {
		switch isPool := wanted == TargetCluster || wanted == TargetLocal; {
		case had != TargetCluster && had != TargetLocal || len(out.Pool(had)) != 0:
			return had
		case isPool:
			return TargetReject
		}
		return wanted
	}
	wanted := make(map[l4Key]*Frontend, len(now.Frontends))
	for i := range now.Frontends {
		wanted[l4KeyOf(now, &now.Frontends[i])] = &now.Frontends[i]
	}
	out.Frontends = nil
	for _, f := range s.Frontends {
		w := wanted[l4KeyOf(s, &f)]
		if w == nil {
			continue
		}
		f.Target, f.Internal = target(f.Target, w.Target), target(f.Internal, w.Internal)
		f.Sources = w.Sources
		out.Frontends = append(out.Frontends, f)
	}
	return &out
}
