package model

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// Tx is a transaction: the objects to create or delete, in order, and then the elements to delete and to add. The
// kernel deletes all elements before it adds others. The zero value is empty.
type Tx struct {
	Objects []Object
	Edits   []Edit
	// Lost holds the destinations that a Service lost. Their counters are to be deleted after
	// the commit.
	Lost []Destination
	// Limit, if not 0, is the largest size in bytes.
	Limit int

	// meter measures objects. If it is nil, objects have no size.
	meter Meter
	bytes int
	lists listSet
	// room is unused memory for elements. That of elements is not used again, so they may outlive Reset.
	room []byte
}

// Kind is what happens to an object.
type Kind uint8

// The kinds of Object.
const (
	CreateTable     Kind = iota + 1 // create the table, unless it exists
	CreateNewTable                  // create the table, which must not exist
	DeleteTable                     // with everything in it
	DeleteRules                     // of all chains
	NewSet                          // Set, for Size elements
	DeleteSet                       // Name
	NewFlowtable                    // without devices
	DeleteFlowtable                 // Name
	AddDevices                      // Names, to the flowtable
	DeleteDevices                   // Names, of the flowtable
	FixedChains                     // the chains that every table has, without hooks
	BaseChains                      // the chains with hooks
	HandlerChain                    // of Handler; Size is the number of conditions for local traffic
	StickyChains                    // the chains that all sticky handlers share
	ChooserChain                    // of Sticky
	StickyChain                     // of Sticky
	SourceRule                      // Size is the length of the prefixes of allowed sources
	DeleteChain                     // Name, with its rules
)

// Object is the creation or deletion of an object. Kind determines the other fields in use.
type Object struct {
	Kind    Kind
	Family  tracker.Family
	Set     layout.Set
	Size    int
	Handler layout.Handler
	Sticky  layout.StickyHandler
	Name    string
	Names   []string
	bytes   int // 0 before it is measured
}

// Edit is an element to add to a set or to delete from it, in the kernel's encoding. An element to delete has
// a key only.
type Edit struct {
	Set      layout.Set
	Family   tracker.Family
	Deletion bool
	// Elements holds the element, or the two that mark an interval.
	nft.Elements
}

// word and ip return a key or data that begins with a number or an address.
func word(v uint32) layout.Octets   { return layout.Octets{}.Word(v) }
func ip(a netip.Addr) layout.Octets { return layout.Octets{}.Addr(a) }

// Destination is the address, protocol and port of a frontend, in the encoding of the sets of
// counters.
type Destination struct {
	Family tracker.Family
	Key    layout.Octets
}

// listSet is a set of lists of elements: a bit for each family, set and operation.
type listSet [(4*int(layout.SetCount) + 63) / 64]uint64

func (l *listSet) add(e *Edit) bool {
	n := 4 * int(e.Set)
	if e.Deletion {
		n++
	}
	if e.Family == tracker.IPv6 {
		n += 2
	}
	bit := uint64(1) << (n % 64)
	fresh := l[n/64]&bit == 0
	l[n/64] |= bit
	return fresh
}

// MessageSize is an upper bound of a message's bytes without its elements.
const MessageSize = 160

// Size returns the number of bytes of the transaction in a netlink message, or a little more.
func (tx *Tx) Size() int {
	// A message has at most 60 kB of elements.
	return tx.bytes + tx.bytes/(50<<10)*MessageSize + 4*MessageSize
}

// Structural reports whether the transaction changes more than elements of large sets.
func (tx *Tx) Structural() bool {
	if len(tx.Objects) != 0 {
		return true
	}
	for i := range tx.Edits {
		if s := tx.Edits[i].Set; s.Interval() || s == layout.StickyHandlers {
			return true
		}
	}
	return false
}

// Reset empties the transaction and keeps its memory.
func (tx *Tx) Reset() {
	*tx = Tx{Objects: tx.Objects[:0], Edits: tx.Edits[:0], Lost: tx.Lost[:0], Limit: tx.Limit, meter: tx.meter, room: tx.room}
}

// Object appends an object.
func (tx *Tx) Object(o Object) {
	tx.Objects = append(tx.Objects, o)
	tx.measureObject(&tx.Objects[len(tx.Objects)-1])
}

func (tx *Tx) measureObject(o *Object) {
	if o.bytes == 0 && tx.meter != nil {
		o.bytes = tx.meter.ObjectSize(o)
	}
	tx.bytes += o.bytes
}

// add appends an element to add, with a comment or a chain.
func (tx *Tx) add(f tracker.Family, e *layout.Element, text string) {
	edit := tx.begin(f, e.Set, false)
	if e.Set.Verdicts() {
		edit.AddVerdict(e.Key.Bytes(), text)
	} else {
		edit.Add(e.Key.Bytes(), e.Data.Bytes(), text)
	}
	tx.end(edit)
}

// remove appends the deletion of the element with e's key.
func (tx *Tx) remove(f tracker.Family, e *layout.Element) {
	edit := tx.begin(f, e.Set, true)
	edit.Add(e.Key.Bytes(), nil, "")
	tx.end(edit)
}

// begin appends an edit, whose element the caller encodes before end.
func (tx *Tx) begin(f tracker.Family, s layout.Set, deletion bool) *Edit {
	if cap(tx.room) < 512 {
		tx.room = make([]byte, 0, 16<<10)
	}
	tx.Edits = append(tx.Edits, Edit{Set: s, Family: f, Deletion: deletion})
	e := &tx.Edits[len(tx.Edits)-1]
	e.Use(tx.room)
	return e
}

func (tx *Tx) end(e *Edit) {
	tx.room = e.Rest()
	tx.measure(e)
}

func (tx *Tx) edit(e Edit) {
	tx.Edits = append(tx.Edits, e)
	tx.measure(&e)
}

func (tx *Tx) measure(e *Edit) {
	tx.bytes += e.Size()
	if tx.lists.add(e) {
		tx.bytes += MessageSize
	}
}

// Mark is a place in a transaction.
type Mark struct{ objects, edits, lost int }

// Mark returns the end of the transaction.
func (tx *Tx) Mark() Mark { return Mark{len(tx.Objects), len(tx.Edits), len(tx.Lost)} }

func (tx *Tx) from(m Mark) Tx {
	return Tx{Objects: tx.Objects[m.objects:], Edits: tx.Edits[m.edits:], Lost: tx.Lost[m.lost:]}
}

// sizeFrom returns the size of a transaction with the part behind m only.
func (tx *Tx) sizeFrom(m Mark) int {
	part := tx.from(m)
	part.measureAll()
	return part.Size()
}

func (tx *Tx) measureAll() {
	tx.bytes, tx.lists = 0, listSet{}
	for i := range tx.Objects {
		tx.measureObject(&tx.Objects[i])
	}
	for i := range tx.Edits {
		tx.measure(&tx.Edits[i])
	}
}

// Cut moves everything behind m to rest, which it empties first.
func (tx *Tx) Cut(m Mark, rest *Tx) {
	rest.Reset()
	part := tx.from(m)
	rest.append(&part)
	tx.Objects, tx.Edits, tx.Lost = tx.Objects[:m.objects], tx.Edits[:m.edits], tx.Lost[:m.lost]
	tx.measureAll()
}

func (tx *Tx) append(other *Tx) {
	tx.Objects, tx.Edits = append(tx.Objects, other.Objects...), append(tx.Edits, other.Edits...)
	tx.Lost = append(tx.Lost, other.Lost...)
	tx.measureAll()
}

// takeClusterIPs moves the elements of the set of cluster IPs behind m to list.
func (tx *Tx) takeClusterIPs(m Mark, list []Edit) []Edit {
	kept := tx.Edits[:m.edits]
	for _, e := range tx.Edits[m.edits:] {
		if e.Set == layout.ClusterIPs {
			list = append(list, e)
			tx.bytes -= e.Size()
		} else {
			kept = append(kept, e)
		}
	}
	tx.Edits = kept
	return list
}

// String returns a line for each object and each element.
func (tx *Tx) String() string {
	var b strings.Builder
	for _, o := range tx.Objects {
		fmt.Fprintf(&b, "%s kind %d set %s size %d handler %+v sticky %+v name %q %q\n",
			o.Family, o.Kind, o.Set.Name(), o.Size, o.Handler, o.Sticky, o.Name, o.Names)
	}
	for i := range tx.Edits {
		e := &tx.Edits[i]
		verb := "add"
		if e.Deletion {
			verb = "delete"
		}
		e.Each(func(one nft.Element) { fmt.Fprintf(&b, "%s %s %s %+v\n", e.Family, verb, e.Set.Name(), one) })
	}
	return b.String()
}
