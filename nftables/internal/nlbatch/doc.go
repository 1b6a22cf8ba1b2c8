// Package nlbatch writes nf_tables netlink batches and sends them.
//
// A [Batch] is one transaction: the kernel applies all of its messages or none
// (include/uapi/linux/netfilter/nfnetlink.h, NFNL_MSG_BATCH_BEGIN and _END).
//
// The package exists beside github.com/google/nftables because of what set elements
// cost there: BenchmarkLibraryWrite, BenchmarkLibraryReadElements and
// BenchmarkLibraryList of package nftables run both in the same kernel. Expressions of
// rules are encoded by the library.
package nlbatch

import "errors"

// ErrTooLarge is wrapped by the error of a batch that is larger than the socket can
// send. The kernel takes a transaction in one piece of at most the socket's send buffer:
// beyond net.core.wmem_max that needs CAP_NET_ADMIN in the initial user namespace.
var ErrTooLarge = errors.New("transaction is larger than the socket's send buffer")
