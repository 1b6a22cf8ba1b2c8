package maglev

// sizes is the sizes of tables: each the largest prime below a power of two. They
// are those of the kernel's IPVS scheduler mh, as far as slots can be numbered by
// 16 bits (net/netfilter/ipvs/ip_vs_mh.c).
var sizes = [...]int{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521}

// Sizes returns the sizes that tables can have, the smallest first.
func Sizes() []int { return append([]int(nil), sizes[:]...) }

// MaxSize is the largest size.
const MaxSize = 65521

// SizeAtLeast returns the smallest size of at least so many slots, or [MaxSize].
func SizeAtLeast(slots int) int {
	for _, s := range sizes {
		if s >= slots {
			return s
		}
	}
	return MaxSize
}

// SizeFor returns the size that suits n members of equal weight: at least 25 slots
// each, as long as there are sizes. It changes beyond 15, 150 and 650 members: sizes
// lie far apart because another one moves nearly all connections. Where the number
// of members varies about one of these, or a table is to be smaller, fix the size.
func SizeFor(n int) int {
	switch {
	case n <= 15:
		return 509
	case n <= 150:
		return 4093
	case n <= 650:
		return 16381
	}
	return MaxSize
}
