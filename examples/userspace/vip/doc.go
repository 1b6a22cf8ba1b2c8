// Package vip makes virtual addresses a node's own, so that programs can listen at
// them, without giving them to an interface: by routes of type local to the
// loopback interface, in the table "local", as in
//
//	ip route add local 10.96.0.10/32 dev lo table local proto 112
//
// Nothing answers ARP or neighbour solicitations for such an address, unlike for
// one on a dummy interface, and the kernel never chooses it as the source of a
// connection elsewhere. Packets to it must be routed to the node: those of its own
// processes, and of pods and others whose default route it is, are.
//
// The routes bear a protocol number of their own ([Protocol]), so that those of an
// earlier process are known again, and no others touched. It takes CAP_NET_ADMIN in
// the network namespace.
//
// An address that is held is the node's own entirely: everything that listens at
// the wildcard address can be reached at it.
package vip
