// Package ruleset compiles Kubernetes Services into the rules of a node's data plane and passes each change to the data
// planes attached to it.
//
//	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
//	...
//	cursor := engine.Attach("print", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
//		for _, c := range d.Changes {
//			fmt.Println(c.Key, "differs in", c.Fields)
//		}
//		return nil
//	}))
//	err = cursor.Sync(ctx) // package runner calls it after each change
//
// An [Engine] takes changed Services from a [tracker.Tracker]. It compiles each port, in each address family, into
// a [Port]: its frontends, the sources they admit, and the endpoints behind them. A [Backend] only translates.
//
// [Engine.Attach] returns a [Cursor] for a backend. Each [Cursor.Sync] offers the backend a [Delta] relative to what
// the backend last acknowledged. Backends are independent: one may fail or lag behind.
//
// A [Snapshot] is the whole ruleset at one time. [Snapshot.Trace] specifies what must happen to a given packet, and
// package conformance tests backends against it.
//
// [BACKEND.md] explains how to write a backend and has a glossary. [MIGRATING.md] maps the parts of a loop like
// kube-proxy's to this package.
//
// # Guarantees
//
//   - The work of a Sync is proportional to the changes, except for a Full delta.
//   - Published values are immutable. Callers may keep them and read them anywhere.
//   - No two Services have the same frontend, and every node chooses the same owner: a cluster IP wins over a
//     load-balancer IP, which wins over an external IP; then the Service that was created first wins, then the lowest
//     [tracker.Key]. Ports of the node go to the Service that was created first, too: NodePorts, health-check node ports,
//     and ports at external and load-balancer IPs that are [tracker.NodeInfo].Addresses. An event with
//     [tracker.ReasonFrontendConflict] names the winner.
//   - A [Budget] bounds the endpoints of a Service port and the cost of a namespace and of the node, and keeps cheap
//     changes from waiting behind expensive ones.
//   - The package starts no goroutine. While a backend runs, the Engine is not locked.
//
// # Differences from kube-proxy
//
// They are the same in every backend:
//
//   - If loadBalancerSourceRanges contain one of the node's addresses, a load-balancer IP also admits itself as the
//     source: if it is bound to the node, the kernel may choose it. kube-proxy then admits all IPs of the Service.
//   - loadBalancerSourceRanges also restrict an external IP that is a load-balancer IP. kube-proxy's mode iptables does not.
//   - NodePorts at loopback addresses ([NodePorts].Loopback) are for TCP and UDP. kube-proxy 1.37 serves TCP there.
//     Packets of other hosts to them are for no Service. kube-proxy's mode iptables forwards them.
//   - A younger Service's external IP at an address of the node does not take a NodePort.
//
// [BACKEND.md]: https://github.com/go-proxier/proxier/blob/main/ruleset/BACKEND.md
// [MIGRATING.md]: https://github.com/go-proxier/proxier/blob/main/ruleset/MIGRATING.md
package ruleset
