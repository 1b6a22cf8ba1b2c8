package model

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// affinity is the department of the Services that lack client affinity, and of the clients of
// another data plane.
type affinity struct {
	common *common
	// lacking holds the Services that are programmed without client affinity that they ask for, by
	// ID. newlyLacking is one of those that were not before, and counts them.
	lacking      map[uint32]*ruleset.Port
	newlyLacking struct {
		count int
		key   tracker.Key
	}
	// recall, if not nil, returns the clients of an endpoint that another data plane remembers.
	recall Recall
}

// Recall returns the clients that another data plane remembers for an endpoint of a Service port
// with client affinity, each with the time since its last connection.
type Recall func(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration

// Recall makes each Service that Change adds from now on start with the clients that another data
// plane remembers. nil ends that.
func (a *affinity) Recall(r Recall) { a.recall = r }

func (a *affinity) recordLacking(id uint32, old, now *service, s *ruleset.Port) {
	switch {
	case now.lacksAffinity:
		if a.lacking[id] == nil {
			a.newlyLacking.count++
			a.newlyLacking.key = s.Key
		}
		a.lacking[id] = s
	case old.lacksAffinity:
		delete(a.lacking, id)
	}
}

// recallClients adds the clients of a new Service that another data plane remembers, as many as
// have room in the transaction beside the Service, which begins at mark.
func (a *affinity) recallClients(now *service, s *ruleset.Port, mark Mark, tx *Tx) {
	if a.recall == nil || s == nil || s.Spec.Affinity == 0 {
		return
	}
	type client struct {
		addr netip.Addr
		left time.Duration
	}
	room := tx.Limit - tx.sizeFrom(mark)
	clients := map[netip.AddrPort][]client{}
	for _, target := range targets {
		p := now.pools[target]
		if p == nil || !p.sticky {
			continue
		}
		for i, ep := range p.buckets {
			list, known := clients[ep.Addr]
			if !known {
				for addr, age := range a.recall(s.Key, ep.Addr) {
					if left := s.Spec.Affinity - max(age, 0); addr.Is4() == (a.common.family == tracker.IPv4) && left >= time.Millisecond {
						list = append(list, client{addr, left})
					}
				}
				clients[ep.Addr] = list
			}
			for _, c := range list {
				e := Edit{Set: layout.StickyClients, Family: a.common.family}
				key, data := word(p.number<<layout.StickyShift).Addr(c.addr), word(p.number<<layout.StickyShift|uint32(p.members[i]))
				e.AddTimed(key.Bytes(), data.Bytes(), milliseconds(s.Spec.Affinity), milliseconds(c.left))
				if room -= e.Size(); tx.Limit != 0 && room < MessageSize {
					return
				}
				tx.edit(e)
			}
		}
	}
}

// milliseconds returns the kernel's encoding of a time.
func milliseconds(d time.Duration) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(d.Milliseconds()))
}
