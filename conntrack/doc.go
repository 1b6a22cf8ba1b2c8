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
//     that does not serve any more. An endpoint that terminates but still serves
//     keeps its flows, and so does one that this node would not choose today;
//   - flows that were sent to an endpoint of a Service or through a frontend of it
//     that no longer exists;
//   - flows to a frontend that were not sent to any endpoint, because there was
//     none or no such Service when they began, once there is one.
//
// Flows of other protocols, of other Services, in other conntrack zones than the
// default one, to other hosts' ports that happen to have a NodePort's number, and
// flows to an endpoint that still serves are not touched, nor is a flow of which
// this cannot be told: while a Service's last change is not acknowledged its flows
// are let be. A flow to a NodePort's number is taken for the Service's if its
// destination is one of the node's own addresses at which NodePorts answer, or if
// it was sent to an endpoint that the Service just lost. 127.0.0.1 counts as such an
// address, because NodePorts answer there with some backends. The node's own addresses
// are those of its interfaces; address ranges made local by a route are not known.
//
// This goes further than kube-proxy's reconciler, which leaves alone the flows of
// a Service that was deleted or has lost its last endpoint, forgets a clean-up
// when a sync fails, compares addresses without ports, and takes a NodePort's
// number at any destination for the Service.
//
// A full delta (the first one after a start, and each resync) has every UDP flow
// to a known frontend judged. Flows to Services that were deleted while no agent
// ran cannot be recognised and expire by themselves.
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
// the size of its hash table, and timeouts. [Tuning.Settings] plans, [Tune] writes
// what differs.
//
// # System
//
// The kernel's table is reached by netlink: Linux with CONFIG_NF_CT_NETLINK, and
// CAP_NET_ADMIN. Elsewhere [New] returns a [*NotSupportedError], unless
// [Config.Table] brings another table.
package conntrack
