// Package kernel commits transactions of package model, and reads tables back. On systems other than
// Linux it has only the types of what it reads, and the encoding of elements.
//
// A [Writer] encodes a model.Tx as a [Batch], which the kernel applies as a whole or not at all
// (include/uapi/linux/netfilter/nfnetlink.h, NFNL_MSG_BATCH_BEGIN and _END). [Rules] has the
// chains that the objects of a Tx stand for, in the syntax of nft, which compile encodes.
//
// Sets are written and read without github.com/google/nftables, which is several times slower with set
// elements. It encodes the expressions of rules.
package kernel
