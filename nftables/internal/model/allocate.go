package model

import (
	"slices"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// allocate returns the Service with its pools and dispatch keys. It reuses old's pools if they
// are of the right kind. It creates missing pools and handlers.
func (t *Table) allocate(old *service, s *ruleset.Port, tx *Tx) (*service, error) {
	now := &service{}
	if s == nil {
		return now, nil
	}
	for _, target := range targets {
		if !slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.Target == target || f.Internal == target }) {
			continue
		}
		p := t.pool(old.pools[target], s, target)
		if p == nil {
			return nil, ErrTooManyPools
		}
		now.pools[target] = p
		now.lacksAffinity = now.lacksAffinity || p.sticky != (s.Spec.Affinity != 0)
	}
	if err := t.allocateRanges(old, now, s, tx); err != nil {
		return nil, err
	}
	sticky := now.sticky()
	now.keys = make([]dispatchKeys, len(s.Frontends))
	for i := range s.Frontends {
		f := &s.Frontends[i]
		now.keys[i].any = layout.DispatchKey(t.handler(HandlerOf(s, f, sticky), tx), now.number(f.Target))
		if HasInternalHandler(f) {
			h := PoolHandler(s, f, ruleset.TargetCluster, sticky)
			now.keys[i].internal = layout.DispatchKey(t.internalHandler(h, tx), now.number(ruleset.TargetCluster))
		}
	}
	return now, nil
}

// pool returns the pool of the Service for a target: old if that is of the right kind, or a new
// one. If there is no number for a sticky pool, the pool is of the other kind. Without a number
// for any pool, it returns nil.
func (t *Table) pool(old *pool, s *ruleset.Port, target ruleset.Target) *pool {
	if old != nil && old.sticky == (s.Spec.Affinity != 0) {
		return old
	}
	if s.Spec.Affinity != 0 {
		if p := t.newSticky(s, target); p != nil {
			return p
		}
		if old != nil {
			return old
		}
	}
	n, ok := t.plain.take()
	if !ok {
		return nil
	}
	p := &pool{number: n, protocol: s.Key.Protocol}
	t.undo.created = append(t.undo.created, p)
	return p
}

// newSticky returns a new sticky pool, or the one that the Service had in an earlier table. It
// returns nil if there is no number left.
func (t *Table) newSticky(s *ruleset.Port, target ruleset.Target) *pool {
	p := &pool{sticky: true}
	owner := ownerOf(s.Key, target)
	if a := t.adopted[owner]; a != nil {
		delete(t.adopted, owner)
		t.undo.later(func() { t.adopted[owner] = a })
		p.number, p.adopted = a.number, a.members
		return p
	}
	n, ok := t.sticky.take()
	if !ok {
		return nil
	}
	p.number = layout.StickyMark | n
	t.undo.created = append(t.undo.created, p)
	return p
}

func (t *Table) freeNumber(p *pool) {
	if p.sticky {
		t.sticky.give(p.number &^ layout.StickyMark)
	} else {
		t.plain.give(p.number)
	}
}

// prepare creates the handlers that the Service needs if it gets the pools that it wants. It calls
// room with the mark before each.
func (t *Table) prepare(s *ruleset.Port, tx *Tx, room func(Mark) error) error {
	sticky := WantedSticky(s)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if err := t.prepareHandler(HandlerOf(s, f, sticky), false, tx, room); err != nil {
			return err
		}
		if HasInternalHandler(f) {
			if err := t.prepareHandler(PoolHandler(s, f, ruleset.TargetCluster, sticky), true, tx, room); err != nil {
				return err
			}
		}
	}
	if s.Spec.Affinity == 0 {
		return nil
	}
	for _, target := range targets {
		h, ranges := StickyHandlerOf(s, target), hasRange(s)
		if e := t.stickyHandlers.entries[h]; len(s.Pool(target)) == 0 || e != nil && (e.ranges || !ranges) {
			continue
		}
		t.undo.begin(t)
		mark := tx.Mark()
		t.stickyHandler(h, ranges, tx)
		if err := room(mark); err != nil {
			return err
		}
	}
	return nil
}

func (t *Table) prepareHandler(h layout.Handler, internal bool, tx *Tx, room func(Mark) error) error {
	n, ok := t.handlers[h]
	if ok && (!internal || t.verdicts[layout.InternalHandlers][layout.DispatchKey(n, 0)] != "") {
		return nil
	}
	t.undo.begin(t)
	mark := tx.Mark()
	if internal {
		t.internalHandler(h, tx)
	} else {
		t.handler(h, tx)
	}
	return room(mark)
}

// preparePool creates the chain of pools with a number of buckets.
func (t *Table) preparePool(buckets int, tx *Tx) {
	t.undo.begin(t)
	t.handlerChain(layout.Handler{Buckets: buckets}, tx)
}

// stickyHandler returns the sticky handler, which it creates if needed, or nil if there is no
// number for it. ranges tells that the handler is for ranges of ports, too.
func (t *Table) stickyHandler(h layout.StickyHandler, ranges bool, tx *Tx) *stickyEntry {
	e := t.stickyHandlers.entries[h]
	if e == nil {
		e = t.newStickyHandler(h, tx)
	}
	if e != nil && ranges && !e.ranges {
		e.ranges = true
		t.undo.later(func() { e.ranges = false })
		h.Range = true
		t.chain(layout.ChainRangeStickySend, Object{Kind: RangeStickyChains}, tx)
		t.chain(h.Chooser(), Object{Kind: ChooserChain, Sticky: h}, tx)
		t.chain(h.Chain(), Object{Kind: StickyChain, Sticky: h}, tx)
		t.verdict(layout.RangeStickyHandlers, e.number, h.Chain(), tx)
	}
	return e
}

func (t *Table) newStickyHandler(h layout.StickyHandler, tx *Tx) *stickyEntry {
	e := t.stickyHandlers.add(h)
	if e == nil {
		return nil
	}
	t.undo.later(func() { t.stickyHandlers.remove(h, e) })
	t.chain(layout.ChainStickySend, Object{Kind: StickyChains}, tx)
	t.chain(h.Chooser(), Object{Kind: ChooserChain, Sticky: h}, tx)
	t.chain(h.Chain(), Object{Kind: StickyChain, Sticky: h}, tx)
	t.verdict(layout.StickyHandlers, e.number, h.Chain(), tx)
	return e
}

// collectSticky deletes the elements of sticky handlers that are no longer in use, if there are
// many. Their chains become garbage.
func (t *Table) collectSticky(tx *Tx) {
	for h, entry := range t.stickyHandlers.collect() {
		for _, s := range []layout.Set{layout.StickyHandlers, layout.RangeStickyHandlers} {
			if h.Range = s == layout.RangeStickyHandlers; h.Range && !entry.ranges {
				continue
			}
			delete(t.verdicts[s], entry.number)
			e := layout.Element{Set: s, Key: word(entry.number)}
			t.remove(&e, tx)
			t.garbage[h.Chain()] = true
		}
	}
}

// handler returns the handler's number. It creates the handler if needed.
func (t *Table) handler(h layout.Handler, tx *Tx) uint32 {
	n, ok := t.handlers[h]
	if !ok {
		n = t.handlers.add(h)
		t.undo.later(func() { delete(t.handlers, h) })
		t.handlerChain(h, tx)
		t.verdict(layout.Handlers, layout.DispatchKey(n, 0), h.Chain(), tx)
		if h.Stops() {
			t.verdict(layout.OwnHandlers, layout.DispatchKey(n, 0), h.Chain(), tx)
		}
	}
	return n
}

// internalHandler is like handler, for internal traffic.
func (t *Table) internalHandler(h layout.Handler, tx *Tx) uint32 {
	n := t.handler(h, tx)
	t.verdict(layout.InternalHandlers, layout.DispatchKey(n, 0), h.Chain(), tx)
	return n
}

// verdict adds an element to a verdict map that leads to a chain, unless the map has the key.
func (t *Table) verdict(s layout.Set, key uint32, chain string, tx *Tx) {
	if t.verdicts[s][key] != "" {
		return
	}
	t.verdicts[s][key] = chain
	t.undo.later(func() { delete(t.verdicts[s], key) })
	tx.add(t.Family, &layout.Element{Set: s, Key: word(key)}, chain)
}

// handlerChain creates the handler's chain and the chains that it goes to.
func (t *Table) handlerChain(h layout.Handler, tx *Tx) {
	if _, ok := t.chains[h.Chain()]; ok {
		return
	}
	if h.Firewall {
		t.handlerChain(h.Unguarded(), tx)
	}
	if h.HasPool() && h != h.Direct() {
		t.handlerChain(h.Direct(), tx)
	}
	t.chain(h.Chain(), Object{Kind: HandlerChain, Handler: h, Size: max(1, len(inet.Prefixes(t.Node.LocalTraffic.CIDRs, t.Family)))}, tx)
}

// chain creates a chain, unless it exists.
func (t *Table) chain(name string, o Object, tx *Tx) {
	if t.garbage[name] {
		delete(t.garbage, name)
		t.undo.later(func() { t.garbage[name] = true })
	}
	if _, ok := t.chains[name]; ok {
		return
	}
	o.Family = t.Family
	t.chains[name] = o
	t.undo.later(func() { delete(t.chains, name) })
	tx.Object(o)
}
