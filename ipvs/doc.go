// Package ipvs forwards Service traffic with IPVS, the kernel's load balancer, as kube-proxy's ipvs mode does. It keeps
// virtual servers, a dummy device, ipsets and a fixed set of iptables rules.
//
//	b, err := ipvs.New(ctx, ipvs.Config{}) // a ruleset.Backend
//	...
//	defer b.Close()
//	cursor := engine.Attach("ipvs", b)
//	go b.Watch(ctx, time.Hour, func(error) { cursor.Resync(); runner.Trigger() })
//
// [Backend.Watch], or calls of [Backend.Retire], delete the real servers of removed endpoints. Watch also makes NodePorts
// follow the node's addresses.
//
// A [Renderer] plans the same objects without a kernel, on every system. [DESIGN.md] has the objects, a packet's way
// through them, the limits, and the differences from kube-proxy's ipvs mode and from the other backends.
//
// # Guarantees
//
//   - The cost of a change depends on the change alone: an endpoint of a Service with a cluster IP takes one netlink
//     request, and one more if it is on this node. Changes of endpoints read nothing from the kernel.
//   - A Service with endpoints never refuses a connection because of a change: a Backend adds before it removes.
//   - Connections outlive a restart, and the removal of their endpoint and of their Service, until they end or
//     [Config].DrainLimit has passed.
//   - A Backend leaves other programs' virtual servers alone, and other programs may set bits of packets' marks, as
//     network policies do: see [Config].MasqueradeMark.
//   - If the kernel refuses an endpoint, that endpoint alone is missing. If a set is full, a new frontend is. Removed
//     endpoints always leave.
//
// # Requirements
//
// The package needs Linux 4.18 or later with IPVS, ipset, connection tracking and the modules of the schedulers in use,
// and iptables with either implementation. It needs CAP_NET_ADMIN in the initial user namespace; CAP_NET_RAW, because the
// iptables tools look up sets by a raw socket; and CAP_SYS_ADMIN if [Config].NetNS is set. The kernel parameters in
// [SetSysctls] must be writable or set. IPv6 must not be disabled, or [Config].Families must not have it. [New] and [Probe]
// return a [*dataplane.UnsupportedError] that names what is missing, and on other systems than Linux every function does.
//
// [DESIGN.md]: https://github.com/go-proxier/proxier/blob/main/ipvs/DESIGN.md
package ipvs
