package kernel

import (
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// Lists holds the elements of transactions by set: those to delete and those to add. The zero value
// is empty. It keeps its memory when it is emptied.
type Lists struct {
	lists   [2]struct{ add, remove [layout.SetCount]nft.Elements }
	touched []list
}

type list struct {
	*nft.Elements
	family   tracker.Family
	set      layout.Set
	deletion bool
}

// Reset empties all lists.
func (l *Lists) Reset() {
	for _, t := range l.touched {
		t.Reset()
	}
	l.touched = l.touched[:0]
}

// Edit adds an element.
func (l *Lists) Edit(e *model.Edit) {
	lists := &l.lists[index(e.Family)]
	t := list{&lists.add[e.Set], e.Family, e.Set, false}
	if e.Deletion {
		t = list{&lists.remove[e.Set], e.Family, e.Set, true}
	}
	if t.Size() == 0 {
		l.touched = append(l.touched, t)
	}
	t.Append(&e.Elements)
}

// Empty reports whether there are no elements.
func (l *Lists) Empty() bool { return len(l.touched) == 0 }

// Size returns an upper bound of the bytes of the messages with all elements.
func (l *Lists) Size() int {
	size := 0
	for _, t := range l.touched {
		size += t.Size() + model.MessageSize
	}
	return size + size/(50<<10)*model.MessageSize + model.MessageSize
}

// Each calls fn with each list: first those of elements to delete, then those of elements to add.
func (l *Lists) Each(fn func(f tracker.Family, s layout.Set, deletion bool, list *nft.Elements)) {
	for _, deletion := range [...]bool{true, false} {
		for _, t := range l.touched {
			if t.deletion == deletion {
				fn(t.family, t.set, deletion, t.Elements)
			}
		}
	}
}

func index(f tracker.Family) int {
	if f == tracker.IPv6 {
		return 1
	}
	return 0
}
