package ruleset

import (
	"errors"
	"iter"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/tracker"
)

// ID returns the [Port].ID that Old and New share. It is 0 for a Change without both that no Cursor made.
func (c Change) ID() uint32 {
	switch {
	case c.New != nil:
		return c.New.ID
	case c.Old != nil:
		return c.Old.ID
	}
	return c.id
}

// Acknowledged reports whether an Apply that returned err acknowledges c, a change of its delta: all of c is in
// effect.
func (c Change) Acknowledged(err error) bool {
	if err == nil {
		return true
	}
	var p *PartialError
	if !errors.As(err, &p) || errors.Is(err, ErrNeedFull) {
		return false
	}
	named := func(k tracker.Key) bool {
		_, named := p.Failed[k]
		return named
	}
	return !named(c.Key) && !slices.ContainsFunc(c.lost, func(m move) bool { return named(m.key) })
}

// Upserted yields the endpoints in New.Selection.Reachable that are missing from Old or differ from it, or all of
// them if Fields is FieldAll. It does not report the pools of an endpoint: see FieldCluster and FieldLocal.
func (c Change) Upserted() iter.Seq[*tracker.Endpoint] {
	return func(yield func(*tracker.Endpoint) bool) {
		if c.New == nil {
			return
		}
		now := c.New.Selection.Reachable
		var before []*tracker.Endpoint
		if c.Old != nil && c.Fields != FieldAll {
			before, now = listdiff.Trim(c.Old.Selection.Reachable, now)
		}
		find := findEndpoints(before)
		for _, ep := range now {
			if i := find.first(ep.Addr); i >= 0 && before[i].Equal(ep) {
				continue
			}
			if !yield(ep) {
				return
			}
		}
	}
}

// Removed yields the endpoints to remove, each address once: those in Old.Selection.Reachable whose address is
// missing from New. It does not yield endpoints of attempts that failed.
func (c Change) Removed() iter.Seq[*tracker.Endpoint] {
	return func(yield func(*tracker.Endpoint) bool) {
		var before, now []*tracker.Endpoint
		if c.New != nil {
			now = c.New.Selection.Reachable
		}
		if c.Old != nil {
			before = c.Old.Selection.Reachable
		}
		before, now = listdiff.Trim(before, now)
		keep := findEndpoints(now)
		for _, ep := range before {
			if !keep.has(ep.Addr) && !yield(ep) {
				return
			}
		}
	}
}

// GoneFrontends yields the frontends to delete: those of Old whose address and port neither New nor another Service
// has.
func (c Change) GoneFrontends() iter.Seq[Frontend] {
	return func(yield func(Frontend) bool) {
		lost := newFinder(c.lost, move.frontend)
		for at, f := range c.dropped() {
			if !lost.has(at) && !yield(*f) {
				return
			}
		}
	}
}

// LostFrontends yields the frontends of Old that another Service takes, each with the key of that Service, whose
// Change is in the same delta.
//
// The frontend must work throughout. A data plane that finds frontends by address alone must not delete it: the new
// owner's entry replaces the old one. A data plane whose keys contain the Service deletes this Service's entry after
// it has written the new owner's.
func (c Change) LostFrontends() iter.Seq2[Frontend, tracker.Key] {
	return func(yield func(Frontend, tracker.Key) bool) {
		if len(c.lost) == 0 {
			return
		}
		lost := newFinder(c.lost, move.frontend)
		for at, f := range c.dropped() {
			if i := lost.first(at); i >= 0 && !yield(*f, c.lost[i].key) {
				return
			}
		}
	}
}

// TakenFrontends yields the frontends of New that another Service loses, each with the key of that Service, whose
// LostFrontends yields the frontend.
func (c Change) TakenFrontends() iter.Seq2[Frontend, tracker.Key] {
	return func(yield func(Frontend, tracker.Key) bool) {
		for _, m := range c.taken {
			for i := range c.New.Frontends {
				f := &c.New.Frontends[i]
				if l4KeyOf(c.New, f) != m.at {
					continue
				}
				if !yield(*f, m.key) {
					return
				}
			}
		}
	}
}

// dropped yields the frontends of Old that New does not have.
func (c Change) dropped() iter.Seq2[l4Key, *Frontend] {
	return func(yield func(l4Key, *Frontend) bool) {
		if c.Old == nil || c.Fields&FieldFrontends == 0 && c.New != nil {
			return
		}
		now := finder[Frontend, l4Key]{}
		if c.New != nil {
			now = newFinder(c.New.Frontends, func(f Frontend) l4Key { return l4KeyOf(c.New, &f) })
		}
		for i := range c.Old.Frontends {
			f := &c.Old.Frontends[i]
			if at := l4KeyOf(c.Old, f); !now.has(at) && !yield(at, f) {
				return
			}
		}
	}
}

func endpointAddr(ep *tracker.Endpoint) netip.AddrPort { return ep.Addr }

// finder finds elements by key. It builds an index only for long, unsorted lists.
type finder[T any, K comparable] struct {
	list    []T
	key     func(T) K
	index   map[K]int      // nil for a short or sorted list
	compare func(T, K) int // nil unless the list is sorted
}

func newFinder[T any, K comparable](list []T, key func(T) K) finder[T, K] {
	f := finder[T, K]{list: list, key: key}
	if len(list) <= 16 {
		return f
	}
	f.index = make(map[K]int, len(list))
	for i, x := range list {
		if _, ok := f.index[key(x)]; !ok {
			f.index[key(x)] = i
		}
	}
	return f
}

func findEndpoints(list []*tracker.Endpoint) finder[*tracker.Endpoint, netip.AddrPort] {
	sorted := slices.IsSortedFunc(list, func(a, b *tracker.Endpoint) int { return a.Addr.Compare(b.Addr) })
	if !sorted {
		return newFinder(list, endpointAddr)
	}
	return finder[*tracker.Endpoint, netip.AddrPort]{list: list, compare: func(ep *tracker.Endpoint, a netip.AddrPort) int { return ep.Addr.Compare(a) }}
}

// first returns the index of the first element with key k, or -1.
func (f finder[T, K]) first(k K) int {
	if f.compare != nil {
		if i, ok := slices.BinarySearchFunc(f.list, k, f.compare); ok {
			return i
		}
		return -1
	}
	if f.index == nil {
		return slices.IndexFunc(f.list, func(x T) bool { return f.key(x) == k })
	}
	if i, ok := f.index[k]; ok {
		return i
	}
	return -1
}

func (f finder[T, K]) has(k K) bool { return f.first(k) >= 0 }

// link finds frontends that move between two changes. It records them in both changes, and moves the change that
// gains a frontend before the one that loses it.
func link(changes []Change) {
	winners := 0
	for i := range changes {
		winners += len(changes[i].lost)
	}
	if winners == 0 {
		return
	}
	byKey := make(map[tracker.Key]int, len(changes))
	for i := range changes {
		byKey[changes[i].Key] = i
	}
	for i := range changes {
		for _, m := range changes[i].lost {
			if w, ok := byKey[m.key]; ok {
				changes[w].taken = append(changes[w].taken, move{at: m.at, key: changes[i].Key})
			}
		}
	}

	// Depth first. If a change that takes a frontend is still being visited, the changes form a circle, which has no
	// order.
	out := make([]Change, 0, len(changes))
	opened := make([]bool, len(changes))
	var visit func(i int)
	visit = func(i int) {
		if opened[i] {
			return
		}
		opened[i] = true
		for _, m := range changes[i].lost {
			if w, ok := byKey[m.key]; ok {
				visit(w)
			}
		}
		out = append(out, changes[i])
	}
	for i := range changes {
		visit(i)
	}
	copy(changes, out)
}

// PortsOf returns every port of a Service, in both families, sorted by key, or nil. The first call builds an index.
// The result is shared and must not be modified.
func (s *Snapshot) PortsOf(name types.NamespacedName) []*Port {
	s.onceNames.Do(func() {
		s.names = make(map[types.NamespacedName][]*Port, len(s.Ports))
		for _, svc := range s.Ports {
			s.names[svc.Key.NamespacedName] = append(s.names[svc.Key.NamespacedName], svc)
		}
		for _, ports := range s.names {
			slices.SortFunc(ports, func(a, b *Port) int { return a.Key.Compare(b.Key) })
		}
	})
	return s.names[name]
}
