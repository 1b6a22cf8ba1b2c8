package layout

import (
	"strconv"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// StickyHandler is how connections to a sticky pool are handled. Pools share it. Each has a
// chain, which exists while a pool needs it and a little longer.
type StickyHandler struct {
	// Buckets and Hash determine how a new client gets its endpoint.
	Buckets int
	Hash    tracker.Hash
	// Seconds is how long the kernel remembers a client. The kernel has the time in rules only,
	// not in elements that rules add.
	Seconds int64
	// Range names the chains for ranges of ports. The handler has them beside the others.
	Range bool
}

// Chain returns the name of the handler's chain.
func (h StickyHandler) Chain() string {
	return h.prefix() + "sticky-" + choiceName(h.Buckets, h.Hash) + "-" + strconv.FormatInt(h.Seconds, 10) + "s"
}

// Chooser returns the name of the chain that gives a client its endpoint. Handlers that differ in
// the timeout share it.
func (h StickyHandler) Chooser() string {
	return h.prefix() + "choose-" + choiceName(h.Buckets, h.Hash)
}

func (h StickyHandler) prefix() string {
	if h.Range {
		return RangePrefix
	}
	return ""
}

// Timeout returns how long the kernel remembers a client.
func (h StickyHandler) Timeout() time.Duration { return time.Duration(h.Seconds) * time.Second }
