// Package nfacct creates, reads and deletes the kernel's accounting objects
// (nfnetlink_acct), as the program nfacct does. An object is a named counter of packets
// and bytes in one network namespace. Rules of iptables and ip6tables count into it with
// the match nfacct.
package nfacct
