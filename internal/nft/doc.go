// Package nft writes and reads tables of nf_tables. Rules are in the syntax of the nft tool, which [Compile]
// encodes as the tool does. On systems other than Linux it has only the types of what it reads, and the
// encoding of elements.
//
// A [Batch] is one transaction, which the kernel applies as a whole or not at all
// (include/uapi/linux/netfilter/nfnetlink.h, NFNL_MSG_BATCH_BEGIN and _END). A [Table] writes messages to it.
// A [Conn] commits it and reads tables back.
//
// Sets are written and read without github.com/google/nftables, which is several times slower with set
// elements. It encodes the expressions of rules.
package nft
