package conntrack

import (
	"context"
	"errors"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// Flow is one entry of a connection tracking table. The original direction is that of its first packet. Replies show
// address translation: ReplySrc is the endpoint of a flow that was sent to one, and otherwise Dst.
type Flow struct {
	// Src and Dst are the source and destination of the original direction.
	Src, Dst netip.AddrPort
	// ReplySrc and ReplyDst are the source and destination of replies as they come in.
	ReplySrc, ReplyDst netip.AddrPort
	// ID distinguishes the entry from a later one with the same addresses (CTA_ID of
	// linux/netfilter/nfnetlink_conntrack.h).
	ID uint32
	// Zone is the conntrack zone, 0 by default (CTA_ZONE, or CTA_TUPLE_ZONE of
	// either direction).
	Zone uint16
	// ReplyZone reports that Zone applies to replies alone, as after nft's "ct reply zone
	// set". The original direction is in zone 0 then.
	ReplyZone bool
	// Protocol is the IP protocol number. The ports of a protocol without ports are 0.
	Protocol uint8
}

// FlowTable is a connection tracking table. A data plane in userspace may implement its own
// (see [Config.Table]). The Cleaner uses it from one goroutine at a time.
type FlowTable interface {
	// Dump calls f for each flow of the family. The flow is valid only during the call. Dump may leave out flows of
	// other protocols than UDP or outside of [Config.Zones]. It must report each flow that is in the table from
	// beginning to end, possibly more than once, or return an error.
	Dump(ctx context.Context, family tracker.Family, f func(*Flow)) error
	// Delete removes flows that Dump reported, and returns the number of removed flows. It ignores a flow that no
	// longer exists or was replaced by another with the same addresses. The error is about flows that it could not
	// remove.
	Delete(ctx context.Context, flows []Flow) (int, error)
	// LocalAddrs returns the node's own addresses of the family. It returns an error if
	// the list may be incomplete.
	LocalAddrs(ctx context.Context, family tracker.Family) ([]netip.Addr, error)
}

// KernelTable is the kernel's connection tracking table in one network namespace, for callers that wrap it in a
// [Config.Table]: to translate addresses, to log deletions, or to join the tables of several namespaces.
// [OpenKernelTable] returns one. It implements [FlowTable] and must not be used by several goroutines at a time.
type KernelTable struct{ kernel }

var (
	// ErrIncomplete is wrapped by the error of a dump in which flows may be missing, because the table changed too
	// much (NLM_F_DUMP_INTR) or messages were lost (ENOBUFS). Another dump may succeed.
	ErrIncomplete = errors.New("incomplete dump")
	// ErrMalformed is wrapped by errors about a message of the kernel that cannot be
	// decoded.
	ErrMalformed = errors.New("malformed message")
)
