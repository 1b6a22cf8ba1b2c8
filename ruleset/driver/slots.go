package driver

import (
	"iter"
	"maps"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Slot is an entry of a pool, whose key in the data plane is a P.
type Slot[P comparable] struct {
	// Pool is the key of the pool.
	Pool P
	// N is the number of the entry, from 0 to the pool's size minus 1.
	N int
}

// Slots writes pools as numbered entries without gaps. P is the key of a pool, [Pool] in a Plane. A BPF program, for example, finds the
// endpoints of a Service by a number below the pool's size.
//
//	slots := &driver.Slots[driver.Pool, Backend]{Entries: driver.Table[driver.Slot[driver.Pool], Backend]{...}, Value: backendOf}
//	d, err := driver.New(driver.Tables[struct{}, []*tracker.Endpoint, Flow]{
//		Pools: slots.Pools(), Pool: (*ruleset.Port).Pool,
//		Frontend: func(...) Flow { ... slots.Len(pool) ... },
//	})
//
// An endpoint that replaces another one takes its slot and costs one write. If more endpoints are
// removed than added, the last ones move into the gaps. The entries above the new size are deleted
// after the frontends, which contain the size, so every slot below a size that a packet may
// meet has an endpoint.
//
// Without a Driver, call the functions of Pools in this order: Put, write the new size, Trim. A
// failed write may have taken effect; the slot is written again until a write succeeds. Slots is
// not safe for concurrent use.
type Slots[P, V comparable] struct {
	// Entries is the table. Its Replace, Trim and Equal are not used.
	Entries Table[Slot[P], V]
	// Value returns the entry of an endpoint of a pool. Several endpoints may have equal values.
	Value func(P, *tracker.Endpoint) V
	// ByWeight gives an endpoint as many slots as [ruleset.Shares] returns for it.
	ByWeight bool

	pools map[P]*slotList[V]
	// keys and values are the entries to write.
	keys   []Slot[P]
	values []V
}

// Pools returns the table of pools, for a [Tables] or with [Numbered].
func (s *Slots[P, V]) Pools() Table[P, []*tracker.Endpoint] {
	return Table[P, []*tracker.Endpoint]{
		Installed: s.installed, Put: s.put, Delete: s.delete, Trim: s.trim,
		Equal: func(a, b []*tracker.Endpoint) bool { return slices.EqualFunc(a, b, (*tracker.Endpoint).Equal) },
	}
}

// Len returns the number of a pool's slots after the last Put.
func (s *Slots[P, V]) Len(p P) int {
	if l := s.pools[p]; l != nil {
		return len(l.slots)
	}
	return 0
}

// All yields the slots of all pools and what was last put there, in no particular order.
func (s *Slots[P, V]) All() iter.Seq2[Slot[P], V] {
	return func(yield func(Slot[P], V) bool) {
		for p, l := range s.pools {
			for i := range l.slots {
				if !yield(Slot[P]{p, i}, l.slots[i].of.value) {
					return
				}
			}
		}
	}
}

func (s *Slots[P, V]) list(p P) *slotList[V] {
	l := s.pools[p]
	if l == nil {
		if s.pools == nil {
			s.pools = map[P]*slotList[V]{}
		}
		l = &slotList[V]{at: map[copyOf[V]]int{}}
		s.pools[p] = l
	}
	return l
}

// unknown is a pool that differs from every other one.
var unknown = []*tracker.Endpoint{{}}

// installed reads the slots. It yields unknown pools, so that put compares each slot.
func (s *Slots[P, V]) installed() (iter.Seq2[P, []*tracker.Endpoint], error) {
	if s.Entries.Installed == nil {
		for _, l := range s.pools {
			for i := range l.slots {
				l.slots[i].dirty = true
			}
		}
	} else {
		all, err := s.Entries.Installed()
		if err != nil {
			return nil, err
		}
		clear(s.pools)
		for at, v := range all {
			s.list(at.Pool).adopt(at.N, v)
		}
	}
	found := make(map[P][]*tracker.Endpoint, len(s.pools))
	for p := range s.pools {
		found[p] = unknown
	}
	return maps.All(found), nil
}

func (s *Slots[P, V]) put(p P, eps []*tracker.Endpoint) error {
	l := s.list(p)
	l.replace(func(yield func(V) bool) {
		var shares []int
		if s.ByWeight {
			shares = ruleset.Shares(eps)
		}
		for i, ep := range eps {
			v, n := s.Value(p, ep), 1
			if s.ByWeight {
				n = shares[i]
			}
			for range n {
				if !yield(v) {
					return
				}
			}
		}
	})
	s.keys, s.values = s.keys[:0], s.values[:0]
	for i := range l.slots {
		if l.slots[i].dirty {
			s.keys, s.values = append(s.keys, Slot[P]{p, i}), append(s.values, l.slots[i].of.value)
			l.high = max(l.high, i+1) // a write that fails may have taken effect
		}
	}
	if len(s.keys) == 0 {
		return nil
	}
	n, err := s.Entries.putAll(s.keys, s.values)
	for _, at := range s.keys[:n] {
		l.slots[at.N].dirty = false
	}
	return err
}

// trim deletes the entries above a pool's size.
func (s *Slots[P, V]) trim(p P) error {
	l := s.pools[p]
	if l == nil || l.high <= len(l.slots) {
		return nil
	}
	s.keys = s.keys[:0]
	for i := l.high - 1; i >= len(l.slots); i-- {
		s.keys = append(s.keys, Slot[P]{p, i})
	}
	return s.Entries.deleteAll(s.keys, func(at Slot[P]) {
		if at.N == l.high-1 {
			l.high--
		}
	})
}

func (s *Slots[P, V]) delete(p P) error {
	if s.pools[p] == nil {
		return nil
	}
	s.pools[p].slots = nil
	clear(s.pools[p].at)
	if err := s.trim(p); err != nil {
		return err
	}
	delete(s.pools, p)
	return nil
}

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
