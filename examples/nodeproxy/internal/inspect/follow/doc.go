//go:build linux

// Package follow follows the first packets of new connections through the kernel, in the
// network namespace of the calling thread.
//
// [NFTrace] installs a table that marks the packets to follow, and receives the kernel's trace messages. The table
// belongs to a socket (NFT_TABLE_F_OWNER, Linux 5.12): the kernel removes it when that socket is closed, even by
// SIGKILL. The chains of iptables-legacy and the virtual servers of IPVS send no messages; only their effect on the
// packet shows. Chains at the hook ingress and XDP programs run before NFTrace sees a packet.
//
// [OpenConntrack] receives the events of connection tracking. It changes nothing in the kernel
// and shows only connections whose first packet got through.
package follow

import (
	"context"
	"net/netip"
)

// Filter selects the connections to follow.
type Filter struct {
	// To is the destination before any translation.
	To netip.AddrPort
	// Protocol is the number (IPPROTO_*) of a protocol that has ports.
	Protocol uint8
	// From is the source. The zero address means any address, and port 0 any port.
	From netip.AddrPort
}

// Follower follows packets. It is not safe for concurrent use.
type Follower interface {
	// Follow calls fn with each packet whose outcome is known, until fn returns false or
	// the context ends. Both are no error. Without further messages the outcome counts as
	// known after a second, or after a tenth of a second when the context ends.
	Follow(ctx context.Context, fn func(*Packet) (more bool)) error
	// Overrun returns how often the kernel dropped messages because the socket's buffer was
	// full.
	Overrun() int
	// Close releases the sockets and removes what was installed.
	Close() error
}
