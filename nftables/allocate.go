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
	for _, target := range targets {
		if !slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return f.Target == target || f.Internal == target }) {
			continue
		}
		p := old.pools[target]
		if p == nil || (p.affinity != 0) != (s.Port.Affinity != 0) {
			var err error
			if p, err = t.newPool(s, target); err != nil {
				if made := now.pools[ruleset.ToCluster]; made != nil && made != old.pools[ruleset.ToCluster] {
					t.freeNumber(made)
				}
				return nil, err
			}
		}
		now.pools[target] = p
	}
	now.keys = make([]dispatchKeys, len(s.Frontends))
	for i := range s.Frontends {
		f := &s.Frontends[i]
		now.keys[i].any = dispatchKey(t.handler(handlerOf(s, f), w), now.number(f.Target))
		if h, ok := internalHandlerOf(s, f); ok {
			now.keys[i].internal = dispatchKey(t.internalHandler(h, w), now.number(ruleset.ToCluster))
		}
	}
	return now, nil
}

func (t *table) newPool(s *ruleset.Service, target ruleset.Target) (*pool, error) {
	if s.Port.Affinity == 0 {
		n, ok := t.plain.take()
		if !ok {
			return nil, errTooManyPools
		}
		return &pool{number: n}, nil
	}
	p := &pool{affinity: s.Port.Affinity}
	owner := ownerOf(s.Key, target)
	if a := t.adopted[owner]; a != nil {
		delete(t.adopted, owner)
		p.number, p.adopted = a.number, a.members
		return p, nil
	}
	n, ok := t.sticky.take()
	if !ok {
		return nil, errTooManySticky
	}
	p.number = stickyMark | n
	return p, nil
}

func (t *table) freeNumber(p *pool) {
	if p.affinity != 0 {
		t.sticky.give(p.number &^ stickyMark)
	} else {
		t.plain.give(p.number)
	}
}

// missingHandlers returns the handlers that the Service needs and that do not exist.
func (t *table) missingHandlers(s *ruleset.Service) (missing []handler) {
	need := func(h handler) {
		if _, ok := t.handlers.number[h]; !ok && !slices.Contains(missing, h) {
			missing = append(missing, h)
		}
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		need(handlerOf(s, f))
		if h, ok := internalHandlerOf(s, f); ok {
			need(h)
		}
	}
	return missing
}

// handler returns the handler's number. It creates the handler if needed.
func (t *table) handler(h handler, w *writer) uint32 {
	n, ok := t.handlers.number[h]
	if !ok {
		n = t.handlers.add(h)
		t.makeChain(h, w)
		t.addVerdict(setHandlers, n, h, w)
		if h.stops() {
			t.addVerdict(setOwnHandlers, n, h, w)
		}
	}
	return n
}

// internalHandler is like handler, for internal traffic.
func (t *table) internalHandler(h handler, w *writer) uint32 {
	n := t.handler(h, w)
	t.addVerdict(setInternalHandlers, n, h, w)
	return n
}

// addVerdict adds an element to a verdict map that leads to the handler's chain.
func (t *table) addVerdict(s set, number uint32, h handler, w *writer) {
	key := dispatchKey(number, 0)
	if t.verdicts[s][key] != "" {
		return
	}
	t.verdicts[s][key] = h.chain()
	t.count[s]++
	k := octets{}.word(key)
	w.adds(t.family, s).AddVerdict(k.bytes(), h.chain())
}

// use adds by to the use counts of the dispatch keys' handlers.
func (t *table) use(keys []dispatchKeys, by int) {
	for _, k := range keys {
		t.handlers.use(k.any, by)
		t.handlers.use(k.internal, by)
	}
}

// makeChain creates the handler's chain and the chains that it goes to.
func (t *table) makeChain(h handler, w *writer) {
	name := h.chain()
	if _, ok := t.chains[name]; ok {
		return
	}
	rules := h.chainRules(t.rules(), t.node.LocalTraffic)
	t.chains[name] = len(rules)
	if h.firewall {
		t.makeChain(h.unguarded(), w)
	}
	if h.buckets != 0 && h != h.direct() {
		t.makeChain(h.direct(), w)
	}
	w.chain(t.family, name, nil, rules)
}

// numbers allocates the numbers of pools, from 1 to max. It reuses a number only after all
// others, so that no packet still carries the number for its last owner.
type numbers struct {
	max uint32
	// next counts the numbers given out or skipped. The first number is start+1.
	start, next uint32
	// kept holds numbers to skip.
	kept map[uint32]bool
	free []uint32
}

// take returns a number, or false if all are in use.
func (n *numbers) take() (uint32, bool) {
	for n.next < n.max {
		v := (n.start+n.next)%n.max + 1
		n.next++
		if !n.kept[v] {
			return v, true
		}
	}
	if len(n.free) == 0 {
		return 0, false
	}
	v := n.free[0]
	n.free = n.free[1:]
	return v, true
}

func (n *numbers) give(v uint32) { n.free = append(n.free, v) }
