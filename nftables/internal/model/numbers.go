package model

import "net/netip"

// uses counts the uses of addresses. Its keys have no pointers, so the garbage collector does not
// read them: there may be a hundred thousand.
type uses map[[16]byte]int32

func (u uses) of(a netip.Addr) int { return int(u[a.As16()]) }

// addUses adds by to an address's number of uses, and reports whether the set gains or loses the address. Within a
// transaction a count may drop to 0 and come back, because deletions precede additions, but not the reverse: each
// Service changes at most once.
func (u uses) addUses(a netip.Addr, by int32) (changed bool) {
	key := a.As16()
	before := u[key]
	if before+by == 0 {
		delete(u, key)
		return true
	}
	u[key] = before + by
	return before == 0
}

// numbers allocates the numbers of pools, from 1 to max. It reuses a number only after all
// others, so that no packet still carries the number for its last owner.
type numbers struct {
	max uint32
	// The first number is start+1.
	start uint32
	kept  map[uint32]bool
	// next counts the numbers given out or skipped. After all of them, allocateNumber gives out those in free.
	next uint32
	free []uint32
}

func (n *numbers) allocateNumber() (v uint32, ok bool) {
	for n.next < n.max && !ok {
		v = (n.start+n.next)%n.max + 1
		n.next++
		ok = !n.kept[v]
	}
	if !ok && len(n.free) != 0 {
		v, ok, n.free = n.free[0], true, n.free[1:]
	}
	return v, ok
}

func (n *numbers) exhausted() bool { return n.next == n.max && len(n.free) == 0 }

func (n *numbers) releaseNumber(v uint32) { n.free = append(n.free, v) }
