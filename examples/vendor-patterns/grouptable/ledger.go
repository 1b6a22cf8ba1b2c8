package grouptable

import (
	"iter"
	"maps"
)

// Ledger notes who uses what, and tells who is the first to use a thing and who
// the last. A claim is an owner's and an item's: to make it twice is to make it
// once, so retries do no harm, as they would to a plain counter. The zero value
// has no claims. It must not be used by several goroutines at once.
type Ledger[Owner, Item comparable] struct {
	users map[Item]int
	items map[Owner]map[Item]struct{}
}

// Claim notes that owner uses item, and reports whether nobody did before.
func (l *Ledger[Owner, Item]) Claim(owner Owner, item Item) (first bool) {
	mine := l.items[owner]
	if _, ok := mine[item]; ok {
		return false
	}
	if mine == nil {
		if l.items == nil {
			l.items, l.users = map[Owner]map[Item]struct{}{}, map[Item]int{}
		}
		mine = map[Item]struct{}{}
		l.items[owner] = mine
	}
	mine[item] = struct{}{}
	l.users[item]++
	return l.users[item] == 1
}

// Release takes back a Claim, and reports whether nobody uses item any more. It
// reports false if there was none.
func (l *Ledger[Owner, Item]) Release(owner Owner, item Item) (last bool) {
	mine := l.items[owner]
	if _, ok := mine[item]; !ok {
		return false
	}
	if delete(mine, item); len(mine) == 0 {
		delete(l.items, owner)
	}
	if l.users[item]--; l.users[item] > 0 {
		return false
	}
	delete(l.users, item)
	return true
}

// Items yields what owner uses, in no order. It may be released meanwhile.
func (l *Ledger[Owner, Item]) Items(owner Owner) iter.Seq[Item] { return maps.Keys(l.items[owner]) }

// Used reports whether anybody uses item.
func (l *Ledger[Owner, Item]) Used(item Item) bool { return l.users[item] > 0 }
