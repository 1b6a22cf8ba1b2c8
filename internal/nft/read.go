//go:build linux

package nft

import (
	"context"
	"errors"
	"hash/fnv"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Attributes that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h): NFTA_TABLE_HANDLE, and NFTA_SET_COUNT,
// the number of a set's elements, since Linux 6.16.
const (
	tableAttrHandle = 4
	setAttrCount    = 20
)

// policyAccept is the policy of a base chain that lets packets pass (linux/netfilter.h,
// NF_ACCEPT).
const policyAccept = 1

// Table reads a table without its contents.
func (c *Conn) Table(name string, family byte) (head Head, err error) {
	request := nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, name)
	err = c.Get(unix.NFT_MSG_GETTABLE, family, false, request, func(attrs []byte) error {
		a := parse(attrs)
		head = Head{Exists: true, Flags: a.number(unix.NFTA_TABLE_FLAGS), Handle: nfnl.Uint64(a[tableAttrHandle])}
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return Head{}, nil
	}
	return head, err
}

// dump calls fn with each of the table's objects of one type, and begin before each attempt. The library is several
// times slower and does not report dumps that a change interrupted.
func (c *Conn) dump(table string, family byte, typ uint16, begin func(), fn func(a *attributes)) error {
	request := nfnl.AppendString(nil, tableAttr, table)
	var a attributes
	return nfnl.Again(context.Background(), func() error {
		begin()
		return c.Get(typ, family, true, request, func(attrs []byte) error {
			// Some kernels ignore the request's table.
			if a = parse(attrs); a.text(tableAttr) == table {
				fn(&a)
			}
			return nil
		})
	})
}

// Chains returns the table's chains by name.
func (c *Conn) Chains(table string, family byte) (out map[string]Chain, err error) {
	begin := func() { out = map[string]Chain{} }
	err = c.dump(table, family, unix.NFT_MSG_GETCHAIN, begin, func(a *attributes) {
		chain := Chain{Accepts: a.number(unix.NFTA_CHAIN_POLICY) == policyAccept}
		if a[unix.NFTA_CHAIN_HOOK] != nil {
			hook := parse(a[unix.NFTA_CHAIN_HOOK])
			chain.Base = &BaseChain{
				Type: a.text(unix.NFTA_CHAIN_TYPE), Hook: hook.number(unix.NFTA_HOOK_HOOKNUM),
				Priority: int32(hook.number(unix.NFTA_HOOK_PRIORITY)),
			}
		}
		out[a.text(unix.NFTA_CHAIN_NAME)] = chain
	})
	return out, err
}

// Sets returns the table's named sets and maps by name. Anonymous sets are parts of rules.
func (c *Conn) Sets(table string, family byte) (out map[string]Set, err error) {
	begin := func() { out = map[string]Set{} }
	err = c.dump(table, family, unix.NFT_MSG_GETSET, begin, func(a *attributes) {
		if a.number(unix.NFTA_SET_FLAGS)&unix.NFT_SET_ANONYMOUS != 0 {
			return
		}
		desc := parse(a[unix.NFTA_SET_DESC])
		s := Set{Spec: Spec{
			Flags:   a.number(unix.NFTA_SET_FLAGS),
			KeyType: a.number(unix.NFTA_SET_KEY_TYPE), KeyLen: a.number(unix.NFTA_SET_KEY_LEN),
			DataType: a.number(unix.NFTA_SET_DATA_TYPE), DataLen: a.number(unix.NFTA_SET_DATA_LEN),
		}, Size: int(desc.number(unix.NFTA_SET_DESC_SIZE)), Count: -1}
		if a[setAttrCount] != nil {
			s.Count = int(a.number(setAttrCount))
		}
		out[a.text(unix.NFTA_SET_NAME)] = s
	})
	return out, err
}

// Rules returns the table's rules.
func (c *Conn) Rules(table string, family byte) (out []Rule, err error) {
	begin := func() { out = out[:0] }
	err = c.dump(table, family, unix.NFT_MSG_GETRULE, begin, func(a *attributes) {
		sum := fnv.New64a()
		sum.Write(a[unix.NFTA_RULE_EXPRESSIONS])
		out = append(out, Rule{nfnl.Uint64(a[unix.NFTA_RULE_HANDLE]), a.text(unix.NFTA_RULE_CHAIN), sum.Sum64()})
	})
	return out, err
}

// Elements calls fn with each element of a set. The element is valid only during the
// call. BenchmarkLibraryReadElements of package nftables compares Elements with the library.
func (c *Conn) Elements(table string, family byte, set string, fn func(Element)) error {
	request := nfnl.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, table)
	request = nfnl.AppendString(request, unix.NFTA_SET_ELEM_LIST_SET, set)
	return c.Get(unix.NFT_MSG_GETSETELEM, family, true, request, func(attrs []byte) error {
		a := parse(attrs)
		list := Elements{buf: a[unix.NFTA_SET_ELEM_LIST_ELEMENTS]}
		list.Each(fn)
		return nil
	})
}

// HasBaseChain reports whether the table exists and has the base chain of a name.
func (c *Conn) HasBaseChain(table string, family byte, chain string) (bool, error) {
	request := nfnl.AppendString(nil, unix.NFTA_CHAIN_TABLE, table)
	request = nfnl.AppendString(request, unix.NFTA_CHAIN_NAME, chain)
	err := c.Get(unix.NFT_MSG_GETCHAIN, family, false, request, func([]byte) error { return nil })
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}
