//go:build linux

package kernel

import (
	"encoding/binary"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// Writer encodes transactions as one batch: objects in their order, then the elements to delete and
// the elements to add. It keeps its memory from one batch to the next.
type Writer struct {
	// Table is the name of the tables.
	Table string
	rules [2]Rules
	batch Batch
	lists [2]struct{ add, remove [layout.SetCount]Elements }
	// touched holds the lists that have elements.
	touched []list
	err     error
}

// list holds the elements to add to a set or to delete from it.
type list struct {
	*Elements
	family   tracker.Family
	set      layout.Set
	deletion bool
}

// NewWriter returns a Writer for tables of a name. rules renders the chains of the families' tables.
func NewWriter(table string, rules ...Rules) *Writer {
	w := &Writer{Table: table}
	for _, r := range rules {
		w.rules[index(r.Family)] = r
	}
	w.Reset()
	return w
}

// Reset empties the writer.
func (w *Writer) Reset() {
	w.batch.Reset()
	for _, l := range w.touched {
		l.Reset()
	}
	w.touched, w.err = w.touched[:0], nil
}

// Empty reports whether nothing was added.
func (w *Writer) Empty() bool { return len(w.touched) == 0 && w.batch.Empty() }

// Expect makes room for n elements of a set.
func (w *Writer) Expect(f tracker.Family, s layout.Set, n int) {
	if n == 0 {
		return
	}
	sp := s.Spec(f)
	bytes := layout.ElementSize(int(sp.KeyLen), int(sp.DataLen))
	if s == layout.ServiceIPs || s == layout.NodePorts || s == layout.StickyEndpoints {
		bytes += layout.CommentSize(40)
	}
	w.lists[index(f)].add[s].Grow(n * bytes)
}

// Add encodes a transaction, which becomes part of the batch.
func (w *Writer) Add(tx *model.Tx) {
	for i := range tx.Objects {
		w.object(&tx.Objects[i])
	}
	for i := range tx.Edits {
		w.edit(&tx.Edits[i])
	}
}

// edit encodes an element.
func (w *Writer) edit(e *model.Edit) {
	lists := &w.lists[index(e.Family)]
	l := list{&lists.add[e.Set], e.Family, e.Set, false}
	if e.Deletion {
		l = list{&lists.remove[e.Set], e.Family, e.Set, true}
	}
	if l.Count() == 0 {
		w.touched = append(w.touched, l)
	}
	switch {
	case e.Set.Interval():
		l.AddInterval(e.Key.Bytes(), e.Data.Bytes())
	case e.Set.Concat():
		last, data := e.End()
		if e.Deletion {
			data = layout.Octets{}
		}
		l.AddRange(e.Key.Bytes(), last.Bytes(), data.Bytes(), e.Text)
	case e.Deletion:
		l.Add(e.Key.Bytes(), nil, "")
	case e.Set.Verdicts():
		l.AddVerdict(e.Key.Bytes(), e.Text)
	case e.Timeout != 0:
		l.AddTimed(e.Key.Bytes(), e.Data.Bytes(), milliseconds(e.Timeout), milliseconds(e.Left))
	default:
		l.Add(e.Key.Bytes(), e.Data.Bytes(), e.Text)
	}
}

// milliseconds returns the kernel's encoding of a time.
func milliseconds(d time.Duration) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(d.Milliseconds()))
}

// Finish returns the batch. The caller must not add to it afterwards.
func (w *Writer) Finish() (*Batch, error) {
	size := 0
	for _, l := range w.touched {
		size += l.Size() + model.MessageSize
	}
	w.batch.Grow(size + size/(50<<10)*model.MessageSize + model.MessageSize)
	for _, l := range w.touched {
		if l.deletion {
			w.DeleteElements(l.family, l.set, l.Elements)
		}
	}
	for _, l := range w.touched {
		if !l.deletion {
			w.AddElements(l.family, l.set, true, l.Elements)
		}
	}
	return &w.batch, w.err
}

// Commit commits the batch.
func (w *Writer) Commit(conn *Conn) error {
	batch, err := w.Finish()
	if err != nil {
		return err
	}
	return conn.Commit(batch)
}

// AddElements encodes elements now, instead of with the others in Finish. If they are exclusive,
// none may exist.
func (w *Writer) AddElements(f tracker.Family, s layout.Set, exclusive bool, list *Elements) {
	flags := uint16(unix.NLM_F_CREATE)
	if exclusive {
		flags |= unix.NLM_F_EXCL
	}
	w.batch.NoteOf("add elements to ", s)
	w.batch.Elements(unix.NFT_MSG_NEWSETELEM, flags, inet.AF(f), w.Table, s.Name(), list)
}

// DeleteElements encodes deletions of elements now, instead of with the others in Finish.
func (w *Writer) DeleteElements(f tracker.Family, s layout.Set, list *Elements) {
	w.batch.NoteOf("delete elements of ", s)
	w.batch.Elements(unix.NFT_MSG_DELSETELEM, 0, inet.AF(f), w.Table, s.Name(), list)
}

// index returns the index of a family in an array.
func index(f tracker.Family) int {
	if f == tracker.IPv6 {
		return 1
	}
	return 0
}

// object encodes the creation or deletion of an object.
func (w *Writer) object(o *model.Object) {
	f := o.Family
	switch o.Kind {
	case model.CreateTable:
		w.newTable(f, 0)
	case model.CreateNewTable:
		w.newTable(f, unix.NLM_F_EXCL)
	case model.DeleteTable:
		w.open("delete table "+w.Table, unix.NFT_MSG_DELTABLE, 0, f)
		w.batch.End()
	case model.DeleteRules:
		w.open("delete rules", unix.NFT_MSG_DELRULE, 0, f)
		w.batch.End()
	case model.NewSet:
		w.newSet(f, o.Set, o.Size)
	case model.DeleteSet:
		w.delete("set", unix.NFT_MSG_DELSET, unix.NFTA_SET_NAME, f, o.Name)
	case model.NewFlowtable:
		w.newFlowtable(f)
	case model.DeleteFlowtable:
		w.delete("flowtable", unix.NFT_MSG_DELFLOWTABLE, flowtableAttrName, f, o.Name)
	case model.AddDevices:
		w.devices("add interfaces to flowtable "+layout.FastPath, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, f, o.Names)
	case model.DeleteDevices:
		w.devices("delete interfaces of flowtable "+layout.FastPath, unix.NFT_MSG_DELFLOWTABLE, 0, f, o.Names)
	case model.SourceRule:
		// The rule comes before the others of the chain.
		w.rule(f, layout.ChainFirewallCheck, o.Size, 0, w.rules[index(f)].allowedSource(o.Size))
	case model.UseRanges, model.UnuseRanges:
		for _, c := range w.rules[index(f)].chainsOf(o) {
			w.open("delete rules of chain "+c.name, unix.NFT_MSG_DELRULE, 0, f)
			w.batch.String(unix.NFTA_RULE_CHAIN, c.name)
			w.batch.End()
			w.chain(f, c.name, c.base, c.rules)
		}
	case model.DeleteChain:
		w.delete("chain", unix.NFT_MSG_DELCHAIN, unix.NFTA_CHAIN_NAME, f, o.Name)
	default:
		for _, c := range w.rules[index(f)].chainsOf(o) {
			w.chain(f, c.name, c.base, c.rules)
		}
	}
}

// tableAttr is the attribute with the name of the table, of a table itself (NFTA_TABLE_NAME) and
// of every object in it (NFTA_CHAIN_TABLE, NFTA_SET_TABLE and others).
const tableAttr = unix.NFTA_TABLE_NAME

// open begins a message about the table or an object in it. what labels the message in errors.
func (w *Writer) open(what string, typ, flags uint16, f tracker.Family) {
	w.batch.Note(what)
	w.batch.Begin(typ, flags, inet.AF(f))
	w.batch.String(tableAttr, w.Table)
}

// delete deletes an object of a kind. nameAttr is the attribute with its name.
func (w *Writer) delete(kind string, typ, nameAttr uint16, f tracker.Family, name string) {
	w.open("delete "+kind+" "+name, typ, 0, f)
	w.batch.String(nameAttr, name)
	w.batch.End()
}

// newTable creates the family's table. With unix.NLM_F_EXCL the table must not exist.
func (w *Writer) newTable(f tracker.Family, flags uint16) {
	w.open("create table "+w.Table, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|flags, f)
	w.batch.End()
}

// newSet creates a set for at most size elements, or for any number if size is 0. The kernel
// needs an ID of the set within the transaction, but rules use the name.
func (w *Writer) newSet(f tracker.Family, s layout.Set, size int) {
	sp := s.Spec(f)
	w.open("create set "+s.Name(), unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, f)
	w.batch.String(unix.NFTA_SET_NAME, s.Name())
	w.batch.Uint32(unix.NFTA_SET_ID, uint32(s)+1)
	w.batch.Uint32(unix.NFTA_SET_FLAGS, sp.Flags)
	w.batch.Uint32(unix.NFTA_SET_KEY_TYPE, sp.KeyType)
	w.batch.Uint32(unix.NFTA_SET_KEY_LEN, sp.KeyLen)
	if sp.Flags&unix.NFT_SET_MAP != 0 {
		w.batch.Uint32(unix.NFTA_SET_DATA_TYPE, sp.DataType)
		w.batch.Uint32(unix.NFTA_SET_DATA_LEN, sp.DataLen)
	}
	if orders := sp.ByteOrders(); orders != nil {
		w.batch.Bytes(unix.NFTA_SET_USERDATA, orders)
	}
	if sp.Fields != nil {
		w.batch.Nest(unix.NFTA_SET_DESC)
		w.batch.Nest(setDescConcat)
		for _, length := range sp.Fields {
			w.batch.Nest(unix.NFTA_LIST_ELEM)
			w.batch.Uint32(setFieldLen, length)
			w.batch.Unnest()
		}
		w.batch.Unnest()
		w.batch.Unnest()
	}
	if size != 0 {
		w.batch.Nest(unix.NFTA_SET_DESC)
		w.batch.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(size))
		w.batch.Unnest()
	}
	w.batch.End()
}

// Attributes that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h:
// NFTA_SET_DESC_CONCAT and NFTA_SET_FIELD_LEN).
const (
	setDescConcat = 2
	setFieldLen   = 1
)

// BaseChain is the hook of a base chain.
type BaseChain struct {
	typ      string
	hook     uint32
	priority int32
}

// chain creates a chain with rules and the hook base, nil for no hook.
func (w *Writer) chain(f tracker.Family, name string, base *BaseChain, rules []rule) {
	w.open("create chain "+name, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, f)
	w.batch.String(unix.NFTA_CHAIN_NAME, name)
	if base != nil {
		w.batch.Nest(unix.NFTA_CHAIN_HOOK)
		w.batch.Uint32(unix.NFTA_HOOK_HOOKNUM, base.hook)
		w.batch.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(base.priority))
		w.batch.Unnest()
		w.batch.String(unix.NFTA_CHAIN_TYPE, base.typ)
	}
	w.batch.End()
	for i, r := range rules {
		w.rule(f, name, i, unix.NLM_F_APPEND, r)
	}
}

// rule adds a rule to a chain: at its end with unix.NLM_F_APPEND, otherwise at its beginning.
// number, from 0, identifies the rule in errors.
func (w *Writer) rule(f tracker.Family, chain string, number int, flags uint16, r rule) {
	w.open("add rule "+strconv.Itoa(number+1)+" of chain "+chain, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, f)
	w.batch.String(unix.NFTA_RULE_CHAIN, chain)
	w.batch.Nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, p := range r {
		data, err := p(inet.AF(f))
		if err != nil && w.err == nil {
			w.err = err
		}
		w.batch.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, data)
	}
	w.batch.Unnest()
	w.batch.End()
}
