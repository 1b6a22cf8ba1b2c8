package iptables

// The names of the kernel's accounting objects that rules count into, which are
// kube-proxy's.
const (
	// InvalidDropped counts packets that are not forwarded because connection tracking
	// considers them invalid.
	InvalidDropped = "ct_state_invalid_dropped_pkts"
	// LocalhostNodePorts counts first packets of connections to NodePorts at IPv4
	// loopback addresses ([Config.LocalhostNodePorts]).
	LocalhostNodePorts = "localhost_nps_accepted_pkts"
)

// Counter is the value of one of the kernel's accounting objects
// (linux/netfilter/nfnetlink_acct.h), which the program nfacct lists. It counts in the
// rules of both families, since the object was created.
type Counter struct {
	// Name is [InvalidDropped] or [LocalhostNodePorts].
	Name string
	// Packets counts packets, and Bytes their bytes, from their network headers on.
	Packets, Bytes uint64
}
