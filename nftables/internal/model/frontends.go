package model

import (
	"slices"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// frontends is the department of the elements of frontends, and of the sets for their sources.
type frontends struct {
	common *common
	// clusterIPs counts the Services that need an address in the set of cluster IPs.
	clusterIPs uses
	// prefixes holds the lengths of source prefixes that have a set.
	prefixes map[int]bool
	// longNames holds the Service ports whose names do not fit into a comment, by frontend.
	longNames map[layout.Octets]tracker.Key
}

// planElements adds the elements by which the frontends of a Service differ.
func (f *frontends) planElements(before, after *wanted, tx *Tx) {
	gone, come := different(before.elements, after.elements)
	for _, e := range gone {
		switch {
		case e.Set == layout.ClusterIPs && !f.clusterIPs.addUses(e.Key.IP(), -1):
			continue
		case e.Set == layout.ServiceIPs && !after.has(e):
			tx.Lost = append(tx.Lost, Destination{f.common.family, e.Key})
		}
		if e.Set.Counted() && f.longNames[e.Key] == before.key {
			delete(f.longNames, e.Key)
		}
		tx.remove(f.common.family, e)
	}
	name := ""
	for _, e := range come {
		comment := ""
		if e.Named {
			if name == "" {
				name = layout.ServiceComment(after.key.ServicePortName)
			}
			comment = name
		}
		switch {
		case e.Set == layout.ClusterIPs && !f.clusterIPs.addUses(e.Key.IP(), +1):
			continue
		case e.Set >= layout.FirstAllowed:
			f.prefix(int(e.Set-layout.FirstAllowed), tx)
		case e.Set.Counted() && len(name) > nft.MaxComment:
			f.longNames[e.Key] = after.key
		}
		tx.add(f.common.family, e, comment)
	}
}

// has reports whether w has an element with a dispatch key in the place of e.
func (w *wanted) has(e *layout.Element) bool {
	return slices.ContainsFunc(w.keys, func(k wantedKey) bool {
		o := &w.elements[k.element]
		return o.Set == e.Set && o.Key == e.Key
	})
}

// prefix creates the set for sources of a prefix length, if it does not exist, and its rule. The set
// has no size.
func (f *frontends) prefix(length int, tx *Tx) {
	if f.prefixes[length] {
		return
	}
	f.prefixes[length] = true
	tx.Object(Object{Kind: NewSet, Family: f.common.family, Set: layout.Allowed(length)})
	tx.Object(Object{Kind: SourceRule, Family: f.common.family, Size: length})
}

// Sources returns the number of prefix lengths of allowed sources that have a rule.
func (f *frontends) Sources() int { return len(f.prefixes) }

// LongNames returns the Service ports whose names do not fit into a comment, by the key of their
// frontends.
func (f *frontends) LongNames() map[layout.Octets]tracker.Key { return f.longNames }

// different returns the elements that only before has, and those that only after has. It is fast if the lists
// are equal, as those of a Service's frontends mostly are.
func different(before, after []layout.Element) (gone, come []*layout.Element) {
	for len(before) > 0 && len(after) > 0 && before[0] == after[0] {
		before, after = before[1:], after[1:]
	}
	return missing(before, after), missing(after, before)
}

func missing(list, other []layout.Element) (out []*layout.Element) {
	if len(list) == 0 {
		return nil
	}
	out = make([]*layout.Element, 0, len(list))
	has := func(e *layout.Element) bool { return slices.Contains(other, *e) }
	if len(list)*len(other) > 256 {
		index := make(map[layout.Element]bool, len(other))
		for i := range other {
			index[other[i]] = true
		}
		has = func(e *layout.Element) bool { return index[*e] }
	}
	for i := range list {
		if e := &list[i]; !has(e) {
			out = append(out, e)
		}
	}
	return out
}
