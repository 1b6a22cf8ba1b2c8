//go:build linux

package nftables

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/tracker"
)

// Attributes that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h):
// NFTA_TABLE_HANDLE, and NFTA_SET_COUNT, the number of a set's elements, told
// since Linux 6.16.
const (
	tableAttrHandle = 4
	setAttrCount    = 20
)

// policyAccept is a base chain's policy that lets packets pass
// (linux/netfilter.h, NF_ACCEPT).
const policyAccept = 1

// kernelChain is a chain as the kernel has it.
type kernelChain struct {
	// base is the hook of a base chain, nil for another.
	base   *baseChain
	policy uint32
}

// is reports whether the chain is hooked in as it should be, and lets through
// what its rules do not decide; want is nil for a chain that is not hooked in.
func (c kernelChain) is(want *baseChain) bool {
	if c.base == nil || want == nil {
		return c.base == nil && want == nil
	}
	return *c.base == *want && c.policy == policyAccept
}

// kernelSet is a set or map as the kernel has it.
type kernelSet struct {
	spec
	// size is its bound, 0 for none.
	size int
	// count is the number of its elements, -1 where the kernel does not tell.
	count int
}

// is reports whether the set was made as want says.
func (s kernelSet) is(want spec) bool {
	have := s.spec
	if want.dataType == unix.NFT_DATA_VERDICT {
		have.dataLen = want.dataLen // the kernel's own affair
	}
	return have == want
}

// kernelRule is what tells a rule from another: its handle, which none gets
// again, and a sum of what it does.
type kernelRule struct {
	handle, sum uint64
	chain       string
}

// kernelHead is what the kernel says of a table itself.
type kernelHead struct {
	exists bool
	flags  uint32 // NFT_TABLE_F_*
	// handle is larger the later the table was made.
	handle uint64
}

// readTable returns what there is to know of the table itself.
func readTable(conn *nlbatch.Conn, name string, f tracker.Family) (head kernelHead, err error) {
	request := nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, name)
	err = conn.Get(unix.NFT_MSG_GETTABLE, inet.AF(f), false, request, func(attrs []byte) error {
		head.exists = true
		for typ, data := range nfnl.Attributes(attrs) {
			switch {
			case typ == unix.NFTA_TABLE_FLAGS:
				head.flags = nfnl.Uint32(data)
			case typ == tableAttrHandle && len(data) == 8:
				head.handle = binary.BigEndian.Uint64(data)
			}
		}
		return nil
	})
	return head, ignore(err, unix.ENOENT)
}

// dump calls fn with the attributes of each of the table's objects of one type;
// tableAttr is the attribute by which they name their table. begin is called
// before each attempt.
func (b *Backend) dump(table string, f tracker.Family, typ, tableAttr uint16, begin func(), fn func(attrs []byte)) error {
	request := nfnl.AppendString(nil, tableAttr, table)
	return again(func() error {
		begin()
		return b.conn.Get(typ, inet.AF(f), true, request, func(attrs []byte) error {
			mine := false
			for typ, data := range nfnl.Attributes(attrs) {
				mine = mine || typ == tableAttr && nfnl.String(data) == table
			}
			if mine { // not every kernel heeds the request's table
				fn(attrs)
			}
			return nil
		})
	})
}

// readChains returns the table's chains by name.
func (b *Backend) readChains(table string, f tracker.Family) (out map[string]kernelChain, err error) {
	begin := func() { out = map[string]kernelChain{} }
	err = b.dump(table, f, unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_TABLE, begin, func(attrs []byte) {
		var c kernelChain
		var name, kind string
		for typ, data := range nfnl.Attributes(attrs) {
			switch typ {
			case unix.NFTA_CHAIN_NAME:
				name = nfnl.String(data)
			case unix.NFTA_CHAIN_TYPE:
				kind = nfnl.String(data)
			case unix.NFTA_CHAIN_POLICY:
				c.policy = nfnl.Uint32(data)
			case unix.NFTA_CHAIN_HOOK:
				c.base = &baseChain{}
				for typ, data := range nfnl.Attributes(data) {
					switch typ {
					case unix.NFTA_HOOK_HOOKNUM:
						c.base.hook = nfnl.Uint32(data)
					case unix.NFTA_HOOK_PRIORITY:
						c.base.priority = int32(nfnl.Uint32(data))
					}
				}
			}
		}
		if c.base != nil {
			c.base.typ = kind
		}
		out[name] = c
	})
	return out, err
}

// readSets returns the table's sets and maps by name.
func (b *Backend) readSets(table string, f tracker.Family) (out map[string]kernelSet, err error) {
	begin := func() { out = map[string]kernelSet{} }
	err = b.dump(table, f, unix.NFT_MSG_GETSET, unix.NFTA_SET_TABLE, begin, func(attrs []byte) {
		s := kernelSet{count: -1}
		var name string
		for typ, data := range nfnl.Attributes(attrs) {
			switch typ {
			case unix.NFTA_SET_NAME:
				name = nfnl.String(data)
			case unix.NFTA_SET_FLAGS:
				s.flags = nfnl.Uint32(data)
			case unix.NFTA_SET_KEY_TYPE:
				s.keyType = nfnl.Uint32(data)
			case unix.NFTA_SET_KEY_LEN:
				s.keyLen = nfnl.Uint32(data)
			case unix.NFTA_SET_DATA_TYPE:
				s.dataType = nfnl.Uint32(data)
			case unix.NFTA_SET_DATA_LEN:
				s.dataLen = nfnl.Uint32(data)
			case setAttrCount:
				s.count = int(nfnl.Uint32(data))
			case unix.NFTA_SET_DESC:
				for typ, data := range nfnl.Attributes(data) {
					if typ == unix.NFTA_SET_DESC_SIZE {
						s.size = int(nfnl.Uint32(data))
					}
				}
			}
		}
		out[name] = s
	})
	return out, err
}

// readRules returns the table's rules.
func (b *Backend) readRules(table string, f tracker.Family) (out []kernelRule, err error) {
	begin := func() { out = out[:0] }
	err = b.dump(table, f, unix.NFT_MSG_GETRULE, unix.NFTA_RULE_TABLE, begin, func(attrs []byte) {
		var r kernelRule
		sum := fnv.New64a()
		for typ, data := range nfnl.Attributes(attrs) {
			switch typ {
			case unix.NFTA_RULE_CHAIN:
				r.chain = nfnl.String(data)
			case unix.NFTA_RULE_HANDLE:
				if len(data) == 8 {
					r.handle = binary.BigEndian.Uint64(data)
				}
			case unix.NFTA_RULE_EXPRESSIONS:
				sum.Write(data)
			}
		}
		r.sum = sum.Sum64()
		out = append(out, r)
	})
	return out, err
}

// parseAddrPort reads an address and port as maps hold them.
func parseAddrPort(data []byte) (netip.AddrPort, bool) {
	if len(data) != 8 && len(data) != 20 {
		return netip.AddrPort{}, false
	}
	n := len(data) - 4
	addr, ok := netip.AddrFromSlice(data[:n])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(data[n:])), ok
}

// kernelElement is an element of a set or map as the kernel has it.
type kernelElement struct {
	key, data []byte
	// verdict and chain are an element's of a verdict map.
	verdict int32
	chain   string
	comment string
	// intervalEnd marks the first address behind an interval.
	intervalEnd bool
	// timeout and expiration are as the kernel tells them, nil if there is none.
	timeout, expiration []byte
}

// elements calls fn with the elements of a set, as readElements does.
func (b *Backend) elements(table string, f tracker.Family, s set, fn func(kernelElement)) error {
	return readElements(b.conn, table, f, s.name(), fn)
}

// readElements calls fn with each element of a set. The element is valid only during
// the call. See BenchmarkLibraryReadElements.
func readElements(conn *nlbatch.Conn, table string, f tracker.Family, set string, fn func(kernelElement)) error {
	request := nfnl.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, table)
	request = nfnl.AppendString(request, unix.NFTA_SET_ELEM_LIST_SET, set)
	return conn.Get(unix.NFT_MSG_GETSETELEM, inet.AF(f), true, request, func(attrs []byte) error {
		for typ, list := range nfnl.Attributes(attrs) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				continue
			}
			for _, one := range nfnl.Attributes(list) {
				fn(parseElement(one))
			}
		}
		return nil
	})
}

func parseElement(attrs []byte) kernelElement {
	var e kernelElement
	value := func(data []byte) (out []byte) {
		for typ, v := range nfnl.Attributes(data) {
			if typ == unix.NFTA_DATA_VALUE {
				out = v
			}
		}
		return out
	}
	for typ, data := range nfnl.Attributes(attrs) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = value(data)
		case unix.NFTA_SET_ELEM_DATA:
			e.data = value(data)
			e.verdict, e.chain = parseVerdict(data)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.intervalEnd = len(data) == 4 && binary.BigEndian.Uint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_TIMEOUT:
			e.timeout = data
		case unix.NFTA_SET_ELEM_EXPIRATION:
			e.expiration = data
		case unix.NFTA_SET_ELEM_USERDATA:
			e.comment = nlbatch.Comment(data)
		}
	}
	return e
}

// parseVerdict reads the data of an element of a verdict map.
func parseVerdict(data []byte) (verdict int32, chain string) {
	for typ, v := range nfnl.Attributes(data) {
		if typ != unix.NFTA_DATA_VERDICT {
			continue
		}
		for typ, v := range nfnl.Attributes(v) {
			switch typ {
			case unix.NFTA_VERDICT_CODE:
				verdict = int32(nfnl.Uint32(v))
			case unix.NFTA_VERDICT_CHAIN:
				chain = nfnl.String(v)
			}
		}
	}
	return verdict, chain
}
