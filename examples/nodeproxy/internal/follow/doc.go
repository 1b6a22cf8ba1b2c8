//go:build linux

// Package follow follows the first packets of new connections through the kernel, in the
// network namespace of the calling thread.
//
// [NFTrace] installs a table of its own, which marks the packets to follow, and receives the
// kernel's trace messages (NFT_MSG_TRACE of include/uapi/linux/netfilter/nf_tables.h). The
// table belongs to a socket (NFT_TABLE_F_OWNER, Linux 5.12): the kernel removes it when
// that socket is closed, also by SIGKILL. It sees what happens from the hooks prerouting or
// output to the end of the hooks postrouting or input. The chains of iptables-legacy and
// the virtual servers of IPVS send no messages, but what becomes of the packet is seen.
// Chains at the hook ingress and XDP programs run before.
//
// [Conntrack] receives the events of connection tracking. It changes nothing in the kernel
// and sees only connections whose first packet got through.
package follow

import (
	"context"
	"net/netip"
)

// Filter selects the connections to follow.
type Filter struct {
	// To is the destination before any translation.
	To netip.AddrPort
	// Protocol is the protocol's number (IPPROTO_*), one that has ports.
	Protocol uint8
	// From is the source. The zero address is any, and port 0 any port.
	From netip.AddrPort
}

// Follower follows packets. It is not safe for concurrent use.
type Follower interface {
	// Follow calls fn with each packet when its way has ended, until fn returns false or
	// the context ends, which is no error. A packet of which nothing more is heard has
	// ended after a second, or a tenth of it when the context ends.
	Follow(ctx context.Context, fn func(*Packet) (more bool)) error
	// Overrun returns how often the kernel dropped messages because they were not read
	// fast enough.
	Overrun() int
	// Close ends the following and removes what was installed.
	Close() error
}
