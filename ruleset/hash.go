package ruleset

import (
	"net/netip"

	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// Hash returns from what of a connection its endpoint follows:
// [tracker.ServicePort.Hash], with [tracker.HashNone] for what is none of its
// constants.
func (s *Service) Hash() tracker.Hash {
	switch h := s.Port.Hash; h {
	case tracker.HashSource, tracker.HashSourcePort:
		return h
	}
	return tracker.HashNone
}

// HashOf returns the hash of a connection from source, by which [maglev.Table.Find]
// finds its endpoint in what Maglev returns for the same seed: of the address, or
// of address and port, as Hash says. It is 0 if that is [tracker.HashNone]. Package
// nftables has the kernel make the same, see [maglev.HashAddr].
func (s *Service) HashOf(source netip.AddrPort, seed uint64) uint32 {
	switch s.Hash() {
	case tracker.HashSource:
		return maglev.HashAddr(seed, source.Addr())
	case tracker.HashSourcePort:
		return maglev.HashAddrPort(seed, source)
	}
	return 0
}

// HashSlots returns the size of the table that [Service.Maglev] makes for a
// target: at least Port.HashSlots, or what suits the number of endpoints. It is 0
// if Maglev returns nil.
func (s *Service) HashSlots(t Target) int {
	n := len(s.Pool(t))
	switch {
	case s.Hash() == tracker.HashNone || n == 0:
		return 0
	case s.Port.HashSlots != 0:
		return maglev.SizeAtLeast(int(s.Port.HashSlots))
	}
	return maglev.SizeFor(n)
}

// Maglev returns the table by which the endpoints of a pool are chosen: a slot's
// member is an index into [Service.Pool] of t. It is nil if Hash is
// [tracker.HashNone] or the pool is empty. It depends on nothing but the pool's
// addresses and weights, the size and the seed, which is [Node.HashSeed]. It is
// computed again by each call, at the cost that package maglev states. Of more than
// [maglev.MaxSize] endpoints only the first so many share in it.
func (s *Service) Maglev(t Target, seed uint64) *maglev.Table {
	size := s.HashSlots(t)
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
