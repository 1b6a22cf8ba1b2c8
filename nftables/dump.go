//go:build linux

package nftables

import (
	"encoding/binary"
	"errors"
	"hash/fnv"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/tracker"
)

// Attributes that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h):
// NFTA_TABLE_HANDLE, and NFTA_SET_COUNT, the number of a set's elements, which the kernel
// reports since Linux 6.16.
const (
	tableAttrHandle = 4
	setAttrCount    = 20
)

// policyAccept is the policy of a base chain that lets packets pass (linux/netfilter.h,
// NF_ACCEPT).
const policyAccept = 1

// kernelChain is a chain as the kernel has it.
type kernelChain struct {
	// base is the hook of a base chain, nil for other chains.
	base   *baseChain
	policy uint32
}

// is reports whether the chain has the hook want, nil for no hook, and accepts packets that its
// rules do not decide about.
func (c kernelChain) is(want *baseChain) bool {
	if c.base == nil || want == nil {
		return c.base == nil && want == nil
	}
	return *c.base == *want && c.policy == policyAccept
}

// kernelSet is a set or map as the kernel has it.
type kernelSet struct {
	spec
	// size is the largest number of elements, 0 for any. count is the number of elements, -1 if
	// the kernel does not report it.
	size, count int
}

// is reports whether the set has the attributes of want.
func (s kernelSet) is(want spec) bool {
	have := s.spec
	if want.dataType == unix.NFT_DATA_VERDICT {
		have.dataLen = want.dataLen // the kernel chooses it
	}
	return have == want
}

// kernelRule identifies a rule by its handle, which is unique, and a hash of its expressions.
type kernelRule struct {
	handle, sum uint64
	chain       string
}

// kernelHead is a table in the kernel without its contents.
type kernelHead struct {
	exists bool
	flags  uint32 // NFT_TABLE_F_*
	// handle is larger than the handles of all older tables.
	handle uint64
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

// readTable reads a table without its contents.
func readTable(conn *nlbatch.Conn, name string, f tracker.Family) (head kernelHead, err error) {
	request := nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, name)
	err = conn.Get(unix.NFT_MSG_GETTABLE, inet.AF(f), false, request, func(attrs []byte) error {
		a := parse(attrs)
		head = kernelHead{exists: true, flags: a.number(unix.NFTA_TABLE_FLAGS), handle: nfnl.Uint64(a[tableAttrHandle])}
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return kernelHead{}, nil
	}
	return head, err
}

// dump calls fn with each of the table's objects of one type, and begin before each attempt. The
// library is several times slower (BenchmarkLibraryList) and does not report dumps that a change
// interrupted.
func (b *Backend) dump(table string, f tracker.Family, typ uint16, begin func(), fn func(a *attributes)) error {
	request := nfnl.AppendString(nil, tableAttr, table)
	var a attributes
	return again(func() error {
		begin()
		return b.conn.Get(typ, inet.AF(f), true, request, func(attrs []byte) error {
			// Some kernels ignore the request's table.
			if a = parse(attrs); a.text(tableAttr) == table {
				fn(&a)
			}
			return nil
		})
	})
}

// readChains returns the table's chains by name.
func (b *Backend) readChains(table string, f tracker.Family) (out map[string]kernelChain, err error) {
	begin := func() { out = map[string]kernelChain{} }
	err = b.dump(table, f, unix.NFT_MSG_GETCHAIN, begin, func(a *attributes) {
		c := kernelChain{policy: a.number(unix.NFTA_CHAIN_POLICY)}
		if a[unix.NFTA_CHAIN_HOOK] != nil {
			hook := parse(a[unix.NFTA_CHAIN_HOOK])
			c.base = &baseChain{
				typ: a.text(unix.NFTA_CHAIN_TYPE), hook: hook.number(unix.NFTA_HOOK_HOOKNUM),
				priority: int32(hook.number(unix.NFTA_HOOK_PRIORITY)),
			}
		}
		out[a.text(unix.NFTA_CHAIN_NAME)] = c
	})
	return out, err
}

// readSets returns the table's sets and maps by name.
func (b *Backend) readSets(table string, f tracker.Family) (out map[string]kernelSet, err error) {
	begin := func() { out = map[string]kernelSet{} }
	err = b.dump(table, f, unix.NFT_MSG_GETSET, begin, func(a *attributes) {
		desc := parse(a[unix.NFTA_SET_DESC])
		s := kernelSet{spec: spec{
			flags:   a.number(unix.NFTA_SET_FLAGS),
			keyType: a.number(unix.NFTA_SET_KEY_TYPE), keyLen: a.number(unix.NFTA_SET_KEY_LEN),
			dataType: a.number(unix.NFTA_SET_DATA_TYPE), dataLen: a.number(unix.NFTA_SET_DATA_LEN),
		}, size: int(desc.number(unix.NFTA_SET_DESC_SIZE)), count: -1}
		if a[setAttrCount] != nil {
			s.count = int(a.number(setAttrCount))
		}
		out[a.text(unix.NFTA_SET_NAME)] = s
	})
	return out, err
}

// readRules returns the table's rules.
func (b *Backend) readRules(table string, f tracker.Family) (out []kernelRule, err error) {
	begin := func() { out = out[:0] }
	err = b.dump(table, f, unix.NFT_MSG_GETRULE, begin, func(a *attributes) {
		sum := fnv.New64a()
		sum.Write(a[unix.NFTA_RULE_EXPRESSIONS])
		out = append(out, kernelRule{nfnl.Uint64(a[unix.NFTA_RULE_HANDLE]), sum.Sum64(), a.text(unix.NFTA_RULE_CHAIN)})
	})
	return out, err
}

// kernelElement is an element of a set or map as the kernel has it.
type kernelElement struct {
	key, data []byte
	// verdict and chain are set for an element of a verdict map.
	verdict int32
	chain   string
	comment string
	// intervalEnd marks the first address behind an interval.
	intervalEnd bool
	// expr is the element's expression, nil if it has none.
	expr []byte
	// timeout and expiration are in the kernel's encoding, nil if the element has none.
	timeout, expiration []byte
}

// elements calls fn with the elements of a set, as readElements does.
func (b *Backend) elements(table string, f tracker.Family, s set, fn func(kernelElement)) error {
	return readElements(b.conn, table, f, s.name(), fn)
}

// readAll calls fn with the elements of a set, and begin before each attempt.
func (b *Backend) readAll(table string, f tracker.Family, s set, begin func(), fn func(kernelElement)) error {
	return again(func() error {
		begin()
		return b.elements(table, f, s, fn)
	})
}

// readElements calls fn with each element of a set. The element is valid only during the
// call. BenchmarkLibraryReadElements compares readElements with the library.
func readElements(conn *nlbatch.Conn, table string, f tracker.Family, set string, fn func(kernelElement)) error {
	request := nfnl.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, table)
	request = nfnl.AppendString(request, unix.NFTA_SET_ELEM_LIST_SET, set)
	return conn.Get(unix.NFT_MSG_GETSETELEM, inet.AF(f), true, request, func(attrs []byte) error {
		a := parse(attrs)
		for _, one := range nfnl.Attributes(a[unix.NFTA_SET_ELEM_LIST_ELEMENTS]) {
			fn(parseElement(one))
		}
		return nil
	})
}

func parseElement(attrs []byte) kernelElement {
	a := parse(attrs)
	e := kernelElement{
		key: dataValue(a[unix.NFTA_SET_ELEM_KEY]), data: dataValue(a[unix.NFTA_SET_ELEM_DATA]),
		intervalEnd: a.number(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0,
		timeout:     a[unix.NFTA_SET_ELEM_TIMEOUT], expiration: a[unix.NFTA_SET_ELEM_EXPIRATION],
		expr:    a[unix.NFTA_SET_ELEM_EXPR],
		comment: nlbatch.Comment(a[unix.NFTA_SET_ELEM_USERDATA]),
	}
	if data := a[unix.NFTA_SET_ELEM_DATA]; data != nil && e.data == nil {
		outer := parse(data)
		verdict := parse(outer[unix.NFTA_DATA_VERDICT])
		e.verdict, e.chain = int32(verdict.number(unix.NFTA_VERDICT_CODE)), verdict.text(unix.NFTA_VERDICT_CHAIN)
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

// parseAddrPort reads an address and port from the data of an element.
func parseAddrPort(data []byte) (netip.AddrPort, bool) {
	if len(data) != 8 && len(data) != 20 {
		return netip.AddrPort{}, false
	}
	n := len(data) - 4
	addr, ok := netip.AddrFromSlice(data[:n])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(data[n:])), ok
}
