package model

import (
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
)

// chains is the department of handlers: of their numbers, their chains and the verdict maps that
// lead to the chains.
type chains struct {
	*common
	// handlers numbers the handlers that have a chain, from 1. A number is never given back.
	handlers book[layout.Handler, uint32]
	// sticky holds the sticky handlers that have a chain. Unlike other handlers there may be one for
	// each pool, because Services choose the timeout. So numbers and chains of unused ones are given
	// back. unused counts them.
	sticky        book[layout.StickyHandler, stickyEntry]
	stickyNumbers numbers
	unused        cell[int]
	// verdicts holds the contents of the verdict maps.
	verdicts map[layout.Set]*book[uint32, string]
	// objects holds the objects that created the chains. garbage holds those of chains that no rule
	// or element leads to any more.
	objects book[string, Object]
	garbage book[string, bool]
}

// stickyEntry is a sticky handler that has a chain.
type stickyEntry struct {
	number uint32
	// uses counts the pools with this handler.
	uses int
	// ranges is set if the handler has a chain for ranges of ports, too.
	ranges bool
}

// stickyRef is a sticky handler with its number. The zero value is none.
type stickyRef struct {
	handler layout.StickyHandler
	number  uint32
}

func newChains(c *common) chains {
	d := &c.draft
	verdicts := map[layout.Set]*book[uint32, string]{}
	for _, s := range [...]layout.Set{layout.Handlers, layout.InternalHandlers, layout.OwnHandlers, layout.StickyHandlers, layout.RangeStickyHandlers} {
		b := newBook[uint32, string](d)
		verdicts[s] = &b
	}
	return chains{
		common: c, handlers: newBook[layout.Handler, uint32](d), sticky: newBook[layout.StickyHandler, stickyEntry](d),
		stickyNumbers: newNumbers(layout.MaxStickyHandlers, d), unused: cell[int]{draft: d}, verdicts: verdicts,
		objects: newBook[string, Object](d), garbage: newBook[string, bool](d),
	}
}

// handler returns the handler's number. It creates the handler if needed.
func (c *chains) handler(h layout.Handler, tx *Tx) uint32 {
	n, ok := c.handlers.now[h]
	if !ok {
		n = uint32(len(c.handlers.now) + 1)
		c.handlers.set(h, n)
		c.handlerChain(h, tx)
		c.verdict(layout.Handlers, layout.DispatchKey(n, 0), h.Chain(), tx)
		if h.Stops() {
			c.verdict(layout.OwnHandlers, layout.DispatchKey(n, 0), h.Chain(), tx)
		}
	}
	return n
}

// internalHandler is like handler, for internal traffic.
func (c *chains) internalHandler(h layout.Handler, tx *Tx) uint32 {
	n := c.handler(h, tx)
	c.verdict(layout.InternalHandlers, layout.DispatchKey(n, 0), h.Chain(), tx)
	return n
}

// has reports whether the handler exists, for internal traffic if internal is set.
func (c *chains) has(h layout.Handler, internal bool) bool {
	n, ok := c.handlers.now[h]
	return ok && (!internal || c.verdicts[layout.InternalHandlers].now[layout.DispatchKey(n, 0)] != "")
}

// stickyHandler returns the sticky handler, which it creates if needed, or false if there is no
// number for it. ranges tells that the handler is for ranges of ports, too.
func (c *chains) stickyHandler(h layout.StickyHandler, ranges bool, tx *Tx) (stickyRef, bool) {
	e, ok := c.sticky.now[h]
	if !ok {
		if e.number, ok = c.stickyNumbers.take(); !ok {
			return stickyRef{}, false
		}
		c.sticky.set(h, e)
		c.unused.set(c.unused.now + 1)
		c.stickyChains(h, e.number, layout.StickyHandlers, layout.ChainStickySend, StickyChains, tx)
	}
	if ranges && !e.ranges {
		e.ranges = true
		c.sticky.set(h, e)
		of := h
		of.Range = true
		c.stickyChains(of, e.number, layout.RangeStickyHandlers, layout.ChainRangeStickySend, RangeStickyChains, tx)
	}
	return stickyRef{h, e.number}, true
}

func (c *chains) hasSticky(h layout.StickyHandler, ranges bool) bool {
	e, ok := c.sticky.now[h]
	return ok && (e.ranges || !ranges)
}

// stickyChains creates the chains of a sticky handler, and those of the given kind, which it shares.
func (c *chains) stickyChains(h layout.StickyHandler, number uint32, s layout.Set, shared string, kind Kind, tx *Tx) {
	c.chain(shared, Object{Kind: kind}, tx)
	c.chain(h.Chooser(), Object{Kind: ChooserChain, Sticky: h}, tx)
	c.chain(h.Chain(), Object{Kind: StickyChain, Sticky: h}, tx)
	c.verdict(s, number, h.Chain(), tx)
}

// moveSticky removes a use of one sticky handler and adds a use of another. Either may be none.
func (c *chains) moveSticky(from, to stickyRef) {
	c.useSticky(from, -1)
	c.useSticky(to, +1)
}

// useSticky adds by, 1 or -1, to the uses of a sticky handler.
func (c *chains) useSticky(r stickyRef, by int) {
	if r == (stickyRef{}) {
		return
	}
	e := c.sticky.now[r.handler]
	if e.uses == 0 {
		c.unused.set(c.unused.now - 1)
	}
	if e.uses += by; e.uses == 0 {
		c.unused.set(c.unused.now + 1)
	}
	c.sticky.set(r.handler, e)
}

// KeepUnused is how many unused sticky handlers stay. A Service whose number of endpoints goes to
// and fro finds its handlers again, and the work to delete handlers is shared by many.
const KeepUnused = 64

// collectSticky deletes the elements of sticky handlers that are no longer in use, if there are
// many. Their chains become garbage.
func (c *chains) collectSticky(tx *Tx) {
	if c.unused.now <= KeepUnused {
		return
	}
	for h, entry := range c.sticky.now {
		if entry.uses != 0 {
			continue
		}
		c.sticky.delete(h)
		c.stickyNumbers.give(entry.number)
		for _, s := range []layout.Set{layout.StickyHandlers, layout.RangeStickyHandlers} {
			if h.Range = s == layout.RangeStickyHandlers; h.Range && !entry.ranges {
				continue
			}
			c.verdicts[s].delete(entry.number)
			tx.remove(c.Family, &layout.Element{Set: s, Key: word(entry.number)})
			c.garbage.set(h.Chain(), true)
		}
	}
	c.unused.set(0)
}

// verdict adds an element to a verdict map that leads to a chain, unless the map has the key.
func (c *chains) verdict(s layout.Set, key uint32, chain string, tx *Tx) {
	if c.verdicts[s].now[key] != "" {
		return
	}
	c.verdicts[s].set(key, chain)
	tx.add(c.Family, &layout.Element{Set: s, Key: word(key)}, chain)
}

// handlerChain creates the handler's chain and the chains that it goes to.
func (c *chains) handlerChain(h layout.Handler, tx *Tx) {
	if _, ok := c.objects.now[h.Chain()]; ok {
		return
	}
	if h.Firewall {
		c.handlerChain(h.Unguarded(), tx)
	}
	if h.HasPool() && h != h.Direct() {
		c.handlerChain(h.Direct(), tx)
	}
	c.chain(h.Chain(), Object{Kind: HandlerChain, Handler: h, Size: max(1, len(inet.Prefixes(c.Node.LocalTraffic.CIDRs, c.Family)))}, tx)
}

// chain creates a chain, unless it exists.
func (c *chains) chain(name string, o Object, tx *Tx) {
	if c.garbage.now[name] {
		c.garbage.delete(name)
	}
	if _, ok := c.objects.now[name]; ok {
		return
	}
	o.Family = c.Family
	c.objects.set(name, o)
	tx.Object(o)
}

// Verdicts returns the contents of the verdict maps.
func (c *chains) Verdicts() map[layout.Set]map[uint32]string {
	out := map[layout.Set]map[uint32]string{}
	for s, b := range c.verdicts {
		out[s] = b.now
	}
	return out
}

// Chains returns the objects that created the chains of handlers, by name.
func (c *chains) Chains() map[string]Object { return c.objects.now }

// Garbage returns the chains that no rule or element leads to any more. They can be deleted after
// the commit: kernels before 6.2 cannot delete a chain in the transaction that deletes the element
// that refers to it.
func (c *chains) Garbage() map[string]bool { return c.garbage.now }

// DropGarbage forgets the chains in Garbage, which were deleted or else stay like chains in use.
func (c *chains) DropGarbage(deleted bool) {
	if deleted {
		for name := range c.garbage.now {
			delete(c.objects.now, name)
		}
	}
	clear(c.garbage.now)
}
