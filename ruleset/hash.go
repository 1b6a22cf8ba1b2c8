package ruleset

import (
	"net/netip"

	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// Hash returns [tracker.ServicePort].Hash, or [tracker.HashNone] if that is not one
// of its constants.
func (s *Port) Hash() tracker.Hash {
	switch h := s.Spec.Hash; h {
	case tracker.HashSource, tracker.HashSourcePort:
		return h
	}
	return tracker.HashNone
}

// HashOf returns the hash of a connection from source: of the address, or of the
// address and port, depending on Hash. [maglev.Table.Find] finds the connection's
// endpoint by this hash in the result of Maglev for the same seed. HashOf returns 0
// if Hash is [tracker.HashNone]. Package nftables makes the kernel compute the same
// hash; see [maglev.HashAddr].
func (s *Port) HashOf(source netip.AddrPort, seed uint64) uint32 {
	switch s.Hash() {
	case tracker.HashSource:
		return maglev.HashAddr(seed, source.Addr())
	case tracker.HashSourcePort:
		return maglev.HashAddrPort(seed, source)
	}
	return 0
}

// HashBuckets returns the number of buckets in the table that [Port.Maglev] makes
// for a target: at least Port.HashBuckets, or a size that suits the number of
// endpoints. It returns 0 if Maglev returns nil.
func (s *Port) HashBuckets(t Target) int {
	n := len(s.Pool(t))
	switch {
	case s.Hash() == tracker.HashNone || n == 0:
		return 0
	case s.Spec.HashBuckets != 0:
		return maglev.SizeAtLeast(int(s.Spec.HashBuckets))
	}
	return maglev.SizeFor(n)
}

// Maglev returns the table that chooses the endpoints of a pool: the member in a
// bucket is an index into [Port.Pool] of t. Maglev returns nil if Hash is
// [tracker.HashNone] or the pool is empty. The table depends only on the addresses
// and weights of the pool, the size and the seed, which is [Node].HashSeed. Each call
// computes the table again, at the cost that package maglev documents. Only the first
// [maglev.MaxSize] endpoints of a pool are in the table.
func (s *Port) Maglev(t Target, seed uint64) *maglev.Table {
	size := s.HashBuckets(t)
	if size == 0 {
		return nil
	}
	pool := s.Pool(t)
	members := make([]maglev.Member, min(len(pool), maglev.MaxSize))
	for i := range members {
		members[i] = maglev.Member{Addr: pool[i].Addr, Weight: pool[i].Weight}
	}
	return maglev.Build(seed, size, members)
}
