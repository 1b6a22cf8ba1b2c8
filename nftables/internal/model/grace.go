package model

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// hairpin is the model of the set of endpoints whose connections to themselves are
// masqueraded. A removed endpoint stays in the set for a grace period, because the kernel
// masquerades a connection some time after it chose the endpoint.
type hairpin struct {
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
func (t *Table) mayBeHere(ep *tracker.Endpoint) bool {
	return ep.Node == "" || ep.Node == t.Node.Info.Name
}

// writeHairpin adds new endpoints to the set and starts the grace period of removed ones.
func (t *Table) writeHairpin(old, now *ruleset.Port, tx *Tx) {
	var before, after []*tracker.Endpoint
	if old != nil {
		before = old.Selection.Reachable
	}
	if now != nil {
		after = now.Selection.Reachable
	}
	if sameSlice(before, after) {
		return
	}
	before, after = listdiff.Trim(before, after)
	for _, ep := range after {
		if t.mayBeHere(ep) {
			t.countHairpin(ep.Addr.Addr(), +1, tx)
		}
	}
	for _, ep := range before {
		if t.mayBeHere(ep) {
			t.hairpin.grace = append(t.hairpin.grace, GraceEntry{ep.Addr.Addr(), time.Now()})
		}
	}
}

func (t *Table) countHairpin(a netip.Addr, by int32, tx *Tx) {
	if !t.use(t.hairpin.refs, a, by) {
		return
	}
	e := hairpinElement(a)
	if by > 0 {
		t.add(&e, "", tx)
	} else {
		t.remove(&e, tx)
	}
}

// addGrace adds a grace entry of an earlier table.
func (t *Table) addGrace(g GraceEntry, tx *Tx) {
	t.countHairpin(g.Addr, +1, tx)
	t.hairpin.grace = append(t.hairpin.grace, g)
}

// expireGrace removes the oldest grace entry if its grace period is over, and reports whether it
// removed one.
func (t *Table) expireGrace(tx *Tx) bool {
	if len(t.hairpin.grace) == 0 {
		t.hairpin.grace = nil
		return false
	}
	oldest := t.hairpin.grace[0]
	if time.Since(oldest.Since) < t.config.GracePeriod {
		return false
	}
	t.countHairpin(oldest.Addr, -1, tx)
	t.hairpin.grace = t.hairpin.grace[1:]
	return true
}

// InGrace returns the endpoints that are in the set only for their grace period, and when it
// began, except those whose grace period began at the given time or later.
func (t *Table) InGrace(from time.Time) map[netip.Addr]time.Time {
	entries := map[netip.Addr]int{}
	last := map[netip.Addr]time.Time{}
	for _, g := range t.hairpin.grace {
		entries[g.Addr]++
		if g.Since.After(last[g.Addr]) {
			last[g.Addr] = g.Since
		}
	}
	maps.DeleteFunc(last, func(a netip.Addr, since time.Time) bool {
		return entries[a] != t.hairpin.refs.of(a) || !since.Before(from)
	})
	return last
}

// GraceEntries returns the grace entries for a table that replaces one with the given
// endpoints, oldest first. gone holds those that were removed, as InGrace returned them. Each
// endpoint gets an entry, because a connection may be on its way to it, except endpoints whose
// grace period has ended.
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
