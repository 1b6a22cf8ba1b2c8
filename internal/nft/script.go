//go:build linux

package nft

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Script adds commands in the syntax of nft to a transaction, each on a line of its own:
//
//	table FAMILY NAME
//	delete table FAMILY NAME
//	flush table FAMILY NAME
//
// and definitions of tables, with sets and base chains:
//
//	table FAMILY NAME {
//		set NAME {
//			type TYPE . TYPE
//			flags timeout
//		}
//		chain NAME {
//			type filter hook HOOK priority NUMBER; policy accept;
//			RULE
//		}
//	}
func (b *Batch) Script(text string) (err error) {
	var t Table
	var set, chain string
	var rules int
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		w := Words(strings.TrimSuffix(line, " {"))
		switch {
		case w.Accept("table"):
			t, err = b.table(&w)
			t.Create(0)
		case w.Accept("delete table"):
			t, err = b.table(&w)
			t.Delete()
		case w.Accept("flush table"):
			t, err = b.table(&w)
			t.DeleteRules()
		case w.Accept("set"):
			set = w.Next()
		case w.Accept("chain"):
			chain, rules = w.Next(), 0
		case line == "}":
			set, chain = "", ""
		case set != "" && w.Accept("type"):
			err = t.createSet(set, string(w))
		case set != "":
			if line != "flags timeout" { // createSet sets it
				err = errors.New("unknown attribute of a set")
			}
		case w.Begins("type "):
			var base *BaseChain
			base, err = ParseHook(line)
			t.CreateChain(chain, base)
		case line != "":
			err = t.Rule(chain, rules, unix.NLM_F_APPEND, line)
			rules++
		}
		if err != nil {
			return fmt.Errorf("cannot encode line %q: %w", line, err)
		}
	}
	return nil
}

// table reads the family and the name of a table.
func (b *Batch) table(w *Words) (Table, error) {
	family, ok := map[string]byte{"inet": unix.NFPROTO_INET, "ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6}[w.Next()]
	if !ok {
		return Table{Batch: b}, errors.New("unknown family")
	}
	return Table{Batch: b, Family: family, Name: w.Next()}, nil
}

// Attributes that golang.org/x/sys/unix lacks (include/uapi/linux/netfilter/nf_tables.h).
const (
	setConcat     = 0x80 // NFT_SET_CONCAT
	descConcat    = 2    // NFTA_SET_DESC_CONCAT
	descFieldSize = 1    // NFTA_SET_FIELD_LEN
)

// createSet creates a set of concatenated keys whose elements expire, as the tool does.
func (t Table) createSet(name, keys string) error {
	types, err := ParseTypes(keys)
	if err != nil {
		return err
	}
	typ, length := Concat(types...)
	t.beginSet(name, t.newID(), Spec{Flags: unix.NFT_SET_TIMEOUT | setConcat, KeyType: typ, KeyLen: length})
	t.Nest(unix.NFTA_SET_DESC)
	t.Nest(descConcat)
	for _, typ := range types {
		_, n := nameOf(typ)
		t.Nest(unix.NFTA_LIST_ELEM)
		t.Uint32(descFieldSize, uint32(n))
		t.Unnest()
	}
	t.Unnest()
	t.Unnest()
	t.End()
	return nil
}
