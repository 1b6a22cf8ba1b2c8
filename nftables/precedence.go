//go:build linux

package nftables

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// byPrecedence returns the changes of a full delta in the order in which Services get the numbers
// of pools. The order matters only if there are fewer numbers than Services want. Then Services
// that have rules come first, in this process or in the tables old, and of these the ones that want
// a single pool. The oldest of the others come next. So neither a new Service, nor one that wants
// more than it has, nor a restart takes the rules of another Service.
func (b *Backend) byPrecedence(changes []ruleset.Change, old *kernelTables) ([]ruleset.Change, error) {
	if !b.scarce(changes) {
		return changes, nil
	}
	has, err := b.installed(old)
	if err != nil {
		return nil, err
	}
	for i := range changes {
		if changes[i].Old != nil {
			has[changes[i].Key] = true
		}
	}
	rank := func(c *ruleset.Change) int {
		if has[c.Key] {
			return poolsOf(c.New)
		}
		return len(targets) + 1
	}
	out := slices.Clone(changes)
	slices.SortFunc(out, func(a, b ruleset.Change) int {
		return cmp.Or(rank(&a)-rank(&b), compareAge(a.New, b.New), a.Key.Compare(b.Key))
	})
	return out, nil
}

// compareAge orders Services by age, the oldest first. Services of unknown age come last, and nil
// after them.
func compareAge(a, b *ruleset.Service) int {
	age := func(s *ruleset.Service) uint64 {
		if s == nil {
			return math.MaxUint64
		}
		return uint64(s.Port.Created) - 1 // 0 means unknown
	}
	return cmp.Compare(age(a), age(b))
}

// poolsOf returns the number of pools that the Service wants, 0 for nil.
func poolsOf(s *ruleset.Service) (n int) {
	for _, target := range targets {
		if s != nil && len(s.Pool(target)) != 0 {
			n++
		}
	}
	return n
}

// scarce reports whether the Services in changes may need more pools than there are numbers.
func (b *Backend) scarce(changes []ruleset.Change) bool {
	type kind struct {
		family tracker.Family
		sticky bool
	}
	need := map[kind]uint32{}
	for i := range changes {
		if s := changes[i].New; s != nil {
			need[kind{s.Key.Family, s.Port.Affinity != 0}] += uint32(poolsOf(s))
		}
	}
	for k, n := range need {
		// Services that find no number of a sticky pool have others.
		if k.sticky && n > b.limits.sticky || n+need[kind{k.family, !k.sticky}] > b.limits.plain {
			return true
		}
	}
	return false
}

// installed returns the Services that have frontends in the tables.
func (b *Backend) installed(old *kernelTables) (map[tracker.Key]bool, error) {
	out := map[tracker.Key]bool{}
	for f, k := range old.families {
		if !k.has(setServiceIPs, f) || !k.has(setNodePorts, f) {
			continue
		}
		r := reader{b.open, b.conn, old.name, f}
		if err := r.frontends(func(_ kernelElement, key tracker.Key) { out[key] = true }); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// retryLacking writes Services that lack client affinity again, except those in changes, once there
// are numbers of sticky pools for them. The oldest come first.
func (b *Backend) retryLacking(ctx context.Context, changes []ruleset.Change) error {
	for _, t := range b.tables {
		if len(t.lacking) == 0 || t.sticky.exhausted() {
			continue
		}
		waiting := maps.Clone(t.lacking)
		for i := range changes {
			delete(waiting, changes[i].ID())
		}
		list := make([]*ruleset.Service, 0, len(waiting))
		for id := range waiting {
			list = append(list, t.services[id].rule)
		}
		slices.SortFunc(list, func(a, b *ruleset.Service) int { return cmp.Or(compareAge(a, b), a.Key.Compare(b.Key)) })
		for _, s := range list {
			if t.sticky.exhausted() {
				break
			}
			if _, err := b.tryService(ctx, t, s.ID, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// logLacking logs the Services that lack client affinity since the last delta.
func (b *Backend) logLacking() {
	for _, t := range b.tables {
		if n := t.newlyLacking.count; n != 0 {
			backendconf.Complain(b.complaints, slog.LevelWarn, t.newlyLacking.key, "nftables: service is forwarded without client affinity",
				fmt.Errorf("%w: %d more Services", errTooManySticky, n-1))
			t.newlyLacking.count = 0
		}
	}
}
