package model

import (
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

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

// handlers numbers the handlers that have a chain, from 1. A number is never given back.
type handlers map[layout.Handler]uint32

// add numbers a handler.
func (l handlers) add(h layout.Handler) uint32 {
	n := uint32(len(l) + 1)
	l[h] = n
	return n
}

// StickyHandlerOf returns the handler of the Service's sticky pool for a target.
func StickyHandlerOf(s *ruleset.Port, t ruleset.Target) layout.StickyHandler {
	return layout.StickyHandler{Buckets: handlerBuckets(s, t), Hash: s.Hash(), Seconds: layout.Seconds(s.Spec.Affinity)}
}

// stickyEntry is a sticky handler that has a chain.
type stickyEntry struct {
	number uint32
	// uses counts the pools with this handler.
	uses int
	// ranges is set if the handler has a chain for ranges of ports, too.
	ranges bool
}

// stickyHandlers numbers the sticky handlers that have a chain. Unlike other handlers there may be
// one for each pool, because Services choose the timeout. So numbers and chains of unused handlers
// are given back.
type stickyHandlers struct {
	entries map[layout.StickyHandler]*stickyEntry
	numbers numbers
	// unused counts the entries without uses.
	unused int
}

func newStickyHandlers() stickyHandlers {
	return stickyHandlers{entries: map[layout.StickyHandler]*stickyEntry{}, numbers: numbers{max: layout.MaxStickyHandlers}}
}

// add adds a handler without uses. It returns nil if there is no number left.
func (l *stickyHandlers) add(h layout.StickyHandler) *stickyEntry {
	n, ok := l.numbers.take()
	if !ok {
		return nil
	}
	e := &stickyEntry{number: n}
	l.entries[h] = e
	l.unused++
	return e
}

// use adds by, 1 or -1, to the uses of an entry.
func (l *stickyHandlers) use(e *stickyEntry, by int) {
	if e.uses == 0 {
		l.unused--
	}
	if e.uses += by; e.uses == 0 {
		l.unused++
	}
}

// move removes a use of one entry and adds a use of another. Either may be nil.
func (l *stickyHandlers) move(from, to *stickyEntry) {
	if from != nil {
		l.use(from, -1)
	}
	if to != nil {
		l.use(to, +1)
	}
}

// remove removes an unused entry.
func (l *stickyHandlers) remove(h layout.StickyHandler, e *stickyEntry) {
	delete(l.entries, h)
	l.numbers.give(e.number)
	l.unused--
}

// KeepUnused is how many unused sticky handlers stay. A Service whose number of endpoints goes to
// and fro finds its handlers again, and the work to delete handlers is shared by many.
const KeepUnused = 64

// collect removes the unused handlers, if there are many, and returns them.
func (l *stickyHandlers) collect() map[layout.StickyHandler]*stickyEntry {
	if l.unused <= KeepUnused {
		return nil
	}
	out := make(map[layout.StickyHandler]*stickyEntry, l.unused)
	for h, e := range l.entries {
		if e.uses == 0 {
			out[h] = e
			delete(l.entries, h)
			l.numbers.give(e.number)
		}
	}
	l.unused = 0
	return out
}
