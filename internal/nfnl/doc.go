// Package nfnl exchanges messages with the kernel's netfilter subsystems over
// nfnetlink (include/uapi/linux/netfilter/nfnetlink.h): a socket, messages,
// attributes, dumps that a concurrent change interrupts, and extended
// acknowledgements.
//
// Packages nftables and conntrack use it where libraries are several times slower. See
// BenchmarkLibraryWrite, BenchmarkLibraryReadElements and BenchmarkLibraryList of package
// nftables, and BenchmarkLibraryDump and BenchmarkLibraryDelete of package conntrack.
// Other code uses a library.
package nfnl
