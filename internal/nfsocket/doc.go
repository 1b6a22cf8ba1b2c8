// Package nfsocket opens netlink sockets to netfilter in a given network
// namespace, and opens them anew where they were lost: a descriptor may be closed
// by a mistake elsewhere in the process, and its number given to another file.
package nfsocket
