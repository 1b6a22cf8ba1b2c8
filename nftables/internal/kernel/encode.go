//go:build linux

package kernel

import (
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// Writer encodes transactions as one batch: objects in their order, then the elements to delete and
// the elements to add. It keeps its memory from one batch to the next.
type Writer struct {
	Lists
	table string
	rules [2]Rules
	batch Batch
	// anonymous is the number of anonymous sets in the batch.
	anonymous uint32
	finished  bool
	err       error
}

// NewWriter returns a Writer for tables of a name. rules renders the chains of the families' tables.
func NewWriter(table string, rules ...Rules) *Writer {
	w := &Writer{table: table}
	for _, r := range rules {
		w.rules[index(r.Family)] = r
	}
	w.Reset()
	return w
}

// Reset empties the writer.
func (w *Writer) Reset() {
	w.batch.Reset()
	w.Lists.Reset()
	w.anonymous, w.finished, w.err = 0, false, nil
}

// Use makes what is encoded from now on be about tables of another name.
func (w *Writer) Use(table string) { w.table = table }

// Empty reports whether nothing was added.
func (w *Writer) Empty() bool { return w.Lists.Empty() && w.batch.Empty() }

// Add encodes a transaction, which becomes part of the batch.
func (w *Writer) Add(tx *model.Tx) {
	for i := range tx.Objects {
		w.object(&tx.Objects[i])
	}
	for i := range tx.Edits {
		w.Edit(&tx.Edits[i])
	}
}

// Finish encodes the elements that Add got. What is added afterwards must be objects.
func (w *Writer) Finish() error {
	w.batch.Grow(w.Size())
	w.Each(func(f tracker.Family, s layout.Set, deletion bool, list *Elements) {
		if deletion {
			w.DeleteElements(f, s, list)
		} else {
			w.addElements(f, s, unix.NLM_F_EXCL, list)
		}
	})
	w.finished = true
	return w.err
}

// Commit commits the batch. It calls Finish, unless that was called.
func (w *Writer) Commit(conn *Conn) error {
	if !w.finished {
		if err := w.Finish(); err != nil {
			return err
		}
	}
	return conn.Commit(&w.batch)
}

// AddElements encodes elements now, instead of with the others in Finish. Elements that exist stay as
// they are.
func (w *Writer) AddElements(f tracker.Family, s layout.Set, list *Elements) {
	w.addElements(f, s, 0, list)
}

// addElements encodes elements. With unix.NLM_F_EXCL, none may exist.
func (w *Writer) addElements(f tracker.Family, s layout.Set, flags uint16, list *Elements) {
	w.batch.NoteOf("add elements to ", s)
	w.batch.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|flags, inet.AF(f), w.table, s.Name(), list)
}

// DeleteElements encodes deletions of elements now, instead of with the others in Finish.
func (w *Writer) DeleteElements(f tracker.Family, s layout.Set, list *Elements) {
	w.batch.NoteOf("delete elements of ", s)
	w.batch.Elements(unix.NFT_MSG_DELSETELEM, 0, inet.AF(f), w.table, s.Name(), list)
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
		w.open("delete table "+w.table, unix.NFT_MSG_DELTABLE, 0, f)
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
		w.rule(f, layout.ChainFirewallCheck, o.Size, 0, w.rules[index(f)].SourceRule(o))
	case model.DeleteChain:
		w.delete("chain", unix.NFT_MSG_DELCHAIN, unix.NFTA_CHAIN_NAME, f, o.Name)
	default:
		for _, c := range w.rules[index(f)].Chains(o) {
			w.chain(f, c.Name, c.Base, c.Rules)
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
	w.batch.String(tableAttr, w.table)
}

// delete deletes an object of a kind. nameAttr is the attribute with its name.
func (w *Writer) delete(kind string, typ, nameAttr uint16, f tracker.Family, name string) {
	w.open("delete "+kind+" "+name, typ, 0, f)
	w.batch.String(nameAttr, name)
	w.batch.End()
}

// newTable creates the family's table. With unix.NLM_F_EXCL the table must not exist.
func (w *Writer) newTable(f tracker.Family, flags uint16) {
	w.open("create table "+w.table, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|flags, f)
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
	if udata := s.UserData(f); udata != nil {
		w.batch.Bytes(unix.NFTA_SET_USERDATA, udata)
	}
	if size != 0 {
		w.batch.Nest(unix.NFTA_SET_DESC)
		w.batch.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(size))
		w.batch.Unnest()
	}
	w.batch.End()
}

// chain creates a chain with rules and the hook base, nil for no hook.
func (w *Writer) chain(f tracker.Family, name string, base *BaseChain, rules []string) {
	w.open("create chain "+name, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, f)
	w.batch.String(unix.NFTA_CHAIN_NAME, name)
	if base != nil {
		w.batch.Nest(unix.NFTA_CHAIN_HOOK)
		w.batch.Uint32(unix.NFTA_HOOK_HOOKNUM, base.Hook)
		w.batch.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(base.Priority))
		w.batch.Unnest()
		w.batch.String(unix.NFTA_CHAIN_TYPE, base.Type)
	}
	w.batch.End()
	for i, r := range rules {
		w.rule(f, name, i, unix.NLM_F_APPEND, r)
	}
}

// anonymousSet is the name of an anonymous set in a message (nft_set_add of the nft tool). The kernel
// replaces "%d" by a number.
const anonymousSet = "__set%d"

// firstAnonymous is greater than the IDs of named sets.
const firstAnonymous = 1 << 16

// protocols creates an anonymous set of the protocols of Services for the rule that comes next, and
// returns its ID in the transaction.
func (w *Writer) protocols(f tracker.Family) uint32 {
	const protocol, length = 12, 1 // the tool's inet_proto
	id := firstAnonymous + w.anonymous
	w.anonymous++
	w.open("create set of protocols", unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, f)
	w.batch.String(unix.NFTA_SET_NAME, anonymousSet)
	w.batch.Uint32(unix.NFTA_SET_ID, id)
	w.batch.Uint32(unix.NFTA_SET_FLAGS, unix.NFT_SET_ANONYMOUS|unix.NFT_SET_CONSTANT)
	w.batch.Uint32(unix.NFTA_SET_KEY_TYPE, protocol)
	w.batch.Uint32(unix.NFTA_SET_KEY_LEN, length)
	w.batch.Nest(unix.NFTA_SET_DESC)
	w.batch.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(len(serviceProtocols)))
	w.batch.Unnest()
	w.batch.End()
	w.batch.Begin(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, inet.AF(f))
	w.batch.String(unix.NFTA_SET_ELEM_LIST_TABLE, w.table)
	w.batch.String(unix.NFTA_SET_ELEM_LIST_SET, anonymousSet)
	w.batch.Uint32(unix.NFTA_SET_ELEM_LIST_SET_ID, id)
	list := Elements{}
	for _, p := range serviceProtocols {
		list.Add([]byte{p}, nil, "")
	}
	w.batch.Bytes(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, list.buf)
	w.batch.End()
	return id
}

// serviceProtocols are the protocols that a Service can have.
var serviceProtocols = [...]byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}

// rule adds a rule to a chain: at its end with unix.NLM_F_APPEND, otherwise at its beginning.
// number, from 0, identifies the rule in errors.
func (w *Writer) rule(f tracker.Family, chain string, number int, flags uint16, rule string) {
	exprs, err := compile(f, rule, func() uint32 { return w.protocols(f) })
	if err != nil && w.err == nil {
		w.err = err
	}
	w.open("add rule "+strconv.Itoa(number+1)+" of chain "+chain, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, f)
	w.batch.String(unix.NFTA_RULE_CHAIN, chain)
	w.batch.Nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, data := range exprs {
		w.batch.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, data)
	}
	w.batch.Unnest()
	w.batch.End()
}
