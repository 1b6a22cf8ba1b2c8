package kernel

import (
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Rules renders the rules of one family's table.
type Rules struct {
	Family tracker.Family
	// Mark is the bit of the packet mark that requests masquerading.
	Mark uint32
	// Seed is the seed of the hashes. It is not 0, because the kernel replaces 0 by a random
	// seed.
	Seed uint32
	// Local recognizes traffic of this node's pods.
	Local ruleset.LocalTraffic
	// OwnNodePorts reports that NodePorts are at the Node's addresses alone. The kernel need not be asked
	// whether these are local: it says no for an interface in a VRF.
	OwnNodePorts bool
	// Offload is nil for tables without a flowtable.
	Offload *Offload
	Stages  Stages
}

// Stages is the place of base chains: what is added to their priorities, and what is left out.
type Stages struct {
	DestinationNAT, Filter, SourceNAT int
	NoFilter, NoMasquerade            bool
}

// Offload determines the connections that take the fast path.
type Offload struct {
	// AfterPackets is the number of packets after which a connection takes the fast path.
	AfterPackets int
	// UDP offloads UDP in addition to TCP.
	UDP bool
}

// Head is a table in the kernel without its contents.
type Head struct {
	Exists bool
	Flags  uint32 // NFT_TABLE_F_*
	// Handle is larger than the handles of all older tables.
	Handle uint64
}

// BaseChain is the hook of a base chain.
type BaseChain struct {
	Type     string // "filter" or "nat"
	Hook     uint32 // NF_INET_*
	Priority int32
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
	Sum    uint64
}

// Flowtable is a flowtable as the kernel has it.
type Flowtable struct {
	// Sound reports whether the flowtable has the attributes that this package gives it.
	Sound bool
	// Devices holds the names of the interfaces.
	Devices map[string]bool
}
