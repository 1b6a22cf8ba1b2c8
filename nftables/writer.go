//go:build linux

package nftables

import (
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/tracker"
)

// writer encodes one transaction: tables, chains, rules and sets in the order of the calls,
// then the elements to delete and the elements to add. It keeps its memory from one transaction
// to the next.
type writer struct {
	table string
	batch nlbatch.Batch
	lists [2]struct{ add, remove [setCount]nlbatch.Elements }
	// touched holds the lists that have elements.
	touched []list
	// written counts the elements written so far, and pending those since begin.
	written, pending int
	// structural is set if the transaction changes more than elements of large sets. The caller
	// resets it.
	structural bool
	err        error
}

// list holds the elements to add to a set or to delete from it.
type list struct {
	*nlbatch.Elements
	family   tracker.Family
	set      set
	deletion bool
}

func newWriter(table string) *writer {
	w := &writer{table: table}
	w.begin()
	return w
}

// begin empties the writer and starts a transaction.
func (w *writer) begin() {
	w.batch.Reset()
	for _, l := range w.touched {
		l.Reset()
	}
	w.pending, w.touched, w.err = 0, w.touched[:0], nil
}

// size returns the number of bytes of the transaction so far, or a little more.
func (w *writer) size() int {
	size := 0
	for _, l := range w.touched {
		size += l.Size() + messageSize
	}
	// A message has at most 60 kB of elements.
	return w.batch.Len() + size + size/(50<<10)*messageSize + 2*messageSize
}

// empty reports whether nothing was written.
func (w *writer) empty() bool { return w.pending == 0 && w.batch.Empty() }

// messageSize is an upper bound of a message's bytes without its elements.
const messageSize = 160

// finish returns the transaction. The caller must not add to it afterwards.
func (w *writer) finish() (*nlbatch.Batch, error) {
	w.batch.Grow(w.size() - w.batch.Len())
	for _, l := range w.touched {
		if l.deletion {
			w.deleteElements(l.family, l.set, l.Elements)
		}
	}
	for _, l := range w.touched {
		if !l.deletion {
			w.addElements(l.family, l.set, unix.NLM_F_EXCL, l.Elements)
		}
	}
	return &w.batch, w.err
}

// commit commits the transaction.
func (w *writer) commit(conn *nlbatch.Conn) error {
	batch, err := w.finish()
	if err != nil {
		return err
	}
	return conn.Commit(batch)
}

// addElements adds elements at once.
func (w *writer) addElements(f tracker.Family, s set, flags uint16, list *nlbatch.Elements) {
	w.batch.Note("add elements to " + s.name())
	w.batch.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|flags, inet.AF(f), w.table, s.name(), list)
}

// deleteElements deletes elements at once.
func (w *writer) deleteElements(f tracker.Family, s set, list *nlbatch.Elements) {
	w.batch.Note("delete elements of " + s.name())
	w.batch.Elements(unix.NFT_MSG_DELSETELEM, 0, inet.AF(f), w.table, s.name(), list)
}

// adds and removes return the list of elements to add to a set or to delete from it. The caller
// appends one element.
func (w *writer) adds(f tracker.Family, s set) *nlbatch.Elements {
	return w.touch(list{&w.lists[index(f)].add[s], f, s, false})
}

func (w *writer) removes(f tracker.Family, s set) *nlbatch.Elements {
	return w.touch(list{&w.lists[index(f)].remove[s], f, s, true})
}

func (w *writer) touch(l list) *nlbatch.Elements {
	if l.Count() == 0 {
		w.touched = append(w.touched, l)
	}
	w.written++
	w.pending++
	return l.Elements
}

// add adds an element with a comment, "" for none.
func (w *writer) add(f tracker.Family, e *element, comment string) {
	w.adds(f, e.set).Add(e.key.bytes(), e.data.bytes(), comment)
}

// remove deletes the element with e's key.
func (w *writer) remove(f tracker.Family, e *element) {
	w.removes(f, e.set).Add(e.key.bytes(), nil, "")
}

// expect makes room for the given number of bytes of elements.
func (w *writer) expect(f tracker.Family, s set, bytes int) {
	w.lists[index(f)].add[s].Grow(bytes)
}

// index returns the index of a family in an array.
func index(f tracker.Family) int {
	if f == tracker.IPv6 {
		return 1
	}
	return 0
}

// tableAttr is the attribute with the name of the table, of a table itself (NFTA_TABLE_NAME) and
// of every object in it (NFTA_CHAIN_TABLE, NFTA_SET_TABLE and others).
const tableAttr = unix.NFTA_TABLE_NAME

// open begins a message about the table or an object in it. what labels the message in errors.
func (w *writer) open(what string, typ, flags uint16, f tracker.Family) {
	w.batch.Note(what)
	w.batch.Begin(typ, flags, inet.AF(f))
	w.batch.String(tableAttr, w.table)
}

// delete deletes an object of a kind. nameAttr is the attribute with its name.
func (w *writer) delete(kind string, typ, nameAttr uint16, f tracker.Family, name string) {
	w.open("delete "+kind+" "+name, typ, 0, f)
	w.batch.String(nameAttr, name)
	w.batch.End()
}

// newTable creates the family's table. With unix.NLM_F_EXCL the table must not exist.
func (w *writer) newTable(f tracker.Family, flags uint16) {
	w.open("create table "+w.table, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|flags, f)
	w.batch.End()
}

func (w *writer) deleteTable(f tracker.Family) {
	w.open("delete table "+w.table, unix.NFT_MSG_DELTABLE, 0, f)
	w.batch.End()
}

// newSet creates a set for at most size elements, or for any number if size is 0. The kernel
// needs an ID of the set within the transaction, but rules use the name.
func (w *writer) newSet(f tracker.Family, s set, size int) {
	w.structural = true
	sp := s.spec(f)
	w.open("create set "+s.name(), unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, f)
	w.batch.String(unix.NFTA_SET_NAME, s.name())
	w.batch.Uint32(unix.NFTA_SET_ID, uint32(s)+1)
	w.batch.Uint32(unix.NFTA_SET_FLAGS, sp.flags)
	w.batch.Uint32(unix.NFTA_SET_KEY_TYPE, sp.keyType)
	w.batch.Uint32(unix.NFTA_SET_KEY_LEN, sp.keyLen)
	if sp.flags&unix.NFT_SET_MAP != 0 {
		w.batch.Uint32(unix.NFTA_SET_DATA_TYPE, sp.dataType)
		w.batch.Uint32(unix.NFTA_SET_DATA_LEN, sp.dataLen)
	}
	if orders := sp.byteOrders(); orders != nil {
		w.batch.Bytes(unix.NFTA_SET_USERDATA, orders)
	}
	if size != 0 {
		w.batch.Nest(unix.NFTA_SET_DESC)
		w.batch.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(size))
		w.batch.Unnest()
	}
	w.batch.End()
}

// baseChain is the hook of a base chain.
type baseChain struct {
	typ      string
	hook     uint32
	priority int32
}

// chain creates a chain with rules and the hook base, nil for no hook.
func (w *writer) chain(f tracker.Family, name string, base *baseChain, rules []rule) {
	w.structural = true
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
func (w *writer) rule(f tracker.Family, chain string, number int, flags uint16, r rule) {
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

// deleteRules deletes the rules of all of the table's chains.
func (w *writer) deleteRules(f tracker.Family) {
	w.open("delete rules", unix.NFT_MSG_DELRULE, 0, f)
	w.batch.End()
}
