// Package nfnl exchanges messages with the kernel's netfilter subsystems over
// nfnetlink (include/uapi/linux/netfilter/nfnetlink.h): a socket, messages,
// attributes, dumps that a concurrent change interrupts, and extended
// acknowledgements.
//
// nf_tables and conntrack use it on paths where the libraries that the module
// depends on cost too much: see the benchmarks named at [Attributes]. What is not
// on such a path uses a library.
package nfnl
