// Package conntrack ends UDP flows that a change of Services has left behind.
//
// The kernel chooses an endpoint for the first packet of a flow and remembers the choice
// for the rest of the flow, whatever happens to the rules. A TCP client notices when an
// endpoint is gone. A UDP client that keeps its socket, as resolvers and tunnels do, can
// send to an address without a server for hours, because its packets keep the entry alive.
// When the entry is deleted, the next packet begins a new flow.
//
// # Use
//
// A [Cleaner] follows a backend. [After] joins the two.
//
//	c, err := conntrack.New(conntrack.Config{})
//	...
//	defer c.Close()
//	cur := engine.Attach("nftables", conntrack.After(nft, c))
//	r, err := runner.New(cfg, func(ctx context.Context) error {
//		return errors.Join(cur.Sync(ctx), c.Flush(ctx))
//	})
//
// The clean-up runs when the rules are in effect. If it fails, the rules are acknowledged
// all the same, and the clean-up is kept for the next Apply. That may be far off, so the
// function above calls Flush, too: Flush does nothing if nothing is pending, and its error
// makes the runner retry. An agent whose syncs must not wait for a clean-up calls
// [Cleaner.Record] from its backend and [Cleaner.Flush] when it likes.
//
// # What is deleted
//
// The package judges a UDP flow by its original destination and by the source of its
// replies, which shows the endpoint. When a change is in effect, it deletes:
//
//   - flows to a frontend of the Service (cluster IP, external IP, load-balancer IP or
//     NodePort) that were sent to an address that is no longer an endpoint, or to an
//     endpoint that is neither ready nor serving any more. An endpoint that terminates but
//     still serves keeps its flows, and so does one that this node would not choose today;
//   - flows that were sent to an endpoint of a Service, or through a frontend of it, that
//     no longer exists;
//   - flows to a frontend that were not sent to any endpoint, because there was none or no
//     such Service when they began, once there is one.
//
// It leaves alone flows of other protocols and other Services, flows in conntrack zones
// that [Config.Zones] does not name (by default all but zone 0), flows to other hosts'
// ports that happen to have a NodePort's number, and flows to an endpoint that still
// serves. While a Service's latest change is not acknowledged, none of its flows are
// deleted.
//
// A flow to a NodePort's number is the Service's if its destination is one of the node's
// own addresses at which NodePorts answer, or if it was sent to an endpoint that the
// Service just lost. 127.0.0.1 counts as such an address, because NodePorts answer there
// with some backends. The node's own addresses are those of its interfaces and
// [Config.NodePortAddrs]; address ranges that a route makes local are not known.
//
// A full delta (the first one after a start, and each resync) judges every UDP flow to a
// known frontend. Flows to Services that were deleted while no agent ran cannot be
// recognised and expire by themselves.
//
// # Differences from kube-proxy
//
// Like kube-proxy's reconciler (as of Kubernetes 1.36), the package compares the address
// and the port of endpoints. The differences are:
//
//   - Flows to an endpoint that is ready but not serving are kept, because new flows may
//     be sent there. kube-proxy deletes them at every clean-up.
//   - Flows to an endpoint through a frontend that the Service gave up, such as a removed
//     external IP, and flows of a Service that was deleted or lost its last endpoint are
//     deleted. kube-proxy leaves them alone.
//   - A clean-up that a failed sync prevented is done later. kube-proxy drops it.
//   - A flow to a NodePort's number is a flow to the Service only as described above.
//     kube-proxy ignores the destination address.
//
// # Other data planes' flows
//
// The defaults fit a data plane that translates addresses in the kernel's zone 0, as
// the ones of this module do. For others, [Config] has
//
//   - Zones: a data plane on Open vSwitch tracks connections in zones of its own.
//   - NodePortAddrs: virtual addresses at which NodePorts answer inside the data
//     plane, and local addresses that no interface has.
//   - Filter: it sees the Service, with the extension that a hook of the tracker put
//     there, and decides which of its stale flows may be ended.
//   - Table: any other table, or the kernel's ([OpenKernelTable]) with something in
//     front of it.
//
// For example, for a data plane with one zone for each family and a virtual NodePort
// address in each:
//
//	c, err := conntrack.New(conntrack.Config{
//		Zones: []uint16{65520, 65510},
//		NodePortAddrs: []netip.Addr{
//			netip.MustParseAddr("169.254.0.252"), netip.MustParseAddr("fc01::aabb:ccdd:eefe"),
//		},
//		Filter: func(s *ruleset.Service, f conntrack.Flow) bool {
//			opts, _ := tracker.ExtAs[options](s.Port.Ext)
//			return !opts.keepFlows
//		},
//	})
//
// # Cost
//
// The table is read only if a UDP Service changed in a way that may leave flows behind,
// which an endpoint beside others does not: then once for each family concerned, however
// many Services changed. Flows are decoded and judged one by one, and only the stale ones
// are kept until they are deleted. Kernels from 5.8 on report UDP flows alone (CTA_FILTER).
//
// # Setting up connection tracking
//
// [Tuning] is what kube-proxy changes of connection tracking at its start: the limit, the
// size of the hash table, and timeouts. [Tuning.Settings] computes the parameters, and
// [Tune] writes those that differ.
//
// # Requirements
//
// The kernel's table is read over netlink: Linux with CONFIG_NF_CT_NETLINK, and
// CAP_NET_ADMIN. Elsewhere [New] returns a [*ruleset.UnsupportedError], unless
// [Config.Table] is another table.
package conntrack
