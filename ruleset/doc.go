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
// a [Port]: its frontends, the sources they admit, the endpoints behind them, and what happens without endpoints.
// All Kubernetes semantics end here; a [Backend] only translates.
//
// [Engine.Attach] returns a [Cursor] for a backend. Each [Cursor.Sync] offers the backend a [Delta] relative to what
// the backend last accepted. After a failure the next Sync offers the failed Services again, together with newer
// changes. Backends are independent: one may fail or lag behind. [Cursor.Port] and [Cursor.Lookup] return what the
// backend has accepted, and [Cursor.Status] what holds up a Service.
//
// A [Snapshot] is the whole ruleset at one time. [Snapshot.Trace] returns what must happen to a given packet. It is
// the specification, and package conformance tests backends against it.
//
// # Guarantees
//
//   - The work of a Sync is proportional to the changes, except for a Full delta.
//   - Published values are immutable. Callers may keep them and read them anywhere.
//   - IDs are unique among the Ports that exist or that a backend may still have, and small.
//   - No two Services have the same frontend. If several ask for one, a cluster IP wins over a load-balancer IP,
//     which wins over an external IP; then the Service that was created first wins ([tracker.ServicePort].Created),
//     then the lowest [tracker.Key]. An older Service can take an external IP from a younger one when it is edited.
//     The loser gets the frontend when the winner releases it. A log line and an event with
//     [tracker.ReasonFrontendConflict] name the winner.
//   - A port of the node belongs to the Service that was created first, too: a NodePort, a health-check node port, and
//     the port of an external or load-balancer IP that is one of [tracker.NodeInfo].Addresses. An older such IP takes a
//     NodePort at that address only. A Service that loses its health-check node port has none in its [Port].Spec.
//   - A [Budget] bounds the endpoints of a Service port and the cost of a namespace and of the node, and keeps cheap
//     changes from waiting behind expensive ones.
//   - Until all kinds of objects of the tracker are synced ([tracker.Config].Kinds), each Sync returns [ErrNotSynced].
//   - The package starts no goroutine. While a backend runs, the Engine is not locked.
//
// # Writing a backend
//
// [Backend] has the contract. BACKEND.md in this directory has the order of writes, the path of a packet, and how a
// restarted process keeps its tables. MIGRATING.md shows how the parts of a kube-proxy-style sync loop map to this
// package. Package driver performs the writes for data planes without transactions, package maglev has tables for
// consistent hashing, and package placement computes the rules of many nodes.
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
//   - One address and port that several Services ask for belongs to the same Service on every node.
package ruleset
