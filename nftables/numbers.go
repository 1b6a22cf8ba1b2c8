package nftables

// numbers allocates the numbers of pools, from 1 to max. A number that was given back is used
// again only after all others were, so that no packet still carries it for its last owner.
type numbers struct {
	max uint32
	// next counts the numbers given out or skipped, from the one behind start.
	start, next uint32
	// kept are skipped.
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

func (n *numbers) give(v uint32) { n.free = append(n.free, v) }
