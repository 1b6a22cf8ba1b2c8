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

// Counter is what an accounting object of the kernel (linux/netfilter/nfnetlink_acct.h,
// the program nfacct lists them) has counted since it was created, in the rules of
// both families.
type Counter struct {
	// Name is [InvalidDropped] or [LocalhostNodePorts].
	Name string
	// Packets is how many packets, and Bytes how many bytes these had from their
	// network headers on.
	Packets, Bytes uint64
}
