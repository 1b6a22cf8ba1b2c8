package driver

// Slot is a numbered entry of a pool, whose key in the data plane is a P.
type Slot[P comparable] struct {
	// Pool is the key of the pool.
	Pool P
	// N is the number of the entry, from 0 to the pool's size minus 1.
	N int
}

// Slots is a table of pools as numbered entries without gaps. A BPF program, for example, finds the endpoints of a
// Service by a number below the pool's size. [Slots.WantPool] requests a pool, and a later table has the size, so
// every slot below a size that a packet may meet has an endpoint.
//
// An endpoint that replaces another one takes its slot. If more endpoints are removed than added, the last ones move
// into the gaps. Like a Table, Slots is not safe for concurrent use.
type Slots[P, V comparable] struct {
	Table[Slot[P], V]
	// missing counts the values that have no slot yet, at holds the entries of the slots, and stays
	// tells which of them keep their values.
	missing map[V]int
	at      []*entry[Slot[P], V]
	stays   []bool
}

func (s *Slots[P, V]) complete() error {
	if s.Equal == nil {
		s.Equal = func(a, b V) bool { return a == b }
	}
	s.missing = map[V]int{}
	return s.Table.complete()
}

// WantPool requests a slot for each of the values, which may be equal, and returns the number of slots. Several lists
// get slots one after the other, for example the endpoints of this node first.
func (s *Slots[P, V]) WantPool(p P, lists ...[]V) (size int) {
	for _, values := range lists {
		s.wantList(p, size, values)
		size += len(values)
	}
	return size
}

func (s *Slots[P, V]) wantList(p P, first int, values []V) {
	s.at, s.stays = s.at[:0], append(s.stays[:0], make([]bool, len(values))...)
	for i := range values {
		s.at = append(s.at, s.find(Slot[P]{p, first + i}))
	}
	clear(s.missing)
	from := 0 // most values are in the order of the slots
	for _, v := range values {
		i := from
		for i < min(from+2, len(s.at)) && !s.has(s.at[i], v) {
			i++
		}
		if i < min(from+2, len(s.at)) {
			s.stays[i], from = true, i+1
		} else {
			s.missing[v]++
		}
	}
	for i, e := range s.at {
		if !s.stays[i] && e.state == present && s.missing[e.value] > 0 {
			s.missing[e.value]--
			s.stays[i] = true
		}
	}
	next := 0
	for i, e := range s.at {
		v := e.value
		if !s.stays[i] {
			for s.missing[values[next]] == 0 {
				next++
			}
			v = values[next]
			s.missing[v]--
		}
		s.want(e, v)
	}
}
