package model

// numbers allocates the numbers of pools, from 1 to max. It reuses a number only after all
// others, so that no packet still carries the number for its last owner.
type numbers struct {
	max uint32
	// The first number is start+1.
	start uint32
	// kept holds numbers to skip.
	kept map[uint32]bool
	cell cell[supply]
}

// supply is what numbers can still give out: those from next on, which counts the numbers given out
// or skipped, and then those in free.
type supply struct {
	next uint32
	free []uint32
}

func newNumbers(most uint32, d *draft) numbers {
	return numbers{max: most, cell: cell[supply]{draft: d}}
}

// take returns a number, or false if all are in use.
func (n *numbers) take() (v uint32, ok bool) {
	s := n.cell.now
	for s.next < n.max && !ok {
		v = (n.start+s.next)%n.max + 1
		s.next++
		ok = !n.kept[v]
	}
	if !ok && len(s.free) != 0 {
		v, ok, s.free = s.free[0], true, s.free[1:]
	}
	n.cell.set(s)
	return v, ok
}

// exhausted reports whether all numbers are in use.
func (n *numbers) exhausted() bool { return n.cell.now.next == n.max && len(n.cell.now.free) == 0 }

// give makes a number free that no plan may need again.
func (n *numbers) give(v uint32) { n.cell.now.free = append(n.cell.now.free, v) }
