package driver

import (
	"iter"
	"maps"
)

// Ledger records which owners, such as Services, use which items, and which items the data plane has. A [Driver] has
// one for its endpoints and addresses. Without a Driver:
//
//	if l.Claim(service, endpoint) {
//		if err := install(endpoint); err != nil {
//			return err // the next Claim by any Service requests it again
//		}
//		l.Installed(endpoint)
//	}
//	...
//	if l.Release(service, endpoint) {
//		if err := remove(endpoint); err != nil {
//			l.Claim(service, endpoint) // undo: the retry releases it again
//			return err
//		}
//		l.Removed(endpoint)
//	}
//
// Repeating a claim has no effect. After Claim or Release requested a write, the item's state is unknown until the
// caller reports success. A new process calls Installed for every item that it finds, and then claims what it needs.
//
// The zero value has no claims and no items. A Ledger must not be copied and is not safe for concurrent use.
type Ledger[Owner, Item comparable] struct {
	items  map[Item]use
	claims map[Owner]map[Item]struct{}
	unused map[Item]struct{}
}

// use is the state of an item. An item without users that is not installed has no
// record.
type use struct {
	users int
	// installed is false if the item is not installed or its state is unknown.
	installed bool
}

// Claim records that owner uses item. It returns true if the item is not known to be installed. A caller that
// installs it calls Installed.
func (l *Ledger[Owner, Item]) Claim(owner Owner, item Item) (install bool) {
	if l.items == nil {
		l.items, l.claims, l.unused = map[Item]use{}, map[Owner]map[Item]struct{}{}, map[Item]struct{}{}
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

// Release reverts a Claim. It returns true if no other owner uses the item, so that it must be removed. A caller that
// removes it calls Removed; until then [Ledger.Unused] yields the item. Release returns false if there is no such
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
		// A failed removal may have taken effect.
		r.installed = false
		l.unused[item] = struct{}{}
	}
	l.items[item] = r
	return r.users == 0
}

// Installed records that the data plane has item, claimed or not.
func (l *Ledger[Owner, Item]) Installed(item Item) {
	if l.items == nil {
		l.items, l.claims, l.unused = map[Item]use{}, map[Owner]map[Item]struct{}{}, map[Item]struct{}{}
	}
	r := l.items[item]
	r.installed = true
	l.items[item] = r
	if r.users == 0 {
		l.unused[item] = struct{}{}
	}
}

// Removed records that the data plane does not have item. If the item is claimed, the
// next Claim requests its installation.
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

// Has reports whether the data plane has item, or may have it because Removed was not called yet.
func (l *Ledger[Owner, Item]) Has(item Item) bool {
	r, ok := l.items[item]
	return ok && (r.installed || r.users == 0)
}

// All yields the items for which Has returns true, in no particular order.
func (l *Ledger[Owner, Item]) All() iter.Seq[Item] {
	return func(yield func(Item) bool) {
		for item, r := range l.items {
			if (r.installed || r.users == 0) && !yield(item) {
				return
			}
		}
	}
}

// Items yields the items that owner uses, in no particular order. Items may be
// released during the iteration.
func (l *Ledger[Owner, Item]) Items(owner Owner) iter.Seq[Item] { return maps.Keys(l.claims[owner]) }

// Users returns the number of owners that use item.
func (l *Ledger[Owner, Item]) Users(item Item) int { return l.items[item].users }

// Unused yields the items that no owner uses and that the data plane may have, in no
// particular order. Removed may be called during the iteration.
func (l *Ledger[Owner, Item]) Unused() iter.Seq[Item] { return maps.Keys(l.unused) }
