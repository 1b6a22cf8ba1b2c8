package driver

// Slot is a numbered entry of a pool, whose key in the data plane is a P.
type Slot[P comparable] struct {
	// Pool is the key of the pool.
	Pool P
	// N is the number of the entry, from 0 to the pool's size minus 1.
	N int
}

// Slots is a table of pools as numbered entries without gaps. A BPF program, for example, finds the
// endpoints of a Service by a number below the pool's size. [Slots.WantPool] requests a pool, and a
// later table has the size, so every slot below a size that a packet may meet has an endpoint.
//
// An endpoint that replaces another one takes its slot and costs one write. If more endpoints are
// removed than added, the last ones move into the gaps, and the slots above the new size are
// deleted after the size was written.
type Slots[P, V comparable] struct {
	Table[Slot[P], V]
	// missing counts the values that have no slot yet.
	missing map[V]int
	// stays tells which of the slots keep their values.
	stays []bool
}

func (s *Slots[P, V]) complete() error {
	if s.Equal == nil {
		s.Equal = func(a, b V) bool { return a == b }
	}
	s.missing = map[V]int{}
	return s.Table.complete()
}

// WantPool requests a slot for each of the values, which may be equal. It returns the number of slots.
// Several lists get slots one after the other, for example the endpoints of this node first.
func (s *Slots[P, V]) WantPool(p P, lists ...[]V) (size int) {
	for _, values := range lists {
		s.wantList(p, size, values)
		size += len(values)
	}
	return size
}

// wantList requests slots from number at.
func (s *Slots[P, V]) wantList(p P, at int, values []V) {
	clear(s.missing)
	for _, v := range values {
		s.missing[v]++
	}
	start := s.next
	s.stays = append(s.stays[:0], make([]bool, len(values))...)
	for i := range values {
		if e := s.find(Slot[P]{p, at + i}); e.state == present && s.missing[e.value] > 0 {
			s.missing[e.value]--
			s.stays[i] = true
		}
	}
	s.next = start
	next := 0
	for i := range values {
		e := s.find(Slot[P]{p, at + i})
		v := e.value
		if !s.stays[i] {
			for s.missing[values[next]] == 0 {
				next++
			}
			v = values[next]
			s.missing[v]--
		}
		s.Want(e.key, v)
	}
}
