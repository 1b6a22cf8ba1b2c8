package model

import (
	"cmp"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// byPrecedence returns the changes of a full delta in the order in which Services get the numbers
// of pools. The order matters only if there are fewer numbers than Services want. Then Services
// that have rules come first, in this process or in the kernel: of these the ones that want a
// single pool, and last those that want more than this process gave them. The oldest of the others
// come next. So neither a new Service nor a restart takes the rules of another Service, and of
// those that want more than they have only the second one can lose what it has.
func (m *Tables) byPrecedence(changes []ruleset.Change, installed func() (map[tracker.Key]bool, error)) ([]ruleset.Change, error) {
	if !m.scarce(changes) {
		return changes, nil
	}
	has, err := installed()
	if err != nil {
		return nil, err
	}
	for i := range changes {
		if changes[i].Old != nil {
			has[changes[i].Key] = true
		}
	}
	rank := func(c *ruleset.Change) int {
		switch more := c.Old != nil && poolsOf(c.New) > poolsOf(c.Old); {
		case !has[c.Key]:
			return len(targets) + 2
		case more:
			return len(targets) + 1
		}
		return poolsOf(c.New)
	}
	out := slices.Clone(changes)
	slices.SortFunc(out, func(a, b ruleset.Change) int {
		return cmp.Or(rank(&a)-rank(&b), compareAge(a.New, b.New), a.Key.Compare(b.Key))
	})
	return out, nil
}

// compareAge orders Services by age, the oldest first. Services of unknown age come last, and nil
// after them.
func compareAge(a, b *ruleset.Port) int {
	switch {
	case a != nil && b != nil:
		return a.Spec.CompareAge(b.Spec)
	case a != nil:
		return -1
	case b != nil:
		return 1
	}
	return 0
}

// poolsOf returns the number of pools that the Service wants, 0 for nil.
func poolsOf(s *ruleset.Port) (n int) {
	for _, target := range targets {
		if s != nil && len(s.Pool(target)) != 0 {
			n++
		}
	}
	return n
}

// scarce reports whether the Services in changes may need more pools than there are numbers.
func (m *Tables) scarce(changes []ruleset.Change) bool {
	type kind struct {
		family tracker.Family
		sticky bool
	}
	need := map[kind]uint32{}
	for i := range changes {
		if s := changes[i].New; s != nil {
			need[kind{s.Key.Family, s.Spec.Affinity != 0}] += uint32(poolsOf(s))
		}
	}
	for k, n := range need {
		// Services that find no number of a sticky pool have others.
		t := m.Table(k.family)
		if t != nil && (k.sticky && n > t.config.Sticky || n+need[kind{k.family, !k.sticky}] > t.config.Plain) {
			return true
		}
	}
	return false
}
