//go:build linux

package nftables

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/tracker"
)

// hairpin is the model of the set of endpoints whose connections to themselves are
// masqueraded. A removed endpoint stays in the set for a grace period, because the kernel
// masquerades a connection some time after it chose the endpoint.
type hairpin struct {
	// refs counts, by address, the Services' endpoints and the grace entries.
	refs uses
	// grace is sorted by time.
	grace []graceEntry
}

// graceEntry is the address of a removed endpoint and the time of its removal.
type graceEntry struct {
	addr  netip.Addr
	since time.Time
}

// mayBeHere reports whether connections from the endpoint may pass this node before they
// are translated. A pod reaches Services through its own node.
func (t *table) mayBeHere(ep *tracker.Endpoint) bool {
	return ep.Node == "" || ep.Node == t.node.Info.Name
}

// applyHairpin adds new endpoints to the set and starts the grace period of removed ones.
func (t *table) applyHairpin(old, now *service, w *writer) {
	var before, after []*tracker.Endpoint
	if old.rule != nil {
		before = old.rule.Selection.Reachable
	}
	if now.rule != nil {
		after = now.rule.Selection.Reachable
	}
	if sameSlice(before, after) {
		return
	}
	before, after = listdiff.Trim(before, after)
	for _, ep := range after {
		if t.mayBeHere(ep) {
			t.countHairpin(ep.Addr.Addr(), +1, w)
		}
	}
	for _, ep := range before {
		if t.mayBeHere(ep) {
			t.hairpin.grace = append(t.hairpin.grace, graceEntry{ep.Addr.Addr(), time.Now()})
		}
	}
}

func (t *table) countHairpin(a netip.Addr, by int32, w *writer) {
	if !t.hairpin.refs.add(a, by) {
		return
	}
	e := hairpinElement(a)
	if by > 0 {
		t.add(&e, "", w)
	} else {
		t.remove(&e, w)
	}
}

// addGrace adds a grace entry of an earlier table.
func (t *table) addGrace(g graceEntry, w *writer) {
	t.countHairpin(g.addr, +1, w)
	t.hairpin.grace = append(t.hairpin.grace, g)
}

// expireGrace removes the oldest grace entry if it has reached the given age, and reports
// whether it removed one.
func (t *table) expireGrace(age time.Duration, w *writer) bool {
	if len(t.hairpin.grace) == 0 {
		t.hairpin.grace = nil
		return false
	}
	oldest := t.hairpin.grace[0]
	if time.Since(oldest.since) < age {
		return false
	}
	t.countHairpin(oldest.addr, -1, w)
	t.hairpin.grace = t.hairpin.grace[1:]
	return true
}

// inGrace returns the endpoints that are in the set only for their grace period, and when it
// began, except those whose grace period began at the given time or later.
func (h *hairpin) inGrace(from time.Time) map[netip.Addr]time.Time {
	entries := map[netip.Addr]int{}
	last := map[netip.Addr]time.Time{}
	for _, g := range h.grace {
		entries[g.addr]++
		if g.since.After(last[g.addr]) {
			last[g.addr] = g.since
		}
	}
	maps.DeleteFunc(last, func(a netip.Addr, since time.Time) bool {
		return entries[a] != h.refs.of(a) || !since.Before(from)
	})
	return last
}

// graceEntries returns the grace entries for a table that replaces one with the given
// endpoints, oldest first. Each endpoint gets an entry, because a connection may be on its way
// to it, except endpoints whose grace period has ended.
func (b *Backend) graceEntries(f tracker.Family, endpoints []netip.Addr) []graceEntry {
	if b.gracePeriod == 0 {
		return nil
	}
	now := time.Now()
	var out []graceEntry
	for _, a := range endpoints {
		since, gone := b.inGrace[index(f)][a]
		if !gone {
			since = now
		}
		if !gone || now.Sub(since) < b.gracePeriod {
			out = append(out, graceEntry{a, since})
		}
	}
	slices.SortStableFunc(out, func(a, b graceEntry) int { return a.since.Compare(b.since) })
	return out
}
