package maglev

// sizes lists the sizes of tables: each is the largest prime below a power of two.
// They are the sizes of the kernel's IPVS scheduler mh
// (net/netfilter/ipvs/ip_vs_mh.c) up to 16 bits.
var sizes = [...]int{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521}

// MaxSize is the largest size.
const MaxSize = 65521

// SizeAtLeast returns the smallest size with at least the given number of buckets, or
// [MaxSize].
func SizeAtLeast(slots int) int {
	for _, s := range sizes {
		if s >= slots {
			return s
		}
	}
	return MaxSize
}

// SizeFor returns a size that suits n members of equal weight, with at least 25
// buckets per member while sizes last. It changes at 15, 150 and 650 members. There
// are few sizes because a change of the size moves nearly all connections. Use a
// fixed size if the number of members varies around one of these limits, or if a
// smaller table is needed.
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
