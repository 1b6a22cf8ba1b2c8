package maglev

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

func member(i int, weight uint16) Member {
	return Member{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}), 8080), weight}
}

func members(n int) []Member {
	out := make([]Member, n)
	for i := range out {
		out[i] = member(i, 1)
	}
	return out
}

// owners returns the address of each bucket's member.
func owners(t *Table, list []Member) []netip.AddrPort {
	out := make([]netip.AddrPort, t.Len())
	for i := range out {
		out[i] = list[t.At(i)].Addr
	}
	return out
}

func differ(a, b []netip.AddrPort) int {
	n := 0
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

// TestBucketsFollowWeights checks the number of buckets of each member.
func TestBucketsFollowWeights(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range 300 {
		n := 1 + rng.IntN([]int{3, 20, 200}[rng.IntN(3)])
		list := members(n)
		most := []int{1, 4, 1000, 65535}[rng.IntN(4)]
		sum := 0
		for i := range list {
			list[i].Weight = uint16(rng.IntN(most + 1))
			if most == 1 {
				list[i].Weight = 7
			}
			sum += int(list[i].Weight)
		}
		if sum == 0 {
			continue
		}
		size := SizeAtLeast(rng.IntN(5000))
		tab := Build(uint64(i), size, list)
		if tab.Len() != size {
			t.Fatalf("%d slots, want %d", tab.Len(), size)
		}
		count := make([]int, n)
		for s := range tab.Len() {
			count[tab.At(s)]++
		}
		raised := 0 // members raised to one bucket
		for _, m := range list {
			if m.Weight != 0 && int(m.Weight)*size < sum {
				raised++
			}
		}
		for i, m := range list {
			share := float64(m.Weight) * float64(size) / float64(sum)
			switch off := float64(count[i]) - share; {
			case m.Weight == 0 && count[i] != 0, m.Weight != 0 && count[i] == 0:
				t.Errorf("weight %d has %d slots", m.Weight, count[i])
			case most == 1 && math.Abs(off) >= 1:
				t.Errorf("%d members of equal weight: one has %d of %d slots", n, count[i], size)
			case off > 2 || off < -2-float64(raised+n)*share/float64(size):
				t.Errorf("weight %d of %d has %d of %d slots, want about %.1f", m.Weight, sum, count[i], size, share)
			}
		}
	}
}

// TestTableIgnoresOrder builds tables of the same members in another order, and as
// IPv4-mapped addresses.
func TestTableIgnoresOrder(t *testing.T) {
	list := members(40)
	for i := range list {
		list[i].Weight = uint16(i % 4)
	}
	want := owners(Build(7, 1021, list), list)
	other := slices.Clone(list)
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(other), func(i, j int) { other[i], other[j] = other[j], other[i] })
	if n := differ(want, owners(Build(7, 1000, other), other)); n != 0 {
		t.Errorf("in another order %d slots differ", n)
	}
	for i := range other {
		other[i].Addr = netip.AddrPortFrom(netip.AddrFrom16(other[i].Addr.Addr().As16()), other[i].Addr.Port())
		other[i].Weight *= 9
	}
	got := owners(Build(7, 1021, other), other)
	for i := range got {
		got[i] = canonical(got[i])
	}
	if n := differ(want, got); n != 0 {
		t.Errorf("with mapped addresses and multiplied weights %d slots differ", n)
	}
	if n := differ(want, owners(Build(8, 1021, list), list)); n < 500 {
		t.Errorf("with another seed only %d slots differ", n)
	}
}

// TestTableIsStable compares a table with a known checksum: nodes with different
// versions must choose the same endpoints.
func TestTableIsStable(t *testing.T) {
	tab := Build(1, 251, members(5))
	sum := uint32(0)
	for i := range tab.Len() {
		sum = sum*31 + uint32(tab.At(i))
	}
	if sum != knownSum {
		t.Errorf("the table has changed: %d, was %d", sum, knownSum)
	}
}

const knownSum = 2691674326

func TestUnusualMembers(t *testing.T) {
	if tab := Build(1, 251, nil); tab != nil || tab.Len() != 0 || tab.Find(3) != 0 {
		t.Error("a table without members is not nil")
	}
	if tab := Build(1, 251, []Member{member(1, 0), member(2, 0)}); tab != nil {
		t.Error("a table of members without weight is not nil")
	}
	one := Build(1, -5, []Member{member(1, 0), member(2, 65535)})
	if one.Len() != 251 || one.Find(0) != 1 || one.Find(math.MaxUint32) != 1 {
		t.Error("wrong table of one member")
	}
	many := Build(1, 251, members(1000))
	seen := map[int]bool{}
	for i := range many.Len() {
		if seen[many.At(i)] {
			t.Error("with more members than buckets one member has two")
		}
		seen[many.At(i)] = true
	}
	// More members than numbers, and a repeated address.
	if all := members(1<<16 + 2); differ(owners(Build(1, 251, all), all), owners(many, members(1000))) != 0 {
		t.Error("the table of 65538 members differs")
	}
	twice := []Member{member(1, 3), member(2, 4), {netip.MustParseAddrPort("[::ffff:10.244.0.1]:8080"), 9}, member(3, 0), member(3, 7)}
	once := Build(1, 251, twice[:2])
	for i := range once.Len() {
		if Build(1, 251, twice).At(i) != once.At(i) {
			t.Fatal("a repeated address counts twice")
		}
	}
	// A walk skips the numbers between the size and the next power of two.
	for _, size := range sizes {
		if over := 1<<bits.Len(uint(size)) - size; over > size/40 {
			t.Errorf("%d is far below a power of two", size)
		}
	}
	if SizeAtLeast(-1) != 251 || SizeAtLeast(252) != 509 || SizeAtLeast(1<<20) != MaxSize || sizes[len(sizes)-1] != MaxSize {
		t.Error("sizes")
	}
}

// moved returns the share of buckets that move when a member is removed, without the
// member's own: the average and the maximum.
func moved(n, size int) (average, most float64) {
	list := members(n)
	tries := 0
	for seed := range uint64(10) {
		before := owners(Build(seed, size, list), list)
		for range min(n, 10) {
			gone := (tries * 7) % n
			rest := slices.Delete(slices.Clone(list), gone, gone+1)
			share := float64(differ(before, owners(Build(seed, size, rest), rest))) / float64(size)
			average += share
			most = max(most, share)
			tries++
		}
	}
	return average / float64(tries), most
}

// TestRemovedMemberMovesFewBuckets checks the bounds of the package documentation.
// Adding an endpoint is the reverse of a removal.
func TestRemovedMemberMovesFewBuckets(t *testing.T) {
	t.Parallel()
	for _, size := range sizes {
		if size > 4093 && !testing.Verbose() {
			break // logged only
		}
		line := fmt.Sprintf("%5d ", size)
		for _, n := range []int{3, 10, 100} {
			average, most := moved(n, size)
			line += fmt.Sprintf("    %4.1f (%4.1f)   ", 100*average, 100*most)
		}
		t.Log(line)
	}
	for _, n := range []int{2, 3, 4, 5, 10, 15, 16, 100, 101, 150} {
		average, most := moved(n, SizeFor(n))
		if average -= 1 / float64(n); average > 0.05 {
			t.Errorf("%d members, %d slots: on average %.1f %% of the slots change hands between the others", n, SizeFor(n), 100*average)
		}
		if most -= 1 / float64(n); most > 0.07 {
			t.Errorf("%d members, %d slots: up to %.1f %% of the slots change hands between the others", n, SizeFor(n), 100*most)
		}
	}
}

// TestChangedWeightMovesFewBuckets changes the weight of one member. It checks how
// many buckets move beyond those that the member gains or loses.
func TestChangedWeightMovesFewBuckets(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 10, 100} {
		for _, to := range []uint16{0, 1, 9, 11, 20} {
			beyond, tries := 0.0, 0
			for seed := range uint64(5) {
				list := members(n)
				for i := range list {
					list[i].Weight = 10
				}
				before := Build(seed, SizeFor(n), list)
				for at := range min(n, 5) {
					other := slices.Clone(list)
					other[at].Weight = to
					after := Build(seed, SizeFor(n), other)
					must := 0
					for slot := range after.Len() {
						if after.At(slot) == at {
							must++
						}
						if before.At(slot) == at {
							must--
						}
					}
					beyond += (float64(differ(owners(before, list), owners(after, other))) - math.Abs(float64(must))) / float64(after.Len())
					tries++
				}
			}
			if beyond /= float64(tries); beyond > 0.05 {
				t.Errorf("%d members: from weight 10 to %d, %.1f %% of the slots change hands that need not", n, to, 100*beyond)
			} else {
				t.Logf("%d members, weight 10 to %d: %.1f %%", n, to, 100*beyond)
			}
		}
	}
}

// TestWalkVisitsEveryBucketOnce checks the order of a member's buckets.
func TestWalkVisitsEveryBucketOnce(t *testing.T) {
	for _, size := range sizes {
		w := newWalks(uint64(size), uint32(size), members(1))[0]
		seen := make([]bool, size)
		for range size {
			at := w.next(uint32(size))
			if seen[at] {
				t.Fatalf("%d slots: %d comes twice", size, at)
			}
			seen[at] = true
		}
	}
}

func BenchmarkBuild(b *testing.B) {
	for _, c := range []struct{ n, size int }{{3, 251}, {10, 509}, {10, 1021}, {100, 4093}, {1000, 32749}, {100, 65521}} {
		b.Run(fmt.Sprintf("endpoints=%d/slots=%d", c.n, c.size), func(b *testing.B) {
			list := members(c.n)
			b.ReportAllocs()
			for b.Loop() {
				if Build(1, c.size, list).Len() != c.size {
					b.Fatal("wrong size")
				}
			}
		})
	}
}
