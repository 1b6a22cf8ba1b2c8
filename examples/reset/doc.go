// Package reset ends TCP connections to endpoints that vanished: pods whose node failed or that were deleted by force,
// once their Pod objects are gone. No kernel is left to close such a connection, so a client waits until its
// retransmissions end, which takes Linux 15 minutes (kubernetes/kubernetes#46753, #98700).
//
//	var cursor *ruleset.Cursor
//	r, err := reset.New(ctx, reset.Config{Exists: func(a netip.AddrPort) bool {
//		return len(cursor.LookupEndpoint(a, v1.ProtocolTCP)) != 0
//	}})
//	...
//	cursor = engine.Attach("plane", r.Wrap(backend))
//	go r.Run(ctx)
//
// # Which connections end
//
// An endpoint vanished if it is missing from all EndpointSlices of a Service that still exists, and did not serve as a
// terminating endpoint before. After [Config].Delay, unless it returned or another Service has it ([Config].Exists), a
// packet of a connection from an address of the Service to the endpoint is answered by RST. Connections of a deleted
// Service, connections that did not use the Service, and other protocols are not affected.
//
// When a node fails, Kubernetes keeps its endpoints until the Pod objects are deleted: when an operator deletes them by
// force, gives the node the taint node.kubernetes.io/out-of-service, or deletes the Node object. Until then the
// connections hang.
//
// A pod that leaves its Service by a change of its labels vanishes, too, although it may still run: do not use this
// package where operators isolate pods in that way.
//
// # How
//
// The nf_tables table proxier-reset has a set of pairs of Service address and endpoint. Rules in the hooks forward and
// output reject packets of these pairs "with tcp reset". A pair costs one element, however many connections it has, and
// the kernel removes it after 20 minutes. The table survives a restart of the process, and [New] reads it. The
// package does not notice endpoints that vanish while no process runs. [Config].DestroySockets also ends silent
// connections of the node's own processes.
//
// The package works with data planes that translate destinations in connection tracking, such as packages nftables and
// iptables. Packets in a flowtable skip the rules until the flow leaves it. It needs CAP_NET_ADMIN and Linux 4.17; on
// other systems [New] returns a [*dataplane.UnsupportedError].
package reset
