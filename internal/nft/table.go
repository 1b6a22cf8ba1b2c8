//go:build linux

package nft

import (
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Batch is one transaction that is being written. Reset begins it.
type Batch struct {
	nfnl.Batch
	// sets is the number of sets in the batch that have an ID of newID.
	sets uint32
}

// Reset empties b and begins a transaction.
func (b *Batch) Reset() {
	b.Batch.Reset()
	b.sets = 0
}

// Table writes messages about a table and its objects to a transaction.
type Table struct {
	*Batch
	Family byte // NFPROTO_*
	Name   string
}

// tableAttr is the attribute with the name of the table, of a table itself (NFTA_TABLE_NAME) and
// of every object in it (NFTA_CHAIN_TABLE, NFTA_SET_TABLE and others).
const tableAttr = unix.NFTA_TABLE_NAME

// open begins a message about the table or an object in it. what labels the message in errors.
func (t Table) open(what string, typ, flags uint16) {
	t.Note(what)
	t.Begin(typ, flags, t.Family)
	t.String(tableAttr, t.Name)
}

// Create creates the table if it is missing. With flags unix.NLM_F_EXCL it must not exist.
func (t Table) Create(flags uint16) {
	t.open("create table "+t.Name, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|flags)
	t.End()
}

// Delete deletes the table with its contents. The kernel refuses to delete a missing table.
func (t Table) Delete() {
	t.open("delete table "+t.Name, unix.NFT_MSG_DELTABLE, 0)
	t.End()
}

// DeleteSet deletes a set or map.
func (t Table) DeleteSet(name string) {
	t.delete("set", unix.NFT_MSG_DELSET, unix.NFTA_SET_NAME, name)
}

// DeleteChain deletes a chain with its rules.
func (t Table) DeleteChain(name string) {
	t.delete("chain", unix.NFT_MSG_DELCHAIN, unix.NFTA_CHAIN_NAME, name)
}

// delete deletes an object of a kind. nameAttr is the attribute with its name.
func (t Table) delete(kind string, typ, nameAttr uint16, name string) {
	t.open("delete "+kind+" "+name, typ, 0)
	t.String(nameAttr, name)
	t.End()
}

// newID returns an ID for a set of the transaction. It is greater than the IDs of the callers of CreateSet.
func (b *Batch) newID() uint32 {
	b.sets++
	return 1<<16 + b.sets
}

// CreateSet creates a set for at most size elements, or for any number if size is 0. The kernel needs an ID of the
// set that is unique in the transaction, from 1 to 65,536, but rules use the name. userData, which only the nft tool
// reads, may be nil.
func (t Table) CreateSet(name string, id uint32, s Spec, userData []byte, size int) {
	t.beginSet(name, id, s)
	if s.Flags&unix.NFT_SET_MAP != 0 {
		t.Uint32(unix.NFTA_SET_DATA_TYPE, s.DataType)
		t.Uint32(unix.NFTA_SET_DATA_LEN, s.DataLen)
	}
	if userData != nil {
		t.Bytes(unix.NFTA_SET_USERDATA, userData)
	}
	if size != 0 {
		t.Nest(unix.NFTA_SET_DESC)
		t.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(size))
		t.Unnest()
	}
	t.End()
}

func (t Table) beginSet(name string, id uint32, s Spec) {
	t.open("create set "+name, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE)
	t.String(unix.NFTA_SET_NAME, name)
	t.Uint32(unix.NFTA_SET_ID, id)
	t.Uint32(unix.NFTA_SET_FLAGS, s.Flags)
	t.Uint32(unix.NFTA_SET_KEY_TYPE, s.KeyType)
	t.Uint32(unix.NFTA_SET_KEY_LEN, s.KeyLen)
}

// CreateChain creates a chain with the hook base, nil for no hook, if it is missing.
func (t Table) CreateChain(name string, base *BaseChain) {
	t.open("create chain "+name, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	t.String(unix.NFTA_CHAIN_NAME, name)
	if base != nil {
		t.Nest(unix.NFTA_CHAIN_HOOK)
		t.Uint32(unix.NFTA_HOOK_HOOKNUM, base.Hook)
		t.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(base.Priority))
		t.Unnest()
		t.String(unix.NFTA_CHAIN_TYPE, base.Type)
	}
	t.End()
}

// DeleteRules deletes the rules of all chains.
func (t Table) DeleteRules() {
	t.open("delete rules", unix.NFT_MSG_DELRULE, 0)
	t.End()
}

// Rule adds a rule in the syntax of nft to a chain: at its end with flags unix.NLM_F_APPEND, otherwise at its
// beginning. number, from 0, identifies the rule in errors. It writes nothing if the rule does not compile.
func (t Table) Rule(chain string, number int, flags uint16, rule string) error {
	exprs, err := Compile(t.Family, rule, t.protocols)
	if err != nil {
		return err
	}
	t.open("add rule "+strconv.Itoa(number+1)+" of chain "+chain, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags)
	t.String(unix.NFTA_RULE_CHAIN, chain)
	t.Nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, data := range exprs {
		t.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, data)
	}
	t.Unnest()
	t.End()
	return nil
}

// anonymousSet is the name of an anonymous set in a message (nft_set_add of the nft tool). The kernel
// replaces "%d" by a number.
const anonymousSet = "__set%d"

var serviceProtocols = [...]byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}

// protocols creates an anonymous set of the protocols of Services for the rule that comes next, and
// returns its ID in the transaction.
func (t Table) protocols() uint32 {
	id := t.newID()
	set := Spec{Flags: unix.NFT_SET_ANONYMOUS | unix.NFT_SET_CONSTANT, KeyType: TypeProto, KeyLen: 1}
	t.CreateSet(anonymousSet, id, set, nil, len(serviceProtocols))
	t.Begin(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, t.Family)
	t.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
	t.String(unix.NFTA_SET_ELEM_LIST_SET, anonymousSet)
	t.Uint32(unix.NFTA_SET_ELEM_LIST_SET_ID, id)
	list := Elements{}
	for _, p := range serviceProtocols {
		list.Add([]byte{p}, nil, "")
	}
	t.Bytes(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, list.buf)
	t.End()
	return id
}

// maxMessage bounds one message of set elements: the length of the attribute
// that holds them is 16 bits.
const maxMessage = 60 << 10

// Elements appends the messages that add (NFT_MSG_NEWSETELEM) or delete
// (NFT_MSG_DELSETELEM) the elements of one set that e holds.
func (b *Batch) Elements(typ, flags uint16, family byte, table, set string, e *Elements) {
	for part := range e.Parts(maxMessage) {
		b.Begin(typ, flags, family)
		b.String(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		b.String(unix.NFTA_SET_ELEM_LIST_SET, set)
		b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		b.Encoded(part.buf)
		b.Unnest()
		b.End()
	}
}
