package model

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// hairpin is the department of the set of endpoints whose connections to themselves are masqueraded. A removed
// endpoint stays in the set for a grace period, because the kernel masquerades a connection some time after it chose
// the endpoint.
type hairpin struct {
	common *common
	// refs counts, by address, the Services' endpoints and the grace entries.
	refs uses
	// grace is sorted by time.
	grace []GraceEntry
}

// GraceEntry is the address of a removed endpoint and the time of its removal.
type GraceEntry struct {
	Addr  netip.Addr
	Since time.Time
}

// mayBeHere reports whether connections from the endpoint may pass this node before they
// are translated. A pod reaches Services through its own node.
func (c *common) mayBeHere(ep *tracker.Endpoint) bool {
	return ep.Node == "" || ep.Node == c.node.Info.Name
}

// planHairpin adds new endpoints to the set and starts the grace period of removed ones.
func (h *hairpin) planHairpin(before, after []*tracker.Endpoint, tx *Tx) {
	if sameSlice(before, after) {
		return
	}
	before, after = listdiff.Trim(before, after)
	for _, ep := range after {
		if h.common.mayBeHere(ep) {
			h.countUses(ep.Addr.Addr(), +1, tx)
		}
	}
	for _, ep := range before {
		if h.common.mayBeHere(ep) {
			h.grace = append(h.grace, GraceEntry{ep.Addr.Addr(), time.Now()})
		}
	}
}

func (h *hairpin) countUses(a netip.Addr, by int32, tx *Tx) {
	if !h.refs.addUses(a, by) {
		return
	}
	e := hairpinElement(a)
	if by > 0 {
		tx.add(h.common.family, &e, "")
	} else {
		tx.remove(h.common.family, &e)
	}
}

// hairpinElement returns the element that masquerades an endpoint's connections to itself.
func hairpinElement(a netip.Addr) layout.Element {
	return layout.Element{Set: layout.Hairpin, Key: ip(a).Addr(a)}
}

func (h *hairpin) addGrace(g GraceEntry, tx *Tx) {
	h.countUses(g.Addr, +1, tx)
	h.grace = append(h.grace, g)
}

// expireGrace removes the oldest grace entry if its grace period is over, and reports whether it
// removed one.
func (h *hairpin) expireGrace(tx *Tx) bool {
	if len(h.grace) == 0 {
		h.grace = nil
		return false
	}
	oldest := h.grace[0]
	if time.Since(oldest.Since) < h.common.config.GracePeriod {
		return false
	}
	h.countUses(oldest.Addr, -1, tx)
	h.grace = h.grace[1:]
	return true
}

// InGrace returns the endpoints that are in the set only for their grace period, and when it
// began, except those whose grace period began at the given time or later.
func (h *hairpin) InGrace(from time.Time) map[netip.Addr]time.Time {
	entries := map[netip.Addr]int{}
	last := map[netip.Addr]time.Time{}
	for _, g := range h.grace {
		entries[g.Addr]++
		if g.Since.After(last[g.Addr]) {
			last[g.Addr] = g.Since
		}
	}
	maps.DeleteFunc(last, func(a netip.Addr, since time.Time) bool {
		return entries[a] != h.refs.of(a) || !since.Before(from)
	})
	return last
}

// GraceEntries returns the grace entries for a table that replaces one with the given endpoints, oldest first. gone
// holds those that were removed, as InGrace returned them. Each endpoint whose grace period has not ended gets an
// entry, because a connection may be on its way to it.
func (c Config) GraceEntries(endpoints []netip.Addr, gone map[netip.Addr]time.Time) []GraceEntry {
	if c.GracePeriod == 0 {
		return nil
	}
	now := time.Now()
	var out []GraceEntry
	for _, a := range endpoints {
		since, gone := gone[a]
		if !gone {
			since = now
		}
		if !gone || now.Sub(since) < c.GracePeriod {
			out = append(out, GraceEntry{a, since})
		}
	}
	slices.SortStableFunc(out, func(a, b GraceEntry) int { return a.Since.Compare(b.Since) })
	return out
}
