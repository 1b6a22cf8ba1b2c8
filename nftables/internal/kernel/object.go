package kernel

import (
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
	// OwnNodePorts reports that NodePorts are at the Node's addresses alone. The kernel need not be asked whether
	// these are local: it denies that for an interface in a VRF.
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
