package conntrack

import (
	"context"
	"net/netip"
	"os"

	"github.com/go-proxier/proxier/tracker"
)

// Flow is one entry of a connection tracking table. The original direction is
// that of its first packet; replies go the other way, and are what address
// translation shows in: a flow that was sent to an endpoint has the endpoint as
// ReplySrc where it otherwise has Dst.
type Flow struct {
	// Src and Dst are the source and destination of the original direction.
	Src, Dst netip.AddrPort
	// ReplySrc and ReplyDst are the source and destination replies have as they
	// come in.
	ReplySrc, ReplyDst netip.AddrPort
	// ID tells the entry from a later one with the same addresses (CTA_ID of
	// include/uapi/linux/netfilter/nfnetlink_conntrack.h).
	ID uint32
	// Zone is the conntrack zone, 0 by default (CTA_ZONE, or CTA_TUPLE_ZONE of
	// either direction).
	Zone uint16
	// ReplyZone reports that Zone holds for replies alone, as after "ct reply zone
	// set" of nft: the original direction is in zone 0.
	ReplyZone bool
	// Protocol is the IP protocol number; ports are 0 where it has none.
	Protocol uint8
}

// Table is a connection tracking table: the kernel's, unless [Config.Table] is
// set. A data plane in userspace may bring its own. It is used by one goroutine
// at a time.
type Table interface {
	// Dump calls f for each flow of the family. The flow is valid only during the
	// call. Flows that are not UDP or in none of [Config.Zones] may be left out. Each
	// flow that is in the table from beginning to end must be reported, more than
	// once if need be, or an error returned.
	Dump(ctx context.Context, family tracker.Family, f func(*Flow)) error
	// Delete removes the flows, which Dump reported, and returns how many of them it
	// did remove. One that is gone, or has been replaced by another with the same
	// addresses, is no error and not counted.
	Delete(ctx context.Context, flows []Flow) (int, error)
	// LocalAddrs returns the node's own addresses of the family, or an error if not
	// all of them can be told.
	LocalAddrs(ctx context.Context, family tracker.Family) ([]netip.Addr, error)
}

// KernelTable is the kernel's connection tracking table in one network namespace,
// for callers that wrap it and pass the result to [New] as [Config.Table]: to
// translate addresses, to log what is deleted, or to join the tables of several
// namespaces. [OpenKernelTable] returns one. It implements [Table] and, as every
// Table, may be used by one goroutine at a time.
type KernelTable struct{ kernel }

// KernelTableConfig selects what [OpenKernelTable] opens. The zero value selects
// zone 0 in the network namespace of the calling thread.
type KernelTableConfig struct {
	// NetNS is an open file of the network namespace, as [Config.NetNS]; nil is the
	// namespace of the calling thread.
	NetNS *os.File
	// Zones is the conntrack zones whose flows Dump reports. Empty means zone 0
	// alone. It should equal [Config.Zones].
	Zones []uint16
}
