// Package conntrack ends UDP flows that a change of Services has made stale.
//
//	c, err := conntrack.New(ctx, conntrack.Config{Log: log})
//	...
//	defer c.Close()
//	cursor := engine.Attach("nftables", c.Wrap(backend))
//	go c.Run(ctx)
//
// The kernel chooses an endpoint for the first packet of a flow and keeps it for the rest of the flow, whatever
// happens to the rules. When the entry in connection tracking is deleted, the next packet begins a new flow.
//
// [Cleaner.Wrap] returns a backend that notes what each acknowledged delta may have made stale. After the last delta
// of a Sync, [Cleaner.Run] reads the table once and deletes such entries, while further deltas are applied. An agent
// with a loop of its own calls [Cleaner.Flush] instead.
//
// # What is deleted
//
// A flow's frontend is its original destination, and its endpoint the source of its replies. When a change is in
// effect, the package deletes:
//
//   - flows to a frontend of the Service whose endpoint the Service no longer has, or is no longer ready or serving;
//   - flows to an endpoint of the Service, or through a frontend of it, that no longer exists;
//   - flows to a frontend that were not sent to any endpoint, once the Service has an endpoint.
//
// An answer that is under way when its entry is deleted does not reach the client. A flow stays if its endpoint still
// serves, even if the endpoint terminates or this node would no longer choose it.
// The package ignores other protocols, other Services, and conntrack zones outside of [Config.Zones] (by default 0).
//
// A flow to a NodePort's number belongs to the Service if its destination is 127.0.0.1 or one of the node's addresses
// at which NodePorts answer (its interfaces' and [Config.NodePortAddrs]), or if the Service just lost its endpoint.
//
// After a full delta the package judges every UDP flow to a known frontend. Flows to Services that were deleted while
// no agent ran expire by themselves, or are deleted when another Service gets the frontend.
//
// kube-proxy also deletes flows to an endpoint that is ready but not serving. It keeps flows through a frontend that
// the Service lost, of a deleted Service, and at the NodePorts of a Service that lost its last endpoint.
//
// # Requirements and cost
//
// The kernel's table needs Linux with CONFIG_NF_CT_NETLINK, and CAP_NET_ADMIN. On other systems [New] returns a
// [*dataplane.UnsupportedError] unless [Config.Table] is set.
//
// The package reads the table once for each family, if a change may leave stale UDP flows. Apply waits at most for the
// deletion of 64 flows. After a clean-up, Run pauses for four times as long as it took, and for a minute at most, so a
// tenant's changes cost at most a fifth of a processor.
package conntrack
