package ruleset

import (
	"errors"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// ErrRefused is wrapped by the error of a Service in [PartialError].Failed if the backend cannot
// program the Service and wrote nothing of it: what was in effect of it before this Apply still
// is, and so is what was in effect of each Service that loses a frontend to it or to one of those.
// The [Cursor] then offers what may stay of them in a second delta of the same Sync: the refused
// Service without the frontends and endpoints that are gone. What the backend does not accept of
// that delta has failed.
var ErrRefused = errors.New("refused")

// left is the change of a Service that a delta left as it was, and what may stay of the Service.
type left struct {
	Change
	fallback *Service
	refused  bool
	// unsure: an earlier attempt failed, or the Service also loses a frontend to one that failed.
	// So it has failed itself, and there is no fallback.
	unsure bool
}

// leave returns the changes of d that the backend left as they were: those of the Services that
// it refused, and of those that lose a frontend to one of these. Neither a removal can be refused
// nor a Service of which parts of an earlier version may be in effect.
func leave(d *Delta, failed map[tracker.Key]error) map[tracker.Key]*left {
	var out map[tracker.Key]*left
	for i := range d.Changes {
		if c := &d.Changes[i]; c.New != nil && len(c.Attempted) == 0 && errors.Is(failed[c.Key], ErrRefused) {
			if out == nil {
				out = map[tracker.Key]*left{}
			}
			out[c.Key] = &left{Change: *c, refused: true}
		}
	}
	for more := len(out) != 0; more; {
		more = false
		for i := range d.Changes {
			c := &d.Changes[i]
			waits := func(m move) bool { return out[m.key] != nil }
			if failed[c.Key] == nil && out[c.Key] == nil && slices.ContainsFunc(c.lost, waits) {
				out[c.Key], more = &left{Change: *c}, true
			}
		}
	}
	for _, l := range out {
		l.unsure = len(l.Attempted) != 0 || slices.ContainsFunc(l.lost, func(m move) bool {
			return failed[m.key] != nil && (out[m.key] == nil || !out[m.key].refused)
		})
	}
	for _, l := range out {
		if !l.unsure {
			l.fall(out, d.Node)
		}
	}
	return out
}

// fall sets the fallback. A refused Service gets no frontend and no endpoint that it did not have,
// and releases those that it lacks now. A Service that was to lose a frontend to it keeps the
// frontend.
func (l *left) fall(all map[tracker.Key]*left, n *Node) {
	if l.New == nil {
		return
	}
	keep := map[l4Key]bool{}
	for _, m := range l.lost {
		if w := all[m.key]; w != nil && (w.refused || w.unsure) {
			keep[m.at] = true
		}
	}
	l.fallback = l.New.keeping(keep, n)
	if l.refused {
		l.fallback = l.Old.Remaining(l.fallback)
	}
}

// keeping returns s with those frontends of keep that its Service port asks for.
func (s *Service) keeping(keep map[l4Key]bool, n *Node) *Service {
	if len(keep) == 0 {
		return s
	}
	has := make(map[l4Key]bool, len(s.Frontends))
	for i := range s.Frontends {
		has[l4KeyOf(s, &s.Frontends[i])] = true
	}
	out := *s
	out.Frontends = nil
	for _, f := range frontends(nil, s.Port, &s.Selection, n) {
		if at := l4KeyOf(s, &f); has[at] || keep[at] {
			out.Frontends = append(out.Frontends, f)
		}
	}
	if len(out.Frontends) == len(s.Frontends) {
		return s
	}
	return &out
}

func hasFrontend(s *Service, at l4Key) bool {
	return s != nil && slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return l4KeyOf(s, &f) == at })
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
	holders := map[l4Key]tracker.Key{}
	for _, l := range all {
		if l.unsure {
			continue
		}
		old := c.states[l.ID()].acked
		ch := Change{Key: l.Key, Old: old, New: l.fallback, Fields: diff(old, l.fallback), ports: l.ports}
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
		for at, f := range ch.dropped() {
			to, ok := holders[at]
			for _, m := range all[ch.Key].lost {
				if m.at == at && (all[m.key] == nil || all[m.key].unsure) {
					to, ok = m.key, true
				}
			}
			if ok && to != ch.Key {
				ch.lost = append(ch.lost, move{at, to})
			}
			if c.uses(f.Addr) && !slices.Contains(ch.kept, f.Addr) {
				ch.kept = append(ch.kept, f.Addr)
			}
		}
	}
	slices.SortFunc(out.Changes, func(a, b Change) int { return a.Key.Compare(b.Key) })
	link(out.Changes)
	c.hold(out.Changes)
	return out
}
