package nfnl

import "golang.org/x/sys/unix"

// Table writes messages about a table and its objects to a transaction.
type Table struct {
	*Batch
	Family byte // NFPROTO_*
	Name   string
}

// open begins a message. Every type of message has the table's name in the same attribute.
func (t Table) open(what string, typ, flags uint16) {
	t.Note(what)
	t.Begin(typ, flags, t.Family)
	t.String(unix.NFTA_TABLE_NAME, t.Name)
}

// Create creates the table if it is missing.
func (t Table) Create() {
	t.open("create table "+t.Name, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	t.End()
}

// Delete deletes the table with its contents. A missing table is refused.
func (t Table) Delete() {
	t.open("delete table "+t.Name, unix.NFT_MSG_DELTABLE, 0)
	t.End()
}

// Hook is the hook of a base chain.
type Hook struct {
	Type     string // "filter", "nat" or "route"
	Number   uint32 // NF_INET_*
	Priority int32
}

// Chain creates a base chain if it is missing.
func (t Table) Chain(name string, h Hook) {
	t.open("create chain "+name, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	t.String(unix.NFTA_CHAIN_NAME, name)
	t.Nest(unix.NFTA_CHAIN_HOOK)
	t.Uint32(unix.NFTA_HOOK_HOOKNUM, h.Number)
	t.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority))
	t.Unnest()
	t.String(unix.NFTA_CHAIN_TYPE, h.Type)
	t.End()
}

// Flush deletes the rules of a chain.
func (t Table) Flush(chain string) {
	t.open("flush chain "+chain, unix.NFT_MSG_DELRULE, 0)
	t.String(unix.NFTA_RULE_CHAIN, chain)
	t.End()
}

// Rule appends a rule of encoded expressions to a chain.
func (t Table) Rule(chain string, expressions [][]byte) {
	t.open("add a rule to chain "+chain, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
	t.String(unix.NFTA_RULE_CHAIN, chain)
	t.Nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, e := range expressions {
		t.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, e)
	}
	t.Unnest()
	t.End()
}
