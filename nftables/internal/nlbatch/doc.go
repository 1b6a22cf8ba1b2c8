// Package nlbatch writes nf_tables netlink batches and sends them.
//
// A [Batch] is one transaction: the kernel applies all of its messages or none
// (linux/netfilter/nfnetlink.h, NFNL_MSG_BATCH_BEGIN and _END). The package
// exists beside github.com/google/nftables because that library's connection
// builds a netlink message and a dozen allocations for every set element, which
// costs twenty times what the kernel needs for it; expressions of rules and
// whatever is not on the path of a changed endpoint are left to the library.
package nlbatch
