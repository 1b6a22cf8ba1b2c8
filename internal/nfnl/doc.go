// Package nfnl exchanges messages with the kernel's netfilter subsystems over
// nfnetlink (include/uapi/linux/netfilter/nfnetlink.h): a socket, messages,
// attributes, dumps that a concurrent change interrupts, and extended
// acknowledgements.
//
// Packages nftables and conntrack use it where the libraries that the module depends on
// cost several times as much: see BenchmarkLibraryWrite, BenchmarkLibraryReadElements
// and BenchmarkLibraryList of package nftables and BenchmarkLibraryDump and
// BenchmarkLibraryDelete of package conntrack. What is not on such a path uses a
// library.
package nfnl
