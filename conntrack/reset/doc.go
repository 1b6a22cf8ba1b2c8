// Package reset ends TCP connections to endpoints that vanished: pods whose node failed or that
// were deleted by force, once their Pod objects are gone. No kernel is left to close such a
// connection, so a client waits until its retransmissions end, which takes Linux 15
// minutes (kubernetes/kubernetes#46753, #98700).
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
// An endpoint vanished if it is missing from all EndpointSlices of a Service that still
// exists, and did not serve as a terminating endpoint before. After [Config].Delay, unless it
// returned or another Service has it ([Config].Exists), a packet of an established connection
// from an address of the Service to the endpoint is answered by RST. Not affected are:
//
//   - connections to an endpoint that terminates and still serves. They last until the
//     endpoint closes them.
//   - connections of a Service that was deleted.
//   - connections to the endpoint that did not use the Service: those whose destination connection
//     tracking did not translate.
//   - all other protocols. Package conntrack deletes stale UDP flows.
//
// An endpoint of a failed node does not vanish when the node fails. Kubernetes keeps it in its
// EndpointSlice: as not ready and not serving when the node counts as failed, and later as
// terminating, until the Pod object is deleted. That happens when somebody deletes the Pod by
// force, gives the node the taint node.kubernetes.io/out-of-service, or deletes the Node object.
// Until then the connections hang.
//
// Of a range of ports ([ruleset.Frontend].LastPort), connections through each of its ports end.
// A range that another Service has, or a single port of another Service, keeps the
// connections to its endpoints, too.
//
// A pod that leaves its Service by a change of its labels vanishes, too, although it
// may still run: do not use this package where operators isolate pods in that way.
//
// # How
//
// A table of nf_tables, named proxier-reset, has a set of pairs of Service address and
// endpoint, and rules in the hooks forward and output that reject packets of these pairs "with
// tcp reset". A pair costs one element, however many connections it has, and the kernel
// removes it after 20 minutes. For a range, the pairs are those of the connections that
// exist after the delay: the package then reads the table of connection tracking once. New
// connections are never affected. The table survives a restart of the process, and [New] reads it.
// Endpoints that vanish while no process runs are not noticed.
//
// Two other ways were tried. Deleting the entry of connection tracking lets the kernel pick the
// connection up in the middle (nf_conntrack_tcp_loose), choose another endpoint, and
// pass on the RST of that one. It does nothing if the Service has no other endpoint, since a
// connection that is established ignores an ICMP error. Doing both is no better than deleting the
// entry, because without it the rules no longer match the connection. The three compare as follows:
//
//   - The agent restarts: the pairs stay in effect, and the next agent adopts them. Of the entries,
//     those that were not deleted yet stay, and the next agent does not find them.
//   - An endpoint returns with its address: its pair is removed before it gets connections, and
//     connections that have not sent anything since go on. Connections without an entry are lost.
//   - 10,000 connections: the pairs are as many as for one connection, and all connections end. Each
//     entry is a deletion of its own, after a dump of the whole table.
//
// Destroying the socket (SOCK_DESTROY) ends connections that are silent, too, but only
// those of processes in the node's own network namespace: see [Config].DestroySockets.
//
// It works with data planes that translate destinations in connection tracking, such as
// packages nftables and iptables. Packets in a flowtable skip the rules until the flow leaves
// it. The package needs CAP_NET_ADMIN and Linux 4.17; on other systems [New] returns a
// [*dataplane.UnsupportedError].
package reset
