package model

import (
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// frontends is the department of the elements of frontends, and of the sets for their sources.
type frontends struct {
	*common
	// clusterIPs counts the Services that need an address in the set of cluster IPs.
	clusterIPs uses
	// prefixes holds the lengths of source prefixes that have a set.
	prefixes book[int, bool]
	// longNames holds the Service ports whose names do not fit into a comment, by frontend.
	longNames map[layout.Octets]tracker.Key

	before, after []layout.Element // buffers
}

// write adds the elements by which the frontends of a Service differ, except those that kept reports
// to be in the kernel already.
func (f *frontends) write(old, now *service, before, after *ruleset.Port, kept func(*layout.Element, string) bool, tx *Tx) {
	f.before, f.after = f.before[:0], f.after[:0]
	if before != nil {
		f.before = frontendElements(f.before, before, old)
	}
	name := ""
	if after != nil {
		f.after = frontendElements(f.after, after, now)
	}
	diff(f.before, f.after, func(e *layout.Element) { f.remove(e, tx) }, func(e *layout.Element) {
		comment := ""
		if e.Named {
			if name == "" {
				name = layout.ServiceComment(after.Key.ServicePortName)
			}
			comment = name
		}
		if !e.Set.Concat() || !kept(e, comment) {
			f.add(e, comment, tx)
		}
	})
	f.noteLost(before, after, tx)
}

// add adds an element with a comment to its set. It creates a missing set of allowed sources.
func (f *frontends) add(e *layout.Element, comment string, tx *Tx) {
	switch {
	case e.Set == layout.ClusterIPs:
		if !f.clusterIPs.add(&f.draft, e.Key.IP(), +1) {
			return
		}
	case e.Set >= layout.FirstAllowed:
		f.prefix(int(e.Set-layout.FirstAllowed), tx)
	}
	tx.add(f.Family, e, comment)
}

// remove deletes an element from its set.
func (f *frontends) remove(e *layout.Element, tx *Tx) {
	if e.Set != layout.ClusterIPs || f.clusterIPs.add(&f.draft, e.Key.IP(), -1) {
		tx.remove(f.Family, e)
	}
}

// prefix creates the set for sources of a prefix length, if it does not exist, and its rule. The set
// has no size.
func (f *frontends) prefix(length int, tx *Tx) {
	if f.prefixes.now[length] {
		return
	}
	f.prefixes.set(&f.draft, length, true)
	tx.Object(Object{Kind: NewSet, Family: f.Family, Set: layout.Allowed(length)})
	tx.Object(Object{Kind: SourceRule, Family: f.Family, Size: length})
}

// Sources returns the number of prefix lengths of allowed sources that have a rule.
func (f *frontends) Sources() int { return len(f.prefixes.now) }

// LongNames returns the Service ports whose names do not fit into a comment, by the key of their
// frontends.
func (f *frontends) LongNames() map[layout.Octets]tracker.Key { return f.longNames }

// noteLongNames updates longNames after the frontends of a Service changed.
func (f *frontends) noteLongNames(before, after *ruleset.Port) {
	s := after
	if s == nil {
		s = before
	}
	if n := s.Key; len(n.Namespace)+len(n.Name)+len(n.Port)+len("/:") <= layout.MaxComment {
		return
	}
	set := func(s *ruleset.Port, set func(layout.Octets)) {
		for i := 0; s != nil && i < len(s.Frontends); i++ {
			if s.Frontends[i].IsRange() {
				continue // its packets are not counted
			}
			_, _, key := keyOf(s, &s.Frontends[i])
			set(key)
		}
	}
	set(before, func(key layout.Octets) {
		if f.longNames[key] == before.Key {
			delete(f.longNames, key)
		}
	})
	set(after, func(key layout.Octets) { f.longNames[key] = after.Key })
}

// noteLost adds the addresses and ports that a Service loses to tx.Lost. It leaves out ranges, whose
// packets are not counted, and NodePorts:
// the keys of their counters contain an address of the node, which the model does not have.
func (fs *frontends) noteLost(before, after *ruleset.Port, tx *Tx) {
	if before == nil {
		return
	}
	for i := range before.Frontends {
		f := &before.Frontends[i]
		if f.Kind == ruleset.KindNodePort || f.IsRange() || after != nil && slices.ContainsFunc(after.Frontends, func(g ruleset.Frontend) bool {
			return g.Addr == f.Addr && g.Port == f.Port && !g.IsRange() && g.Kind != ruleset.KindNodePort
		}) {
			continue
		}
		_, _, key := keyOf(before, f)
		tx.Lost = append(tx.Lost, Destination{fs.Family, key})
	}
}

// dispatchKeys holds the dispatch keys of one frontend. internal is for internal traffic under
// externalTrafficPolicy Local, and 0 otherwise. any is for other traffic.
type dispatchKeys struct{ any, internal uint32 }

// keyOf returns the maps that hold the dispatch keys of a Service's frontend, and its key in them.
func keyOf(s *ruleset.Port, f *ruleset.Frontend) (all, internal layout.Set, key layout.Octets) {
	return layout.FrontendKey(f.Kind == ruleset.KindNodePort, f.Addr, s.Key.Protocol, f.Port)
}

// frontendElements appends the elements of a Service's frontends to list. as is the Service as
// programmed.
func frontendElements(list []layout.Element, s *ruleset.Port, as *service) []layout.Element {
	for i := range s.Frontends {
		f, keys := &s.Frontends[i], as.keys[i]
		if f.IsRange() {
			list = rangeElements(list, s, f, keys, as.rangeNumber(f.Addr))
			continue
		}
		all, internal, key := keyOf(s, f)
		list = append(list, layout.Element{Set: all, Named: true, Key: key, Data: word(keys.any)})
		if keys.internal != 0 {
			list = append(list, layout.Element{Set: internal, Named: true, Key: key, Data: word(keys.internal)})
		}
		for _, source := range f.Sources {
			from := ip(source.Masked().Addr()).Addr(f.Addr).Proto(s.Key.Protocol).Port(f.Port)
			list = append(list, layout.Element{Set: layout.Allowed(source.Bits()), Named: true, Key: from})
		}
		if f.Kind == ruleset.KindClusterIP {
			list = append(list, layout.Element{Set: layout.ClusterIPs, Key: ip(f.Addr)})
		}
	}
	return as.shiftElements(list)
}

// diff calls remove with each element that only before has, and then add with each element that
// only after has. It is fast if the lists are equal, as those of a Service's frontends mostly
// are.
func diff(before, after []layout.Element, remove, add func(*layout.Element)) {
	for len(before) > 0 && len(after) > 0 && before[0] == after[0] {
		before, after = before[1:], after[1:]
	}
	missing(before, after, remove)
	missing(after, before, add)
}

// missing calls fn with the elements of list that are missing from other.
func missing(list, other []layout.Element, fn func(*layout.Element)) {
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
			fn(e)
		}
	}
}
