package driver

import "iter"

// slotList is the content of a pool.
type slotList[V comparable] struct {
	slots []slot[V]
	// at holds the slot of each wanted value. A value may have several slots.
	at map[copyOf[V]]int
	// high is one more than the last slot that the data plane may have.
	high int
	// round is the number of the latest put.
	round int
}

// copyOf is one of several equal values.
type copyOf[V comparable] struct {
	value V
	n     int
}

// slot is an entry. dirty means that the data plane may have another value, and round is the last
// put that wanted the entry.
type slot[V comparable] struct {
	of          copyOf[V]
	used, dirty bool
	round       int
}

// adopt records that the data plane has a value in a slot.
func (l *slotList[V]) adopt(i int, v V) {
	if i >= len(l.slots) {
		l.slots = append(l.slots, make([]slot[V], i+1-len(l.slots))...)
	}
	l.high = max(l.high, i+1)
	l.use(i, l.free(v))
}

// free returns a copy of a value that has no slot.
func (l *slotList[V]) free(v V) copyOf[V] {
	c := copyOf[V]{value: v}
	for _, ok := l.at[c]; ok; _, ok = l.at[c] {
		c.n++
	}
	return c
}

// use gives a slot to a copy of a value.
func (l *slotList[V]) use(i int, c copyOf[V]) {
	l.slots[i].of, l.slots[i].used, l.slots[i].round = c, true, l.round
	l.at[c] = i
}

// replace gives each of the wanted values a slot. It changes no other slot than it must.
func (l *slotList[V]) replace(wanted iter.Seq[V]) {
	l.round++
	var added []copyOf[V]
	last := copyOf[V]{n: -1}
	for v := range wanted {
		// Equal values follow each other, as a rule.
		if last.n++; last.value != v {
			last = copyOf[V]{value: v}
		}
		i, ok := l.at[last]
		for ok && (i < 0 || l.slots[i].round == l.round) {
			last.n++
			i, ok = l.at[last]
		}
		if ok {
			l.slots[i].round = l.round
		} else {
			l.at[last] = -1
			added = append(added, last)
		}
	}
	gap := 0 // no slot below it is free
	for i := range l.slots {
		if s := &l.slots[i]; s.used && s.round != l.round {
			delete(l.at, s.of)
			*s = slot[V]{}
		}
	}
	for _, c := range added {
		for gap < len(l.slots) && l.slots[gap].used {
			gap++
		}
		if gap == len(l.slots) {
			l.slots = append(l.slots, slot[V]{})
		}
		l.use(gap, c)
		l.slots[gap].dirty = true
	}
	for n := len(l.slots); n > gap; n = len(l.slots) {
		if last := l.slots[n-1]; last.used {
			for gap < n && l.slots[gap].used {
				gap++
			}
			if gap == n {
				break
			}
			l.use(gap, last.of)
			l.slots[gap].dirty = true
		}
		l.slots = l.slots[:n-1]
	}
}
