// Package conntrack ends UDP flows that a change of Services has left behind.
//
// The kernel chooses an endpoint for the first packet of a flow and remembers the
// choice for the rest of it, whatever becomes of the rules. TCP finds out when an
// endpoint is gone. A UDP client that keeps its socket, as resolvers and tunnels
// do, may go on for hours sending to where nobody listens: its packets keep the
// entry alive. Deleting the entry makes the next packet a first one.
//
// # Use
//
// A [Cleaner] follows a backend: [After] makes one of the two.
//
//	c, err := conntrack.New(conntrack.Config{})
//	...
//	defer c.Close()
//	cur := engine.Attach("nftables", conntrack.After(nft, c))
//	r, err := runner.New(cfg, func(ctx context.Context) error {
//		return errors.Join(cur.Sync(ctx), c.Flush(ctx))
//	})
//
// The clean-up is done when the rules are in effect, and its failure is none of
// the backend's: the rules are acknowledged and the clean-up is kept for the next
// Apply. That may be far off, so the function above calls Flush too. It does
// nothing if nothing is pending, and its error makes the runner retry. An agent
// whose syncs must not wait for a clean-up calls [Cleaner.Record] from its backend
// and [Cleaner.Flush] when it likes.
//
// # What is deleted
//
// A UDP flow is judged by its original destination and by where its replies come
// from, which shows the endpoint it was sent to. When a change is in effect,
// these go:
//
//   - flows to a frontend of the Service (cluster IP, external IP, load-balancer IP
//     or NodePort) that were sent to what is no endpoint of it any more, or one
//     that is neither ready nor serving any more. An endpoint that terminates but
//     still serves keeps its flows, and so does one that this node would not choose
//     today;
//   - flows that were sent to an endpoint of a Service or through a frontend of it
//     that no longer exists;
//   - flows to a frontend that were not sent to any endpoint, because there was
//     none or no such Service when they began, once there is one.
//
// Flows of other protocols, of other Services, in conntrack zones that
// [Config.Zones] does not name (by default all but zone 0), to other hosts' ports
// that happen to have a NodePort's number, and flows to an endpoint that still
// serves are not touched, nor is a flow of which
// this cannot be told: while a Service's last change is not acknowledged its flows
// are let be. A flow to a NodePort's number is taken for the Service's if its
// destination is one of the node's own addresses at which NodePorts answer, or if
// it was sent to an endpoint that the Service just lost. 127.0.0.1 counts as such an
// address, because NodePorts answer there with some backends. The node's own addresses
// are those of its interfaces and [Config.NodePortAddrs]; address ranges made local
// by a route are not known.
//
// A full delta (the first one after a start, and each resync) has every UDP flow
// to a known frontend judged. Flows to Services that were deleted while no agent
// ran cannot be recognised and expire by themselves.
//
// # Differences from kube-proxy
//
// Like kube-proxy's reconciler (as of Kubernetes 1.36), the package compares the
// address and the port of endpoints. In these points it differs:
//
//   - Flows to an endpoint that is ready but not serving are kept, because new flows
//     may be sent there. Kube-proxy keeps flows to serving endpoints only and deletes
//     these at every clean-up.
//   - Flows through a frontend that the Service gave up, such as an external IP that
//     was removed, are deleted if they were sent to one of its endpoints. Kube-proxy
//     only looks at frontends that exist, and leaves these flows alone.
//   - Flows of a Service that was deleted, or has lost its last endpoint, are deleted.
//     Kube-proxy leaves them alone.
//   - A clean-up that a failed sync prevented is done later. Kube-proxy forgets it.
//   - A flow to a NodePort's number is a flow to the Service only as described above.
//     Kube-proxy takes any destination address for the Service's.
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
// # What it costs
//
// Nothing, unless a UDP Service changed in a way that may leave flows behind: a
// new endpoint beside others does not. Otherwise the table is read once for each
// family concerned, however many Services changed. Flows are decoded as they come
// and judged one by one; only the stale ones are kept, until they are deleted.
// Kernels from 5.8 on report UDP flows alone (CTA_FILTER). See the benchmarks.
//
// # Setting up connection tracking
//
// [Tuning] is what else kube-proxy does to the kernel's table at start: its limit,
// the size of its hash table, and timeouts. [Tuning.Settings] computes the parameters,
// and [Tune] writes those that differ.
//
// # System
//
// The kernel's table is reached by netlink: Linux with CONFIG_NF_CT_NETLINK, and
// CAP_NET_ADMIN. Elsewhere [New] returns a [*ruleset.UnsupportedError], unless
// [Config.Table] brings another table.
package conntrack
