package fairshare

import (
	"container/list"
	"iter"
	"maps"
	"net/netip"
)

// Holder is the cause of an entry. Namespaces share the entries of a [Table] first, then the Services of a namespace,
// and then the clients of a Service. Fields may be empty.
type Holder struct {
	// Namespace and Service name the Service that the entry is for.
	Namespace, Service string
	// Client is the address of the client without its zone. IPv6 clients have prefixes of 48 to 64 bits: the prefixes
	// of 48 bits share the entries of the Service, then those of 56 bits, then those of 64 bits, and then the
	// addresses.
	Client netip.Addr
}

// Table holds at most a number of entries. Each method takes constant time. The methods are not safe for
// concurrent use. [New] makes one; the zero value must not be used.
type Table[E comparable] struct {
	most    int
	root    node
	entries map[E]*place
}

// node is a holder of entries: the table, a namespace, a Service, a prefix, or an address, which has them itself.
type node struct {
	parent *node
	key    any
	// children is nil for an address alone.
	children map[any]*node
	// count is the number of entries. The parent has the node in its ranks[count], at element.
	count   int
	element *list.Element
	// ranks holds the children with each count, the one that was used least recently first. highest is
	// the greatest count.
	ranks   map[int]*list.List
	highest int
	// idle and busy hold the entries of an address, the oldest first.
	idle, busy list.List
}

// place is where an entry is: in one of the two lists of an address.
type place struct {
	client  *node
	in      *list.List
	element *list.Element
}

// New returns an empty table for at most a number of entries.
func New[E comparable](most int) *Table[E] {
	return &Table[E]{most: most, entries: map[E]*place{}}
}

// Len returns the number of entries.
func (t *Table[E]) Len() int { return len(t.entries) }

// All returns all entries in no order. The table must not change during the iteration.
func (t *Table[E]) All() iter.Seq[E] { return maps.Keys(t.entries) }

// Add adds an idle entry, which must not be in the table. If there are too many then, it removes and returns the
// victim: of the namespace that has most, of its Service that has most, and of that Service's client that has most,
// among equals the least recently used. The victim is the client's oldest idle entry, or its oldest busy one.
func (t *Table[E]) Add(e E, h Holder) (victim E, full bool) {
	client, addr := t.root.child(h.Namespace).child(h.Service), h.Client.Unmap()
	if addr.Is6() {
		for _, bits := range []int{48, 56, 64} {
			p, _ := addr.Prefix(bits) // fails only for an invalid number of bits
			client = client.child(p)
		}
	}
	client = client.child(addr.WithZone(""))
	t.entries[e] = &place{client, &client.idle, client.idle.PushBack(e)}
	client.add(1)
	if len(t.entries) <= t.most {
		return victim, false
	}
	n := &t.root
	for n.children != nil {
		n = n.ranks[n.highest].Front().Value.(*node)
	}
	first := n.idle.Front()
	if n.busy.Len() != 0 && (first == nil || first.Value == any(e)) {
		first = n.busy.Front()
	}
	victim = first.Value.(E)
	t.Remove(victim)
	return victim, true
}

// Use makes an entry the newest one, and busy or idle. It reports whether the table has the entry.
func (t *Table[E]) Use(e E, busy bool) bool {
	p, ok := t.entries[e]
	if !ok {
		return false
	}
	p.in.Remove(p.element)
	p.in = &p.client.idle
	if busy {
		p.in = &p.client.busy
	}
	p.element = p.in.PushBack(e)
	p.client.add(0)
	return true
}

// Remove removes an entry, and reports whether the table had it.
func (t *Table[E]) Remove(e E) bool {
	p, ok := t.entries[e]
	if !ok {
		return false
	}
	delete(t.entries, e)
	p.in.Remove(p.element)
	p.client.add(-1)
	return true
}

// child returns a child, which has no entries if it is new.
func (n *node) child(key any) *node {
	c := n.children[key]
	if c == nil {
		if n.children == nil {
			n.children, n.ranks = map[any]*node{}, map[int]*list.List{}
		}
		c = &node{parent: n, key: key}
		n.children[key] = c
	}
	return c
}

// add adds a number, -1 to 1, to the entries of a client and of those that it belongs to, and makes them the most
// recently used of their ranks. It deletes them if they have none.
func (n *node) add(number int) {
	for p := n.parent; p != nil; n, p = p, p.parent {
		if rank := p.ranks[n.count]; rank != nil {
			rank.Remove(n.element)
			if rank.Len() == 0 {
				delete(p.ranks, n.count)
			}
		}
		if n.count += number; n.count == 0 {
			delete(p.children, n.key)
		} else {
			if p.ranks[n.count] == nil {
				p.ranks[n.count] = list.New()
			}
			n.element = p.ranks[n.count].PushBack(n)
		}
		if p.highest = max(p.highest, n.count); p.ranks[p.highest] == nil {
			p.highest--
		}
	}
}
