package ledger

import (
	"iter"
	"maps"
)

// Ledger records which owners use which items, and which items are installed. The
// zero value has no claims and no items. It must not be copied, nor used by several
// goroutines at once.
type Ledger[Owner, Item comparable] struct {
	items  map[Item]record
	claims map[Owner]map[Item]struct{}
	// unused holds the items that have no users.
	unused map[Item]struct{}
}

// record is what is known of an item. An item without users that is not installed
// has none.
type record struct {
	users int
	// installed is false also if that is not known.
	installed bool
}

// Claim records that owner uses item. It reports whether the item must be installed:
// whether it is not known to be. The caller that installs it reports success by
// Installed.
func (l *Ledger[Owner, Item]) Claim(owner Owner, item Item) (install bool) {
	if l.items == nil {
		l.items, l.claims, l.unused = map[Item]record{}, map[Owner]map[Item]struct{}{}, map[Item]struct{}{}
	}
	r := l.items[item]
	if _, ok := l.claims[owner][item]; !ok {
		if l.claims[owner] == nil {
			l.claims[owner] = map[Item]struct{}{}
		}
		l.claims[owner][item] = struct{}{}
		delete(l.unused, item)
		r.users++
		l.items[item] = r
	}
	return !r.installed
}

// Release takes back a Claim. It reports whether the item must be removed: whether
// no other owner uses it. The caller that removes it reports success by Removed; until
// then [Ledger.Unused] yields the item. Release reports false if there was no such
// claim.
func (l *Ledger[Owner, Item]) Release(owner Owner, item Item) (remove bool) {
	mine := l.claims[owner]
	if _, ok := mine[item]; !ok {
		return false
	}
	if delete(mine, item); len(mine) == 0 {
		delete(l.claims, owner)
	}
	r := l.items[item]
	r.users--
	if r.users == 0 {
		// A removal that fails may have taken effect.
		r.installed = false
		l.unused[item] = struct{}{}
	}
	l.items[item] = r
	return r.users == 0
}

// Installed records that the data plane has item, whether or not it is claimed.
func (l *Ledger[Owner, Item]) Installed(item Item) {
	if l.items == nil {
		l.items, l.claims, l.unused = map[Item]record{}, map[Owner]map[Item]struct{}{}, map[Item]struct{}{}
	}
	r := l.items[item]
	r.installed = true
	l.items[item] = r
	if r.users == 0 {
		l.unused[item] = struct{}{}
	}
}

// Removed records that the data plane does not have item. If it is claimed, the next
// Claim asks for it to be installed.
func (l *Ledger[Owner, Item]) Removed(item Item) {
	r, ok := l.items[item]
	if !ok {
		return
	}
	if r.users == 0 {
		delete(l.items, item)
		delete(l.unused, item)
		return
	}
	r.installed = false
	l.items[item] = r
}

// Items yields what owner uses, in no order. Items may be released while it runs.
func (l *Ledger[Owner, Item]) Items(owner Owner) iter.Seq[Item] { return maps.Keys(l.claims[owner]) }

// Users returns how many owners use item.
func (l *Ledger[Owner, Item]) Users(item Item) int { return l.items[item].users }

// Unused yields the items that no owner uses and that the data plane may have, in no
// order. Removed may be called while it runs.
func (l *Ledger[Owner, Item]) Unused() iter.Seq[Item] { return maps.Keys(l.unused) }
