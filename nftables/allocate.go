//go:build linux

package nftables

import (
	"slices"

	"github.com/go-proxier/proxier/ruleset"
)

// allocate returns the Service with its pools and dispatch keys. It reuses old's pools if they
// are of the right kind. It creates missing pools and handlers.
func (t *table) allocate(old *service, s *ruleset.Service, w *writer) (*service, error) {
	now := &service{rule: s}
	if s == nil {
		return now, nil
	}
	free := func() {
		for _, target := range targets {
			if p := now.pools[target]; p != nil && p != old.pools[target] {
				t.freeNumber(p)
			}
		}
	}
	for _, target := range targets {
		if !slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.Target == target || f.Internal == target }) {
			continue
		}
		p := t.pool(old.pools[target], s, target)
		if p == nil {
			free()
			return nil, errTooManyPools
		}
		now.pools[target] = p
		now.lacksAffinity = now.lacksAffinity || p.sticky != (s.Port.Affinity != 0)
		if p.sticky && t.stickyHandler(stickyHandlerOf(s, target), w) == nil {
			free()
			return nil, errOverflow
		}
	}
	sticky := now.sticky()
	now.keys = make([]dispatchKeys, len(s.Frontends))
	for i := range s.Frontends {
		f := &s.Frontends[i]
		now.keys[i].any = dispatchKey(t.handler(handlerOf(s, f, sticky), w), now.number(f.Target))
		if hasInternalHandler(f) {
			h := poolHandler(s, ruleset.ToCluster, sticky)
			now.keys[i].internal = dispatchKey(t.internalHandler(h, w), now.number(ruleset.ToCluster))
		}
	}
	return now, nil
}

// pool returns the pool of the Service for a target: old if that is of the right kind, or a new
// one. If there is no number for a sticky pool, the pool is of the other kind. Without a number
// for any pool, it returns nil.
func (t *table) pool(old *pool, s *ruleset.Service, target ruleset.Target) *pool {
	if old != nil && old.sticky == (s.Port.Affinity != 0) {
		return old
	}
	if s.Port.Affinity != 0 {
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
	return &pool{number: n}
}

// newSticky returns a new sticky pool, or the one that the Service had in an earlier table. It
// returns nil if there is no number left.
func (t *table) newSticky(s *ruleset.Service, target ruleset.Target) *pool {
	p := &pool{sticky: true}
	owner := ownerOf(s.Key, target)
	if a := t.adopted[owner]; a != nil {
		delete(t.adopted, owner)
		p.number, p.adopted = a.number, a.members
		return p
	}
	n, ok := t.sticky.take()
	if !ok {
		return nil
	}
	p.number = stickyMark | n
	return p
}

func (t *table) freeNumber(p *pool) {
	if p.sticky {
		t.sticky.give(p.number &^ stickyMark)
	} else {
		t.plain.give(p.number)
	}
}

// missingHandlers returns the handlers that the Service needs and that do not exist.
func (t *table) missingHandlers(s *ruleset.Service) (missing []handler) {
	need := func(h handler) {
		if _, ok := t.handlers[h]; !ok && !slices.Contains(missing, h) {
			missing = append(missing, h)
		}
	}
	sticky := wantedSticky(s)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		need(handlerOf(s, f, sticky))
		if sticky != (stickyTargets{}) && t.sticky.exhausted() {
			need(handlerOf(s, f, stickyTargets{}))
		}
		if hasInternalHandler(f) {
			need(poolHandler(s, ruleset.ToCluster, sticky))
		}
	}
	return missing
}

// missingSticky returns the sticky handlers that the Service needs and that do not exist.
func (t *table) missingSticky(s *ruleset.Service) (missing []stickyHandler) {
	if s.Port.Affinity == 0 {
		return nil
	}
	for _, target := range targets {
		h := stickyHandlerOf(s, target)
		if len(s.Pool(target)) != 0 && t.stickyHandlers.entries[h] == nil && !slices.Contains(missing, h) {
			missing = append(missing, h)
		}
	}
	return missing
}

// stickyHandler returns the sticky handler, which it creates if needed, or nil if there is no
// number for it.
func (t *table) stickyHandler(h stickyHandler, w *writer) *stickyEntry {
	if e := t.stickyHandlers.entries[h]; e != nil {
		return e
	}
	e := t.stickyHandlers.add(h)
	if e == nil {
		return nil
	}
	r := t.rules()
	t.makeChain(chainStickySend, r.stickySend, w)
	t.makeChain(chainStickyRecall, r.stickyRecall, w)
	t.makeChain(chainStickyConfirm, r.stickyConfirm, w)
	t.makeChain(h.chooser(), func() []rule { return r.stickyChooser(h) }, w)
	t.makeChain(h.chain(), func() []rule { return r.stickyChain(h) }, w)
	t.addVerdict(setStickyHandlers, e.number, h.chain(), w)
	return e
}

// collectSticky deletes the elements of sticky handlers that are no longer in use, if there are
// many. The caller deletes the chains in garbage after the commit: kernels before 6.2 cannot delete
// a chain in the transaction that deletes the element that refers to it.
func (t *table) collectSticky(w *writer) {
	for h, number := range t.stickyHandlers.collect() {
		w.structural = true
		delete(t.verdicts[setStickyHandlers], number)
		e := element{set: setStickyHandlers, key: octets{}.word(number)}
		t.remove(&e, w)
		t.garbage[h.chain()] = true
	}
}

// handler returns the handler's number. It creates the handler if needed.
func (t *table) handler(h handler, w *writer) uint32 {
	n, ok := t.handlers[h]
	if !ok {
		n = t.handlers.add(h)
		t.makeHandlerChain(h, w)
		t.addVerdict(setHandlers, dispatchKey(n, 0), h.chain(), w)
		if h.stops() {
			t.addVerdict(setOwnHandlers, dispatchKey(n, 0), h.chain(), w)
		}
	}
	return n
}

// internalHandler is like handler, for internal traffic.
func (t *table) internalHandler(h handler, w *writer) uint32 {
	n := t.handler(h, w)
	t.addVerdict(setInternalHandlers, dispatchKey(n, 0), h.chain(), w)
	return n
}

// addVerdict adds an element to a verdict map that leads to a chain, unless the map has the key.
func (t *table) addVerdict(s set, key uint32, chain string, w *writer) {
	if t.verdicts[s][key] != "" {
		return
	}
	t.verdicts[s][key] = chain
	t.count[s]++
	k := octets{}.word(key)
	w.adds(t.family, s).AddVerdict(k.bytes(), chain)
}

// makeHandlerChain creates the handler's chain and the chains that it goes to.
func (t *table) makeHandlerChain(h handler, w *writer) {
	if _, ok := t.chains[h.chain()]; ok {
		return
	}
	if h.firewall {
		t.makeHandlerChain(h.unguarded(), w)
	}
	if h.hasPool() && h != h.direct() {
		t.makeHandlerChain(h.direct(), w)
	}
	t.makeChain(h.chain(), func() []rule { return h.chainRules(t.rules(), t.node.LocalTraffic) }, w)
}

// makeChain creates a chain with rules, unless it exists.
func (t *table) makeChain(name string, rules func() []rule, w *writer) {
	delete(t.garbage, name)
	if _, ok := t.chains[name]; ok {
		return
	}
	list := rules()
	t.chains[name] = len(list)
	w.chain(t.family, name, nil, list)
}
