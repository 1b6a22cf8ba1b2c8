//go:build linux

package kernel

import (
	"errors"
	"hash/fnv"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// Attributes that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h):
// NFTA_TABLE_HANDLE, and NFTA_SET_COUNT, the number of a set's elements, which the kernel
// reports since Linux 6.16.
const (
	tableAttrHandle = 4
	setAttrCount    = 20
	// setElemAttrKeyEnd is NFTA_SET_ELEM_KEY_END.
	setElemAttrKeyEnd = 10
)

// policyAccept is the policy of a base chain that lets packets pass (linux/netfilter.h,
// NF_ACCEPT).
const policyAccept = 1

// Chain is a chain as the kernel has it.
type Chain struct {
	// Base is the hook of a base chain, nil for other chains.
	Base   *BaseChain
	policy uint32
}

// Is reports whether the chain has the hook want, nil for no hook, and accepts packets that its
// rules do not decide about.
func (c Chain) Is(want *BaseChain) bool {
	if c.Base == nil || want == nil {
		return c.Base == nil && want == nil
	}
	return *c.Base == *want && c.policy == policyAccept
}

// Set is a set or map as the kernel has it.
type Set struct {
	layout.Spec
	// Size is the largest number of elements, 0 for any. Count is the number of elements, -1 if
	// the kernel does not report it.
	Size, Count int
}

// Is reports whether the set has the attributes of want.
func (s Set) Is(want layout.Spec) bool {
	have := s.Spec
	if want.DataType == layout.DataVerdict {
		have.DataLen = want.DataLen // the kernel chooses it
	}
	return have.KeyType == want.KeyType && have.KeyLen == want.KeyLen &&
		have.DataType == want.DataType && have.DataLen == want.DataLen && have.Flags == want.Flags
}

// Rule identifies a rule by its handle, which is unique, and a hash of its expressions.
type Rule struct {
	Handle uint64
	Chain  string
	sum    uint64
}

// Head is a table in the kernel without its contents.
type Head struct {
	Exists bool
	Flags  uint32 // NFT_TABLE_F_*
	// Handle is larger than the handles of all older tables.
	Handle uint64
}

// attributes holds the attributes of one object by type. A missing attribute is nil.
type attributes [24][]byte

func parse(data []byte) (a attributes) {
	for typ, value := range nfnl.Attributes(data) {
		if int(typ) < len(a) {
			a[typ] = value
		}
	}
	return a
}

func (a *attributes) number(typ int) uint32 { return nfnl.Uint32(a[typ]) }
func (a *attributes) text(typ int) string   { return nfnl.String(a[typ]) }

// Table reads a table without its contents.
func (c *Conn) Table(name string, f tracker.Family) (head Head, err error) {
	request := nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, name)
	err = c.Get(unix.NFT_MSG_GETTABLE, inet.AF(f), false, request, func(attrs []byte) error {
		a := parse(attrs)
		head = Head{Exists: true, Flags: a.number(unix.NFTA_TABLE_FLAGS), Handle: nfnl.Uint64(a[tableAttrHandle])}
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return Head{}, nil
	}
	return head, err
}

// dump calls fn with each of the table's objects of one type, and begin before each attempt. The
// library is several times slower (BenchmarkLibraryList of package nftables) and does not report dumps that a change
// interrupted.
func (c *Conn) dump(table string, f tracker.Family, typ uint16, begin func(), fn func(a *attributes)) error {
	request := nfnl.AppendString(nil, tableAttr, table)
	var a attributes
	return Again(func() error {
		begin()
		return c.Get(typ, inet.AF(f), true, request, func(attrs []byte) error {
			// Some kernels ignore the request's table.
			if a = parse(attrs); a.text(tableAttr) == table {
				fn(&a)
			}
			return nil
		})
	})
}

// Chains returns the table's chains by name.
func (c *Conn) Chains(table string, f tracker.Family) (out map[string]Chain, err error) {
	begin := func() { out = map[string]Chain{} }
	err = c.dump(table, f, unix.NFT_MSG_GETCHAIN, begin, func(a *attributes) {
		chain := Chain{policy: a.number(unix.NFTA_CHAIN_POLICY)}
		if a[unix.NFTA_CHAIN_HOOK] != nil {
			hook := parse(a[unix.NFTA_CHAIN_HOOK])
			chain.Base = &BaseChain{
				typ: a.text(unix.NFTA_CHAIN_TYPE), hook: hook.number(unix.NFTA_HOOK_HOOKNUM),
				priority: int32(hook.number(unix.NFTA_HOOK_PRIORITY)),
			}
		}
		out[a.text(unix.NFTA_CHAIN_NAME)] = chain
	})
	return out, err
}

// Sets returns the table's sets and maps by name.
func (c *Conn) Sets(table string, f tracker.Family) (out map[string]Set, err error) {
	begin := func() { out = map[string]Set{} }
	err = c.dump(table, f, unix.NFT_MSG_GETSET, begin, func(a *attributes) {
		desc := parse(a[unix.NFTA_SET_DESC])
		s := Set{Spec: layout.Spec{
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
func (c *Conn) Rules(table string, f tracker.Family) (out []Rule, err error) {
	begin := func() { out = out[:0] }
	err = c.dump(table, f, unix.NFT_MSG_GETRULE, begin, func(a *attributes) {
		sum := fnv.New64a()
		sum.Write(a[unix.NFTA_RULE_EXPRESSIONS])
		out = append(out, Rule{nfnl.Uint64(a[unix.NFTA_RULE_HANDLE]), a.text(unix.NFTA_RULE_CHAIN), sum.Sum64()})
	})
	return out, err
}

// Element is an element of a set or map as the kernel has it.
type Element struct {
	Key, Data []byte
	// KeyEnd is the last key of a range of concatenations, nil for other elements.
	KeyEnd []byte
	// Verdict and Chain are set for an element of a verdict map.
	Verdict int32
	Chain   string
	Comment string
	// IntervalEnd marks the first address behind an interval.
	IntervalEnd bool
	// Expr is the element's expression, nil if it has none.
	Expr []byte
	// Timeout and Expiration are in the kernel's encoding, nil if the element has none.
	Timeout, Expiration []byte
}

// ReadAll calls fn with the elements of a set, and begin before each attempt.
func (c *Conn) ReadAll(table string, f tracker.Family, s layout.Set, begin func(), fn func(Element)) error {
	return Again(func() error {
		begin()
		return c.Elements(table, f, s, fn)
	})
}

// Packets returns the number of packets of an element with a counter.
func (e *Element) Packets() uint64 {
	counter := parse(e.Expr)
	values := parse(counter[unix.NFTA_EXPR_DATA])
	return nfnl.Uint64(values[unix.NFTA_COUNTER_PACKETS])
}

// Bytes returns the number of bytes of an element with a counter.
func (e *Element) Bytes() uint64 {
	counter := parse(e.Expr)
	values := parse(counter[unix.NFTA_EXPR_DATA])
	return nfnl.Uint64(values[unix.NFTA_COUNTER_BYTES])
}

// Elements calls fn with each element of a set. The element is valid only during the
// call. BenchmarkLibraryReadElements of package nftables compares Elements with the library.
func (c *Conn) Elements(table string, f tracker.Family, s layout.Set, fn func(Element)) error {
	request := nfnl.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, table)
	request = nfnl.AppendString(request, unix.NFTA_SET_ELEM_LIST_SET, s.Name())
	return c.Get(unix.NFT_MSG_GETSETELEM, inet.AF(f), true, request, func(attrs []byte) error {
		a := parse(attrs)
		for _, one := range nfnl.Attributes(a[unix.NFTA_SET_ELEM_LIST_ELEMENTS]) {
			fn(parseElement(one))
		}
		return nil
	})
}

func parseElement(attrs []byte) Element {
	a := parse(attrs)
	e := Element{
		Key: dataValue(a[unix.NFTA_SET_ELEM_KEY]), Data: dataValue(a[unix.NFTA_SET_ELEM_DATA]),
		KeyEnd:      dataValue(a[setElemAttrKeyEnd]),
		IntervalEnd: a.number(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0,
		Timeout:     a[unix.NFTA_SET_ELEM_TIMEOUT], Expiration: a[unix.NFTA_SET_ELEM_EXPIRATION],
		Expr:    a[unix.NFTA_SET_ELEM_EXPR],
		Comment: layout.Comment(a[unix.NFTA_SET_ELEM_USERDATA]),
	}
	if data := a[unix.NFTA_SET_ELEM_DATA]; data != nil && e.Data == nil {
		outer := parse(data)
		verdict := parse(outer[unix.NFTA_DATA_VERDICT])
		e.Verdict, e.Chain = int32(verdict.number(unix.NFTA_VERDICT_CODE)), verdict.text(unix.NFTA_VERDICT_CHAIN)
	}
	return e
}

// dataValue returns the value in a key or in data, or nil.
func dataValue(data []byte) (value []byte) {
	for typ, v := range nfnl.Attributes(data) {
		if typ == unix.NFTA_DATA_VALUE {
			value = v
		}
	}
	return value
}

// HasBaseChain reports whether the table exists and has the base chain of a name.
func (c *Conn) HasBaseChain(table string, f tracker.Family, chain string) (bool, error) {
	request := nfnl.AppendString(nil, unix.NFTA_CHAIN_TABLE, table)
	request = nfnl.AppendString(request, unix.NFTA_CHAIN_NAME, chain)
	err := c.Get(unix.NFT_MSG_GETCHAIN, inet.AF(f), false, request, func([]byte) error { return nil })
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// Again repeats a read while transactions of other processes interrupt it, at most ten times.
func Again(read func() error) (err error) {
	for range 10 {
		if err = read(); !errors.Is(err, nfnl.ErrInterrupted) {
			break
		}
	}
	return err
}

// IgnoreInterrupted returns nil if transactions of other processes interrupted every read, and
// err otherwise.
func IgnoreInterrupted(err error) error {
	if errors.Is(err, nfnl.ErrInterrupted) {
		return nil
	}
	return err
}
