package nft

import (
	"errors"
	"fmt"
)

// ErrTooLarge is wrapped by the error of a transaction that is larger than the socket can send.
var ErrTooLarge = errors.New("transaction is larger than the socket's send buffer")

// Head is a table in the kernel without its contents.
type Head struct {
	Exists bool
	Flags  uint32 // NFT_TABLE_F_*
	// Handle is larger than the handles of all older tables.
	Handle uint64
}

// BaseChain is the hook of a base chain.
type BaseChain struct {
	Type     string // "filter", "nat" or "route"
	Hook     uint32 // NF_INET_*
	Priority int32
}

// Hooks holds the numbers of the hooks of base chains (linux/netfilter.h, NF_INET_*).
func Hooks() map[string]uint32 {
	return map[string]uint32{"prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4}
}

// ParseHook reads the line of a base chain: "type filter hook input priority 0; policy accept;".
func ParseHook(line string) (*BaseChain, error) {
	var hook string
	c := &BaseChain{}
	if _, err := fmt.Sscanf(line, "type %s hook %s priority %d;", &c.Type, &hook, &c.Priority); err != nil {
		return nil, err
	}
	c.Hook = Hooks()[hook]
	return c, nil
}

// Chain is a chain as the kernel has it.
type Chain struct {
	// Base is the hook of a base chain, nil for other chains.
	Base *BaseChain
	// Accepts reports whether a base chain lets packets pass that its rules do not decide about.
	Accepts bool
}

// Is reports whether the chain has the hook want, nil for no hook, and accepts packets that its
// rules do not decide about.
func (c Chain) Is(want *BaseChain) bool {
	if c.Base == nil || want == nil {
		return c.Base == nil && want == nil
	}
	return *c.Base == *want && c.Accepts
}

// Spec holds the attributes with which a set is created. Types are the nft tool's data types
// (nftables, include/datatype.h), which the kernel stores without attaching a meaning.
type Spec struct {
	KeyType, KeyLen   uint32
	DataType, DataLen uint32 // DataType 0: a set, not a map
	Flags             uint32 // NFT_SET_*
}

// DataVerdict is the DataType of a verdict map (include/uapi/linux/netfilter/nf_tables.h, NFT_DATA_VERDICT).
const DataVerdict = 0xffffff00

// Flags of sets (linux/netfilter/nf_tables.h, NFT_SET_*).
const (
	FlagInterval = 0x4
	FlagMap      = 0x8
	FlagTimeout  = 0x10
	FlagDynamic  = 0x20
)

// SetFlags holds the flags that the tool has names for.
func SetFlags() map[string]uint32 {
	return map[string]uint32{"interval": FlagInterval, "timeout": FlagTimeout, "dynamic": FlagDynamic}
}

// Set is a set or map as the kernel has it.
type Set struct {
	Spec
	// Size is the largest number of elements, 0 for any. Count is the number of elements, -1 if
	// the kernel does not report it.
	Size, Count int
}

// Is reports whether the set has the attributes of want.
func (s Set) Is(want Spec) bool {
	if want.DataType == DataVerdict {
		want.DataLen = s.DataLen // the kernel chooses it
	}
	return s.Spec == want
}

// Rule identifies a rule by its handle, which is unique, and a hash of its expressions.
type Rule struct {
	Handle uint64
	Chain  string
	Sum    uint64
}

// Flowtable is a flowtable as the kernel has it.
type Flowtable struct {
	// Sound reports whether the flowtable has the attributes that [Table.CreateFlowtable] gives it.
	Sound bool
	// Devices holds the names of the interfaces.
	Devices map[string]bool
}
