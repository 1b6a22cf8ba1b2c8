// Package nlbatch writes nf_tables netlink batches and sends them.
//
// A [Batch] is one transaction: the kernel applies all of its messages or none
// (include/uapi/linux/netfilter/nfnetlink.h, NFNL_MSG_BATCH_BEGIN and _END).
//
// The package exists because github.com/google/nftables is several times slower with set
// elements. BenchmarkLibraryWrite, BenchmarkLibraryReadElements and BenchmarkLibraryList
// of package nftables compare both in the same kernel. The library encodes the
// expressions of rules.
package nlbatch

import "errors"

// ErrTooLarge is wrapped by the error of a batch that is larger than the socket can
// send. The kernel accepts a transaction only in one piece, of at most the size of the
// socket's send buffer. A buffer larger than net.core.wmem_max needs CAP_NET_ADMIN in
// the initial user namespace.
var ErrTooLarge = errors.New("transaction is larger than the socket's send buffer")
