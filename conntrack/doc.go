// Package conntrack ends UDP flows that a change of Services has made stale.
//
//	c, err := conntrack.New(ctx, conntrack.Config{Log: log})
//	...
//	defer c.Close()
//	cursor := engine.Attach("nftables", c.Wrap(backend))
//	go c.Run(ctx)
//
// The kernel chooses an endpoint for the first packet of a flow and keeps it for the rest of the flow, whatever
// happens to the rules. A UDP client that keeps its socket can send to an address without a server for hours. When
// the entry in connection tracking is deleted, the next packet begins a new flow.
//
// [Cleaner.Wrap] returns a backend that notes what each acknowledged delta may have made stale. After the last delta
// of a Sync, [Cleaner.Run] reads the table once and deletes such entries, while further deltas are applied. A failed
// clean-up is repeated. An agent with a loop of its own calls [Cleaner.Flush] instead of Run.
//
// # What is deleted
//
// The package judges a UDP flow by its original destination and by the source of its replies, which is the endpoint.
// When a change is in effect, the package deletes:
//
//   - flows to a frontend of the Service that were sent to an address that is no longer an endpoint, or to an
//     endpoint that is no longer ready or serving;
//   - flows that were sent to an endpoint of a Service, or through a frontend of it, that no longer exists;
//   - flows to a frontend that were not sent to any endpoint, once the Service has an endpoint.
//
// An answer that is under way when its entry is deleted does not reach the client. A flow stays if its endpoint still
// serves, even if the endpoint terminates or this node would no longer choose it. The package ignores other
// protocols, other Services, and conntrack zones outside of [Config.Zones] (by default zone 0). Until a Service's
// latest change is acknowledged, none of its flows are deleted.
//
// A flow to a NodePort's number belongs to the Service if its destination is an own address of the node at which
// NodePorts answer, or 127.0.0.1, or if it was sent to an endpoint that the Service just lost. The node's own
// addresses are those of its interfaces and [Config.NodePortAddrs].
//
// A full delta makes the package judge every UDP flow to a known frontend. Flows to Services that were deleted while
// no agent ran expire by themselves, or are deleted when another Service gets the frontend.
//
// # Differences from kube-proxy's reconciler
//
//   - Flows to an endpoint that is ready but not serving are kept, because new flows may be sent there.
//   - Flows through a frontend that the Service lost, flows of a deleted Service, and flows at the NodePorts of a
//     Service that lost its last endpoint are deleted. A NodePort's flows are recognized by the address, too.
//   - Flows to a Service without endpoints that were not sent to an endpoint stay until the Service gets one.
//   - A clean-up that a failed sync prevented is done later.
//
// # Requirements and cost
//
// To read the kernel's table, the package needs Linux with CONFIG_NF_CT_NETLINK, and CAP_NET_ADMIN. On other systems
// [New] returns a [*dataplane.UnsupportedError] unless [Config.Table] is set. Since Linux 5.8 the kernel can list UDP
// flows only. For data planes that do not translate in the kernel's zone 0, see the example of Config.
//
// The package reads the table once for each family, if a UDP Service changed in a way that may leave stale flows; a
// new endpoint beside others does not. It judges 64 flows at a time again before it deletes them, and Apply waits for
// these alone. After a clean-up, Run pauses for four times as long as it took, and for a minute at most: a tenant
// whose Services keep changing costs a fifth of a processor's time. If clean-ups keep failing, the package remembers
// 65,536 frontends, and beyond that examines every flow.
package conntrack
