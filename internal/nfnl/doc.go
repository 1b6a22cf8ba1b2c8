// Package nfnl exchanges messages with the kernel's netfilter subsystems over
// nfnetlink (include/uapi/linux/netfilter/nfnetlink.h): a socket, messages,
// attributes, transactions of nf_tables, dumps that a concurrent change interrupts,
// and extended acknowledgements.
//
// Packages nftables and conntrack use it where libraries are several times slower (-bench Library), and code that edits
// small tables, because connections of github.com/google/nftables read by select(2), and panic in a process with more than
// 1,024 open files.
package nfnl
