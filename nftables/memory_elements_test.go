package nftables

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
)

// The functions in this file read the sets and chains of a table alone.

// number reads a number in the machine's byte order, 0 if data is not one.
func number(data []byte) uint32 {
	if len(data) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(data)
}

// word returns the key that consists of a number.
func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// found returns an element of a set.
func (t *memoryTable) found(s layout.Set, key []byte) (nft.Element, bool) {
	e, ok := t.elements(s)[string(key)]
	return e, ok
}

// chain returns a chain, the zero value if it is missing.
func (t *memoryTable) chain(name string) memoryChain {
	if c := t.chains[name]; c != nil {
		return *c
	}
	return memoryChain{}
}

// pool returns the endpoints of the buckets of a dispatch key's pool, and the sticky handler, if it
// has one.
func (t *memoryTable) pool(key uint32) (buckets []netip.AddrPort, sticky *layout.StickyHandler) {
	pool := key & layout.PoolMask
	e, ok := t.found(layout.StickyPools, word(pool))
	if !ok {
		for _, s := range []layout.Set{layout.Endpoints, layout.UDPEndpoints, layout.SCTPEndpoints} {
			for data := range t.buckets(s, pool) {
				a, _ := layout.ParseAddrPort(data)
				buckets = append(buckets, a)
			}
		}
		return buckets, nil
	}
	stickyKey := number(e.Data)
	chain, _ := t.found(layout.StickyHandlers, word(stickyKey&layout.MaxMember))
	h := t.chain(chain.Chain).sticky
	members := t.elements(layout.StickyEndpoints)
	for member := range t.buckets(layout.StickyBuckets, stickyKey&layout.StickyMask) {
		a, _ := layout.ParseAddrPort(members[string(member)].Data)
		buckets = append(buckets, a)
	}
	return buckets, &h
}

// buckets yields the data of a pool's buckets in a set, up to the first one that is missing.
func (t *memoryTable) buckets(s layout.Set, pool uint32) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		elements := t.elements(s)
		var key [8]byte
		binary.NativeEndian.PutUint32(key[:], pool)
		for bucket := uint32(0); ; bucket++ {
			binary.NativeEndian.PutUint32(key[4:], bucket)
			if e, ok := elements[string(key[:])]; !ok || !yield(e.Data) {
				return
			}
		}
	}
}

// resolve describes the handling of a dispatch key without its numbers.
func (t *memoryTable) resolve(handlers layout.Set, key uint32) string {
	chain, _ := t.found(handlers, word(key&layout.HandlerMask))
	buckets, sticky := t.pool(key)
	name := chain.Chain
	if sticky != nil {
		name += " " + sticky.Chain()
	}
	if !strings.Contains(name, "-by-") { // with a hash, the order of buckets matters
		slices.SortFunc(buckets, netip.AddrPort.Compare)
	}
	return fmt.Sprintf("%s %v", name, buckets)
}
