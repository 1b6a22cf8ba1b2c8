//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// recalled is a client of another data plane, with the time for which it is still remembered.
type recalled struct {
	addr netip.Addr
	left time.Duration
}

// recalledSize is at least the encoded size of an element of sticky-clients, in bytes.
const recalledSize = 96

// recallClients looks up the clients of a Service that another data plane remembers, for
// writeClients. It returns the size of their elements, which is at most room bytes.
func (t *table) recallClients(lookup func(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration, s *ruleset.Service, room int) (size int) {
	clear(t.recalled)
	if s == nil || s.Port.Affinity == 0 {
		return 0
	}
	for _, target := range targets {
		for _, ep := range s.Pool(target) {
			if _, done := t.recalled[ep.Addr]; done {
				continue
			}
			t.recalled[ep.Addr] = nil
			for addr, age := range lookup(s.Key, ep.Addr) {
				left := s.Port.Affinity - max(age, 0)
				if addr.Is4() != (t.family == tracker.IPv4) || left < time.Millisecond || size+len(targets)*recalledSize > room {
					continue
				}
				size += len(targets) * recalledSize
				t.recalled[ep.Addr] = append(t.recalled[ep.Addr], recalled{addr, left})
			}
		}
	}
	return size
}

// writeClients writes the clients of recallClients for the new endpoints of a pool.
func (t *table) writeClients(p *pool, affinity time.Duration, w *writer) {
	for _, m := range t.change.come {
		for _, c := range t.recalled[m.addr] {
			key := octets{}.word(p.number << stickyShift).addr(c.addr)
			data := octets{}.word(p.number<<stickyShift | uint32(m.number))
			w.adds(t.family, setStickyClients).AddTimed(key.bytes(), data.bytes(), milliseconds(affinity), milliseconds(c.left))
		}
	}
}

// milliseconds returns the kernel's encoding of a time.
func milliseconds(d time.Duration) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(d.Milliseconds()))
}
