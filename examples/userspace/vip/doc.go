// Package vip adds virtual addresses to a node, so that programs can listen at them, without
// assigning them to an interface. It adds routes of type local to the loopback interface, in
// the table "local", like
//
//	ip route add local 10.96.0.10/32 dev lo table local proto 112
//
// Unlike with addresses of a dummy interface, the kernel does not answer ARP or neighbor solicitations for such
// an address, and never chooses it as the source of a connection to another host. Packets to the address must
// be routed to the node.
//
// A process recognizes the routes of an earlier process by their protocol number ([Protocol]) and leaves other routes
// alone. The package needs CAP_NET_ADMIN in the network namespace.
//
// Programs that listen at the wildcard address can be reached at such an address, too.
package vip
