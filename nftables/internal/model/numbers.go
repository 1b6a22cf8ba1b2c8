package model

// numbers allocates the numbers of pools, from 1 to max. It reuses a number only after all
// others, so that no packet still carries the number for its last owner.
type numbers struct {
	max uint32
	// next counts the numbers given out or skipped. The first number is start+1.
	start, next uint32
	// kept holds numbers to skip.
	kept map[uint32]bool
	free []uint32
}

// take returns a number, or false if all are in use.
func (n *numbers) take() (uint32, bool) {
	for n.next < n.max {
		v := (n.start+n.next)%n.max + 1
		n.next++
		if !n.kept[v] {
			return v, true
		}
	}
	if len(n.free) == 0 {
		return 0, false
	}
	v := n.free[0]
	n.free = n.free[1:]
	return v, true
}

// exhausted reports whether all numbers are in use.
func (n *numbers) exhausted() bool { return n.next == n.max && len(n.free) == 0 }

func (n *numbers) give(v uint32) { n.free = append(n.free, v) }
