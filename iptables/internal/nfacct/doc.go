// Package nfacct keeps the kernel's accounting objects (nfnetlink_acct): counters of
// packets and bytes with a name, of one network namespace, which rules of iptables
// and ip6tables count into by their match nfacct. It is what the program nfacct does.
package nfacct
