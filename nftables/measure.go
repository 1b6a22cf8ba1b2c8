//go:build linux

package nftables

import (
	"strings"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// demand is the largest number of elements that a set needs, and the number of bytes that they
// take in a transaction.
type demand struct{ elements, bytes int }

// measure sets the sizes of the sets for the Services in changes and for grace entries. It
// returns the demand for each set.
func (t *table) measure(changes []ruleset.Change, clients, grace int) *[setCount]demand {
	need := &[setCount]demand{}
	add := func(s set, n, bytes int) {
		need[s].elements += n
		need[s].bytes += n * bytes
	}
	add(setHairpin, grace, hairpinSize(t.family))
	for i := range changes {
		if s := changes[i].New; s != nil && s.Key.Family == t.family {
			t.demand(s, add)
		}
	}
	for s := setServiceIPs; s < setCount; s++ {
		t.size[s] = sizeFor(need[s].elements)
	}
	t.size[setStickyClients] = clients
	// Interval sets have no size.
	t.size[setNodePortIPs], t.size[setServiceCIDRs] = 0, 0
	t.size[setFastPathInterfaces] = 0 // not known
	for _, s := range trafficSets {
		t.size[s] = sizeFor(need[setServiceIPs].elements + nodePortAddresses*need[setNodePorts].elements)
	}
	return need
}

// demand calls add with the largest number of elements of a set that the Service needs, and
// the bytes of each.
func (t *table) demand(s *ruleset.Service, add func(s set, n, bytes int)) {
	comment := nlbatch.CommentSize(len(s.Key.Namespace) + len(s.Key.Name) + len(s.Key.Port) + len("//:/SCTP/IPv6 local"))
	buckets := bucketsOf(s, ruleset.ToCluster) + bucketsOf(s, ruleset.ToLocal)
	if s.Port.Affinity != 0 {
		for _, target := range targets {
			if len(s.Pool(target)) != 0 {
				add(setStickyPools, 1, nlbatch.ElementSize(4, 4))
				add(setStickyHandlers, 1, 0) // at most, and missingSticky has the bytes
			}
		}
		add(setStickyBuckets, buckets, nlbatch.ElementSize(2*4, 4))
		add(setStickyEndpoints, len(s.Selection.Cluster)+len(s.Selection.Local), nlbatch.ElementSize(4, t.family.Bits()/8+4)+comment)
	} else {
		add(setEndpoints, buckets, nlbatch.ElementSize(2*4, t.family.Bits()/8+4))
	}
	t.keys = t.keys[:0]
	for i := range s.Frontends {
		k := dispatchKeys{any: dispatchMark}
		if hasInternalHandler(&s.Frontends[i]) {
			k.internal = dispatchMark
		}
		t.keys = append(t.keys, k)
	}
	t.after = frontendElements(t.after[:0], s, t.keys)
	for i := range t.after {
		e := &t.after[i]
		bytes := e.size()
		if e.named {
			bytes += comment
		}
		add(e.set, 1, bytes)
	}
	here := 0
	for _, ep := range s.Selection.Reachable {
		if t.mayBeHere(ep) {
			here++
		}
	}
	add(setHairpin, here, hairpinSize(t.family))
}

// size returns the largest number of bytes that the element takes without its comment.
func (e *element) size() int { return nlbatch.ElementSize(int(e.key.n), int(e.data.n)) }

// hairpinSize returns the size of a hairpinElement.
func hairpinSize(f tracker.Family) int { return nlbatch.ElementSize(2*f.Bits()/8, 0) }

// bytes returns the largest number of bytes that the Service takes in a transaction if the table
// does not have it.
func (t *table) bytes(s *ruleset.Service) int {
	if s == nil {
		return 0
	}
	total, prefixes := 0, 0
	t.demand(s, func(k set, n, bytes int) {
		total += n * bytes
		if k >= firstAllowed && !t.prefixes[int(k-firstAllowed)] {
			prefixes++
		}
	})
	for _, h := range t.missingHandlers(s) {
		total += t.handlerBytes(h)
	}
	return total + prefixes*prefixSize + len(t.missingSticky(s))*stickyHandlerSize
}

// stickyHandlerSize is an upper bound of the bytes that take a sticky handler and all chains that
// it jumps to.
const stickyHandlerSize = 12 << 10

// prefixSize is an upper bound of the bytes that take a set for the sources of one prefix length
// and its rule.
const prefixSize = 1 << 10

// handlerBytes returns the number of bytes that the handler takes in a transaction.
func (t *table) handlerBytes(h handler) int {
	w := newWriter(stagingOf(strings.Repeat("x", maxName)))
	newTable(t.family, t.node, t.mark, defaultLimits).internalHandler(h, w)
	return w.size()
}
