//go:build linux

package nftables

import (
	"strings"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
)

// measure sets the sizes of the sets for the Services in changes, from how many
// elements they will take at the most, which it returns. Lingers is how many
// endpoints of a table before linger.
func (t *table) measure(changes []ruleset.Change, clients, graceEntries int) (need map[set]int) {
	need = map[set]int{setHairpin: graceEntries}
	for i := range changes {
		if s := changes[i].New; s != nil && s.Key.Family == t.family {
			t.needs(s, func(k set, n int) { need[k] += n })
		}
	}
	for s := setServiceIPs; int(s) < len(t.size); s++ {
		t.size[s] = sizeFor(need[s])
	}
	t.size[setStickyClients] = clients
	// The kinds of set that intervals are kept in have no size.
	t.size[setNodePortIPs], t.size[setServiceCIDRs] = 0, 0
	return need
}

// needs calls add with how many elements of a set the Service takes, at the most.
func (t *table) needs(s *ruleset.Service, add func(k set, n int)) {
	buckets := bucketsOf(s, ruleset.ToCluster) + bucketsOf(s, ruleset.ToLocal)
	if s.Port.Affinity != 0 {
		add(setStickyBuckets, buckets)
		add(setStickyEndpoints, len(s.Selection.Cluster)+len(s.Selection.Local))
	} else {
		add(setEndpoints, buckets)
	}
	add(setClusterIPs, 1)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		all, internal := setServiceIPs, setInternalIPs
		if f.Kind == ruleset.NodePort {
			all, internal = setNodePorts, setInternalNodePorts
		}
		add(all, 1)
		if f.ShortCircuit() {
			add(internal, 1)
		}
		for _, source := range f.Sources {
			add(allowed(source.Bits()), 1)
		}
	}
	here := 0
	for _, ep := range s.Selection.Reachable {
		if t.mayBeHere(ep) {
			here++
		}
	}
	add(setHairpin, here)
}

// bytes returns how many bytes of a transaction it takes, at the most, to write
// the Service to a table that does not have it.
func (t *table) bytes(s *ruleset.Service) int {
	if s == nil {
		return 0
	}
	comment := nlbatch.CommentSize(len(s.Key.Namespace) + len(s.Key.Name) + len(s.Key.Port) + len("//:/SCTP/IPv6 local"))
	total, prefixes := 0, 0
	t.needs(s, func(k set, n int) {
		size := t.elementSize[k]
		if k != setEndpoints && k != setStickyBuckets { // which have no comments
			size += comment
		}
		total += n * size
		if k >= firstAllowed && !t.prefixes[int(k-firstAllowed)] {
			prefixes++
		}
	})
	for _, c := range t.missingHandlers(s) {
		total += t.handlerBytes(c)
	}
	return total + prefixes*prefixSize
}

// prefixSize is about the most bytes that it takes to make a set for the sources
// of one prefix length and its rule.
const prefixSize = 1 << 10

// handlerBytes returns how many bytes it takes to make the handler.
func (t *table) handlerBytes(c handler) int {
	// They do not depend on which buckets or timeout, but for the length of names.
	if c.buckets > exactBuckets {
		c.buckets = bucketsFor(maxPool)
	}
	if c.affinity != 0 {
		c.affinity = maxAffinity
	}
	n, ok := t.handlerSize[c]
	if !ok {
		w, only := newWriter(stagingOf(strings.Repeat("x", maxName)), 1), newTable(t.family, t.node)
		only.internalHandler(c, w)
		n = w.size()
		t.handlerSize[c] = n
	}
	return n
}
