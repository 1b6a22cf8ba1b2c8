// Package conntrack ends UDP flows that a change of Services has made stale.
//
//	c, err := conntrack.New(ctx, conntrack.Config{Log: log})
//	if err != nil {
//		return err
//	}
//	defer c.Close()
//	cursor := engine.Attach("nftables", c.Wrap(backend))
//	go c.Run(ctx)
//
// The kernel chooses an endpoint for the first packet of a flow and keeps it for the rest of
// the flow, whatever happens to the rules. A TCP client notices when an endpoint is gone. A
// UDP client that keeps its socket, as resolvers and tunnels do, can send to an address without
// a server for hours, because its packets keep the entry alive. When the entry is deleted, the
// next packet begins a new flow.
//
// A [Cleaner] deletes such entries. Its [Cleaner.Wrap] returns a backend that notes what each delta
// may have made stale, once it is acknowledged. After the last delta of a Sync ([ruleset.Delta].More),
// [Cleaner.Run] reads the table once, in the caller's goroutine, while further deltas are applied. A
// failed clean-up is repeated. An agent with a loop of its own calls [Cleaner.Flush] instead of Run.
// Package conntrack/reset has Wrap and Run, too, and the backends can be wrapped by both.
//
// # What is deleted
//
// The package judges a UDP flow by its original destination and by the source of its
// replies, which is the endpoint. When a change is in effect, the package deletes:
//
//   - flows to a frontend of the Service (cluster IP, external IP, load-balancer IP or
//     NodePort) that were sent to an address that is no longer an endpoint, or to an
//     endpoint that is no longer ready or serving. A terminating endpoint that still serves
//     keeps its flows, and so does an endpoint that this node would no longer choose;
//   - flows that were sent to an endpoint of a Service, or through a frontend of it, that
//     no longer exists;
//   - flows to a frontend that were not sent to any endpoint, because the Service or its
//     endpoints did not exist when the flows began. They are deleted once it has an endpoint;
//   - flows to a port of a range that began before another Service had this port as a single
//     port, or while it had it.
//
// An answer that is under way when its entry is deleted does not reach the client. That concerns
// endpoints that left a Service and still answer.
//
// The endpoint of a flow to a range of ports ([ruleset.Frontend].LastPort) is the address of
// the endpoint with the port that follows from the flow's.
//
// The package leaves alone flows of other protocols and other Services, flows in conntrack
// zones that [Config.Zones] does not name (by default all but zone 0), flows to other hosts'
// ports that happen to have a NodePort's number, and flows to an endpoint that still
// serves. Until a Service's latest change is acknowledged, none of its flows are deleted.
//
// A flow to a NodePort's number belongs to the Service if its destination is one of the node's
// own addresses at which NodePorts answer, or if it was sent to an endpoint that the
// Service just lost. 127.0.0.1 counts as such an address, because NodePorts answer there
// with some backends. The node's own addresses are the addresses of its interfaces and
// [Config.NodePortAddrs]. The package does not find address ranges that a route makes local.
//
// A full delta (the first one after a start, and each resync) makes the package judge every
// UDP flow to a known frontend. It cannot recognize flows to Services that were deleted while
// no agent ran. These expire by themselves, or are deleted when another Service gets the
// frontend.
//
// # Differences from kube-proxy
//
// Like kube-proxy's reconciler (as of Kubernetes 1.37), the package compares the address
// and the port of endpoints, and deletes flows of a Service that has lost its last
// endpoint. The differences are:
//
//   - Flows to an endpoint that is ready but not serving are kept, because new flows may
//     be sent there. kube-proxy deletes them at every clean-up.
//   - Flows to an endpoint through a frontend that the Service lost, such as a removed
//     external IP, and flows of a Service that was deleted are deleted. kube-proxy leaves
//     them alone.
//   - When a Service loses its last endpoint, its flows at NodePorts are deleted, too.
//     kube-proxy leaves these alone.
//   - Flows to a Service without endpoints that were not sent to an endpoint stay until the
//     Service gets one. To delete them earlier would end nothing: the next packet would
//     make the same entry.
//   - A clean-up that a failed sync prevented is done later. kube-proxy drops it.
//   - A flow to a NodePort's number is a flow to the Service only as described above.
//     kube-proxy ignores the destination address.
//
// # Other data planes
//
// The defaults fit a data plane that translates addresses in the kernel's zone 0, as the
// backends of this module do. For other data planes, [Config] has Zones, NodePortAddrs, Filter
// and Table. See the example of Config.
//
// # Requirements and cost
//
// To read the kernel's table, the package needs Linux with CONFIG_NF_CT_NETLINK, and
// CAP_NET_ADMIN. On other systems [New] returns a [*dataplane.UnsupportedError] unless
// [Config.Table] is set. Since Linux 5.8 the kernel can list UDP flows only (CTA_FILTER).
//
// The package reads the table only if a UDP Service changed in a way that may leave stale
// flows. A new endpoint beside others does not. It reads the table once for each family
// concerned, however many Services changed in however many deltas, and keeps only the stale flows in
// memory. Before it deletes flows, it judges them again by what is in effect then, 64 at a time. Apply
// waits for these 64, but not for the table to be read.
//
// After a clean-up, Run pauses for four times as long as it took, and for a minute at most. So a
// tenant whose Services keep changing costs a fifth of a processor's time, and stale flows wait for
// the pause. A clean-up of a small table takes less than a millisecond and is immediate.
//
// The package remembers up to 65,536 frontends with single ports and 1,024 ranges whose flows are
// to be examined, if clean-ups fail again and again. Beyond that it examines every flow instead, so no stale flow is left.
//
// [Tuning] and [Tune] set the limits and timeouts of connection tracking that kube-proxy sets
// at its start.
package conntrack
