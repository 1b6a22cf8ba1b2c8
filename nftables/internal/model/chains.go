package model

import (
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
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
	verdicts book[verdictKey, string]
	// objects holds the objects that created the chains. garbage holds those of chains that no rule
	// or element leads to any more.
	objects book[string, Object]
	garbage book[string, bool]
}

type verdictKey struct {
	set layout.Set
	key uint32
}

// stickyEntry is a sticky handler that has a chain.
type stickyEntry struct {
	number uint32
	// uses counts the pools with this handler.
	uses int
	// ranges is set if the handler has a chain for ranges of ports, too.
	ranges bool
}

// stickyRef is a sticky handler with its number. The zero value stands for no handler.
type stickyRef struct {
	handler layout.StickyHandler
	number  uint32
}

// handler returns the handler's number. It creates the handler if needed.
func (c *chains) handler(h layout.Handler, tx *Tx) uint32 {
	n, ok := c.handlers.now[h]
	if !ok {
		n = uint32(len(c.handlers.now) + 1)
		c.handlers.set(&c.draft, h, n)
		name := c.handlerChain(h, tx)
		c.verdict(layout.Handlers, layout.DispatchKey(n, 0), name, tx)
		if h.Stops() {
			c.verdict(layout.OwnHandlers, layout.DispatchKey(n, 0), name, tx)
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

// stickyHandler returns the sticky handler, which it creates if needed, or false if there is no
// number for it. ranges tells that the handler is for ranges of ports, too.
func (c *chains) stickyHandler(h layout.StickyHandler, ranges bool, tx *Tx) (stickyRef, bool) {
	e, ok := c.sticky.now[h]
	if !ok {
		if e.number, ok = c.stickyNumbers.take(&c.draft); !ok {
			return stickyRef{}, false
		}
		c.sticky.set(&c.draft, h, e)
		c.unused.set(&c.draft, c.unused.now+1)
		c.stickyChains(h, e.number, layout.StickyHandlers, layout.ChainStickySend, StickyChains, tx)
	}
	if ranges && !e.ranges {
		e.ranges = true
		c.sticky.set(&c.draft, h, e)
		of := h
		of.Range = true
		c.stickyChains(of, e.number, layout.RangeStickyHandlers, layout.ChainRangeStickySend, RangeStickyChains, tx)
	}
	return stickyRef{h, e.number}, true
}

// stickyChains creates the chains of a sticky handler, and those of the given kind, which it shares.
func (c *chains) stickyChains(h layout.StickyHandler, number uint32, s layout.Set, shared string, kind Kind, tx *Tx) {
	c.chain(shared, Object{Kind: kind}, tx)
	c.chain(h.Chooser(), Object{Kind: ChooserChain, Sticky: h}, tx)
	c.chain(h.Chain(), Object{Kind: StickyChain, Sticky: h}, tx)
	c.verdict(s, number, h.Chain(), tx)
}

// useSticky adds by, 1 or -1, to the uses of a sticky handler, which may be none.
func (c *chains) useSticky(r stickyRef, by int) {
	if r == (stickyRef{}) {
		return
	}
	e := c.sticky.now[r.handler]
	if e.uses == 0 {
		c.unused.set(&c.draft, c.unused.now-1)
	}
	if e.uses += by; e.uses == 0 {
		c.unused.set(&c.draft, c.unused.now+1)
	}
	c.sticky.set(&c.draft, r.handler, e)
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
		c.sticky.delete(&c.draft, h)
		c.stickyNumbers.give(entry.number)
		for _, s := range []layout.Set{layout.StickyHandlers, layout.RangeStickyHandlers} {
			if h.Range = s == layout.RangeStickyHandlers; h.Range && !entry.ranges {
				continue
			}
			c.verdicts.delete(&c.draft, verdictKey{s, entry.number})
			tx.remove(c.Family, &layout.Element{Set: s, Key: word(entry.number)})
			c.garbage.set(&c.draft, h.Chain(), true)
		}
	}
	c.unused.set(&c.draft, 0)
}

// verdict adds an element to a verdict map that leads to a chain, unless the map has the key.
func (c *chains) verdict(s layout.Set, key uint32, chain string, tx *Tx) {
	if c.verdicts.now[verdictKey{s, key}] != "" {
		return
	}
	c.verdicts.set(&c.draft, verdictKey{s, key}, chain)
	tx.add(c.Family, &layout.Element{Set: s, Key: word(key)}, chain)
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
	c.chain(name, Object{Kind: HandlerChain, Handler: h, Size: max(1, len(inet.Prefixes(c.Node.LocalTraffic.CIDRs, c.Family)))}, tx)
	return name
}

// chain creates a chain, unless it exists.
func (c *chains) chain(name string, o Object, tx *Tx) {
	if c.garbage.now[name] {
		c.garbage.delete(&c.draft, name)
	}
	if c.hasChain(name) {
		return
	}
	o.Family = c.Family
	c.objects.set(&c.draft, name, o)
	tx.Object(o)
}

// Verdicts returns the contents of the verdict maps.
func (c *chains) Verdicts() map[layout.Set]map[uint32]string {
	out := map[layout.Set]map[uint32]string{
		layout.Handlers: {}, layout.InternalHandlers: {}, layout.OwnHandlers: {}, layout.StickyHandlers: {}, layout.RangeStickyHandlers: {},
	}
	for k, chain := range c.verdicts.now {
		out[k.set][k.key] = chain
	}
	return out
}

// hasChain reports whether a chain exists.
func (c *chains) hasChain(name string) bool {
	_, ok := c.objects.now[name]
	return ok
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

// targets are the targets that have a pool.
var targets = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// StickyTargets tells, by target, whether a Service's pool is sticky.
type StickyTargets [ruleset.TargetLocal + 1]bool

// WantedSticky returns the targets whose pools should be sticky: all of a Service with client
// affinity.
func WantedSticky(s *ruleset.Port) (out StickyTargets) {
	for _, target := range targets {
		out[target] = s.Spec.Affinity != 0
	}
	return out
}

// HandlerOf returns the handler of a frontend of the Service.
func HandlerOf(s *ruleset.Port, f *ruleset.Frontend, sticky StickyTargets) layout.Handler {
	var h layout.Handler
	if f.Target == ruleset.TargetCluster || f.Target == ruleset.TargetLocal {
		h = PoolHandler(s, f, f.Target, sticky)
	}
	h.Range = f.IsRange()
	h.Firewall = len(f.Sources) != 0
	switch {
	case f.Target == ruleset.TargetReject:
		h.Handling = layout.HandleReject
	case f.Target == ruleset.TargetDrop && f.Internal == ruleset.TargetCluster:
		h.Handling = layout.HandleInternalOrDrop
	case f.Target == ruleset.TargetPass:
		h.Handling = layout.HandleInternalOrPass
	case f.Target == ruleset.TargetDrop:
		h.Handling = layout.HandleDrop
	case f.Masquerade == ruleset.MasqueradeAlways:
		h.Handling = layout.HandleAlways
	case f.Masquerade == ruleset.MasqueradeNotPods:
		h.Handling = layout.HandleNotPods
	case f.Masquerade == ruleset.MasqueradeNode:
		h.Handling = layout.HandleInternal
	}
	return h
}

// HasInternalHandler reports whether internal traffic to the frontend has a handler of its own,
// which sends to the pool of [ruleset.TargetCluster].
func HasInternalHandler(f *ruleset.Frontend) bool {
	return f.ShortCircuit() && f.Internal == ruleset.TargetCluster
}

// PoolHandler returns the handler that only sends connections to the frontend to the Service's pool
// for a target.
func PoolHandler(s *ruleset.Port, f *ruleset.Frontend, t ruleset.Target, sticky StickyTargets) layout.Handler {
	if sticky[t] {
		return layout.Handler{Sticky: true, Range: f.IsRange()}
	}
	return layout.Handler{Buckets: handlerBuckets(s, t), Hash: s.Hash(), Range: f.IsRange()}
}

// StickyHandlerOf returns the handler of the Service's sticky pool for a target.
func StickyHandlerOf(s *ruleset.Port, t ruleset.Target) layout.StickyHandler {
	return layout.StickyHandler{Buckets: handlerBuckets(s, t), Hash: s.Hash(), Seconds: layout.Seconds(s.Spec.Affinity)}
}
