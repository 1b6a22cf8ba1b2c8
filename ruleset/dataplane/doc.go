// Package dataplane has what backends of package ruleset share that program a data plane
// which other processes can alter and operators inspect: a kernel, or a switch.
//
// [Backend] is the contract of such a [ruleset.Backend]: it also checks its rules, watches
// them, and counts traffic. The packages nftables, iptables and ipvs implement it, and
// have the same functions beside New. Each takes a context and the package's Config:
//
//	Probe      returns an [*UnsupportedError] if the system lacks a feature
//	Owned      reports whether a Backend has left rules
//	Lookup     reads where the kernel sends a packet: [Query], [Found]
//	Traffic    reads the counters without a Backend
//	Cleanup    removes the rules
//
// [ByFamily] joins a backend for IPv4 and one for IPv6. [Watch] repeats a check at an
// interval. A backend that needs none of this implements [ruleset.Backend] alone.
package dataplane
