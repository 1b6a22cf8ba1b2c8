package nftables

import (
	"strconv"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// stickyHandler is how connections to a sticky pool are handled. Pools share it. Each has a
// chain, which exists while a pool needs it and a little longer.
type stickyHandler struct {
	// buckets and hash determine how a new client gets its endpoint.
	buckets int
	hash    tracker.Hash
	// seconds is how long the kernel remembers a client. The kernel has the time in rules only,
	// not in elements that rules add.
	seconds int64
}

// stickyHandlerOf returns the handler of the Service's sticky pool for a target.
func stickyHandlerOf(s *ruleset.Service, t ruleset.Target) stickyHandler {
	return stickyHandler{handlerBuckets(s, t), s.Hash(), seconds(s.Port.Affinity)}
}

// chain returns the name of the handler's chain, and chooser that of the chain that gives a client
// its endpoint. Handlers that differ in the timeout share the chooser.
func (h stickyHandler) chain() string {
	return "sticky-" + choiceName(h.buckets, h.hash) + "-" + strconv.FormatInt(h.seconds, 10) + "s"
}

func (h stickyHandler) chooser() string { return "choose-" + choiceName(h.buckets, h.hash) }

func (h stickyHandler) timeout() time.Duration { return time.Duration(h.seconds) * time.Second }

// stickyEntry is a sticky handler that has a chain.
type stickyEntry struct {
	number uint32
	// uses counts the pools with this handler.
	uses int
}

// stickyHandlers numbers the sticky handlers that have a chain. Unlike other handlers there may be
// one for each pool, because Services choose the timeout. So numbers and chains of unused handlers
// are given back.
type stickyHandlers struct {
	entries map[stickyHandler]*stickyEntry
	numbers numbers
	// unused counts the entries without uses.
	unused int
}

func newStickyHandlers() stickyHandlers {
	return stickyHandlers{entries: map[stickyHandler]*stickyEntry{}, numbers: numbers{max: maxStickyHandlers}}
}

// add adds a handler without uses. It returns nil if there is no number left.
func (l *stickyHandlers) add(h stickyHandler) *stickyEntry {
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

// keepUnused is how many unused sticky handlers stay. A Service whose number of endpoints goes to
// and fro finds its handlers again, and the work to delete handlers is shared by many.
const keepUnused = 64

// collect removes the unused handlers, if there are many, and returns them with their numbers.
func (l *stickyHandlers) collect() map[stickyHandler]uint32 {
	if l.unused <= keepUnused {
		return nil
	}
	out := make(map[stickyHandler]uint32, l.unused)
	for h, e := range l.entries {
		if e.uses == 0 {
			out[h] = e.number
			delete(l.entries, h)
			l.numbers.give(e.number)
		}
	}
	l.unused = 0
	return out
}
