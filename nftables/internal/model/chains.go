package model

import (
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
)

// chains is the department of handlers: of their numbers, their chains and the verdict maps that
// lead to the chains.
type chains struct {
	common *common
	// handlers numbers the handlers that have a chain, from 1. A number is never given back.
	handlers map[layout.Handler]uint32
	// sticky holds the sticky handlers that have a chain. There may be one for each pool, because Services choose the
	// timeout, so numbers and chains of unused ones are given back. unused counts them.
	sticky        map[layout.StickyHandler]stickyEntry
	stickyNumbers numbers
	unused        int
	verdicts      map[layout.Set]map[uint32]string
	// objects holds the objects that created the chains. garbage holds those of chains that no rule
	// or element leads to any more.
	objects map[string]Object
	garbage map[string]bool
}

type stickyEntry struct {
	number uint32
	// uses counts the pools with this handler.
	uses int
}

// stickyRef is a sticky handler with its number. The zero value stands for no handler.
type stickyRef struct {
	handler layout.StickyHandler
	number  uint32
}

// dispatch sets the dispatch keys among the elements of frontends. s has the pools that w wants. dispatch
// creates missing handlers.
func (c *chains) dispatch(w *wanted, s *service, tx *Tx) {
	for _, k := range w.keys {
		h, number := k.handler, uint32(0)
		switch p := s.pools[k.target]; {
		case p != nil && p.sticky:
			h, number = h.ToSticky(), p.number
		case p != nil:
			number = p.number
		case h.HasPool(): // there is no number for it
			h = layout.Handler{Handling: layout.HandleReject, Firewall: h.Firewall}
		}
		w.elements[k.element].Data = word(layout.DispatchKey(c.handler(h, k.internal, tx), number))
	}
}

// handler returns the handler's number. It creates the handler if needed. internal reports that the handler is
// for internal traffic, too.
func (c *chains) handler(h layout.Handler, internal bool, tx *Tx) uint32 {
	n, ok := c.handlers[h]
	if ok && (!internal || c.verdicts[layout.InternalHandlers][layout.DispatchKey(n, 0)] != "") {
		return n
	}
	if !ok {
		n = uint32(len(c.handlers) + 1)
		c.handlers[h] = n
	}
	maps := append(make([]layout.Set, 0, 3), layout.Handlers)
	if h.Stops() {
		maps = append(maps, layout.OwnHandlers)
	}
	if internal {
		maps = append(maps, layout.InternalHandlers)
	}
	name := c.handlerChain(h, tx)
	for _, s := range maps {
		c.verdict(s, layout.DispatchKey(n, 0), name, tx)
	}
	return n
}

// stickyHandler returns the sticky handler, which it creates if needed, or false if there is no number for it.
func (c *chains) stickyHandler(h layout.StickyHandler, tx *Tx) (stickyRef, bool) {
	e, ok := c.sticky[h]
	if !ok {
		if e.number, ok = c.stickyNumbers.allocateNumber(); !ok {
			return stickyRef{}, false
		}
		c.unused++
		name := h.Chain()
		c.chain(layout.ChainStickySend, Object{Kind: StickyChains}, tx)
		c.chain(h.Chooser(), Object{Kind: ChooserChain, Sticky: h}, tx)
		c.chain(name, Object{Kind: StickyChain, Sticky: h}, tx)
		c.verdict(layout.StickyHandlers, e.number, name, tx)
		c.sticky[h] = e
	}
	return stickyRef{h, e.number}, true
}

// planSticky gives a Service's pool for a target, if that is sticky, the handler h. was and is are the same pool
// unless its kind changes.
func (c *chains) planSticky(was, is *pool, h layout.StickyHandler, tx *Tx) error {
	if was != nil && was != is {
		c.setSticky(was, stickyRef{}, tx)
	}
	if is == nil || !is.sticky {
		return nil
	}
	r, ok := c.stickyHandler(h, tx)
	if !ok {
		return ErrOverflow
	}
	c.setSticky(is, r, tx)
	return nil
}

// setSticky gives a sticky pool a sticky handler, or none, and adds the element that leads to it.
func (c *chains) setSticky(p *pool, h stickyRef, tx *Tx) {
	if p.handler == h {
		return
	}
	c.useSticky(p.handler, -1)
	c.useSticky(h, +1)
	e := layout.Element{Set: layout.StickyPools, Key: word(p.number)}
	if p.handler != (stickyRef{}) {
		tx.remove(c.common.family, &e)
	}
	if h != (stickyRef{}) {
		e.Data = word(layout.StickyKey(h.number, p.number))
		tx.add(c.common.family, &e, "")
	}
	p.handler = h
}

// useSticky adds by, 1 or -1, to the uses of a sticky handler, which may be none.
func (c *chains) useSticky(r stickyRef, by int) {
	if r == (stickyRef{}) {
		return
	}
	e := c.sticky[r.handler]
	if e.uses == 0 {
		c.unused--
	}
	if e.uses += by; e.uses == 0 {
		c.unused++
	}
	c.sticky[r.handler] = e
}

// KeepUnused is how many unused sticky handlers stay, for Services whose number of endpoints goes to and fro.
const KeepUnused = 64

// collectSticky deletes the elements of sticky handlers that are no longer in use, if there are
// many. Their chains become garbage.
func (c *chains) collectSticky(tx *Tx) {
	if c.unused <= KeepUnused {
		return
	}
	for h, entry := range c.sticky {
		if entry.uses != 0 {
			continue
		}
		delete(c.sticky, h)
		c.stickyNumbers.releaseNumber(entry.number)
		verdicts := c.verdicts[layout.StickyHandlers]
		c.garbage[verdicts[entry.number]] = true
		delete(verdicts, entry.number)
		tx.remove(c.common.family, &layout.Element{Set: layout.StickyHandlers, Key: word(entry.number)})
	}
	c.unused = 0
}

// verdict adds an element to a verdict map that leads to a chain, unless the map has the key.
func (c *chains) verdict(s layout.Set, key uint32, chain string, tx *Tx) {
	if c.verdicts[s][key] != "" {
		return
	}
	c.verdicts[s][key] = chain
	tx.add(c.common.family, &layout.Element{Set: s, Key: word(key)}, chain)
}

// handlerChain creates the handler's chain and the chains that it goes to. It returns its name.
func (c *chains) handlerChain(h layout.Handler, tx *Tx) string {
	name := h.Chain()
	if c.hasChain(name) {
		return name
	}
	if h.Firewall {
		c.handlerChain(h.Unguarded(), tx)
	}
	if h.HasPool() && h != h.Direct() {
		c.handlerChain(h.Direct(), tx)
	}
	c.chain(name, Object{Kind: HandlerChain, Handler: h, Size: max(1, len(inet.Prefixes(c.common.node.LocalTraffic.CIDRs, c.common.family)))}, tx)
	return name
}

// chain creates a chain, unless it exists.
func (c *chains) chain(name string, o Object, tx *Tx) {
	delete(c.garbage, name)
	if c.hasChain(name) {
		return
	}
	o.Family = c.common.family
	c.objects[name] = o
	tx.Object(o)
}

// Verdicts returns the contents of the verdict maps.
func (c *chains) Verdicts() map[layout.Set]map[uint32]string { return c.verdicts }

func (c *chains) hasChain(name string) bool {
	_, ok := c.objects[name]
	return ok
}

// Objects returns the objects that created the chains of handlers, by name.
func (c *chains) Objects() map[string]Object { return c.objects }

// Garbage returns the chains that no rule or element leads to any more. Kernels before 6.2 can delete them only after
// the commit.
func (c *chains) Garbage() map[string]bool { return c.garbage }

// DropGarbage forgets the chains in Garbage, which were deleted or else stay like chains in use.
func (c *chains) DropGarbage(deleted bool) {
	if deleted {
		for name := range c.garbage {
			delete(c.objects, name)
		}
	}
	clear(c.garbage)
}
