// Package ruleset compiles Kubernetes Services into the rules of a node's data plane
// and passes each change to the data planes attached to it.
//
//	engine, err := ruleset.NewEngine(ruleset.Config{Tracker: t})
//	...
//	cursor := engine.Attach("print", ruleset.BackendFunc(
//		func(_ context.Context, d *ruleset.Delta) error {
//			for _, c := range d.Changes {
//				fmt.Println(c.Key, "differs in", c.Fields)
//			}
//			return nil
//		}))
//	err = cursor.Sync(ctx) // package runner calls it after each change
//
// An [Engine] takes changed Services from a [tracker.Tracker]. It compiles each port,
// in each address family, into a [Port]: its frontends, the sources they admit, the
// endpoints behind them, when the source address is replaced, and what happens without
// endpoints. All Kubernetes semantics end here; a [Backend] only translates. [Compile]
// does this for one port and is a pure function.
//
// [Engine.Attach] returns a [Cursor] for a backend. Each [Cursor.Sync] offers the
// backend a [Delta] relative to what the backend last accepted. After a failure the
// next Sync offers the failed Services again, together with newer changes. Backends
// are independent: one may fail or lag behind. [Engine.AttachPart] is for data planes that
// divide the Services between them. [Cursor.Port], [Cursor.Lookup] and
// [Cursor.LookupEndpoint] return what the backend has accepted, and [Cursor.Status] what holds
// up a Service.
//
// A [Snapshot] is the whole ruleset at one time. [Snapshot.Trace] returns what must
// happen to a given packet. It is the specification, and package conformance tests
// backends against it.
//
// # Guarantees
//
//   - The work of a Sync is proportional to the changes, except for a Full delta.
//   - Published values are immutable. Callers may keep them and read them anywhere.
//   - IDs are unique among the Ports that exist or that a backend may still have.
//     They are small: the highest is about the number of Ports.
//   - No two Services have the same frontend. If several ask for one, a cluster IP wins
//     over a load-balancer IP, which wins over an external IP; then the Service that was
//     created first wins ([tracker.ServicePort].Created), then the lowest [tracker.Key].
//     So a new Service takes nothing from one that exists, and an external IP takes
//     neither a cluster IP nor a load-balancer IP. An older Service can still take an
//     external IP from a younger one when it is edited, because nothing records when a
//     Service got an address. The loser gets the frontend when the winner releases it.
//     A log line and an event with [tracker.ReasonFrontendConflict] name the winner.
//   - A range of ports ([tracker.ServicePort].LastPort) takes no single port and no NodePort
//     from another Service: it applies to the packets that they do not match. The exception is
//     a single port at an external IP that is also a cluster IP or load-balancer IP with a
//     range; the range keeps it. Ranges that overlap at one address do not share it: in the
//     order above, the first one wins, and the others get nothing at this address.
//   - A [Budget] bounds the cost of a Service, of a namespace and of the node, and keeps cheap
//     changes from waiting behind expensive ones. Within a namespace the oldest Services come
//     first, and a namespace that needs less than an equal part of all gets what it needs.
//   - No backend is called before all kinds of objects of the tracker are synced
//     ([tracker.Config].Kinds). Until then each Sync returns [ErrNotSynced].
//   - The package starts no goroutine. While a backend runs, the Engine is not locked.
//
// # Applying a delta
//
// Apply performs these steps, each for all changes before the next:
//
//  1. If d.Full, find what the data plane has and d.Changes does not ask for. Remove
//     such frontends before step 7 and everything else after it. Write everything that
//     d.Changes asks for, whatever [Change].Fields is.
//  2. If d.Node and d.OldNode are different pointers, write what depends on the node.
//  3. Delete the [Change.GoneFrontends].
//  4. Write endpoints ([Change.Upserted]), and the other parts of a Service that frontends
//     refer to, if Fields has their [Field].
//  5. Write frontends if Fields has [FieldFrontends] or another Field that the entry
//     contains.
//  6. If the keys of frontend entries contain the Service, delete the
//     [Change.LostFrontends].
//  7. Delete endpoints without a frontend ([Change.Removed]). Empty pools that exist
//     without endpoints. Delete pools that do not exist any more ([Port.HasPool]),
//     addresses without a frontend, and everything of a Service whose New is nil.
//
// Package driver performs these steps for data planes without transactions. In this order
// a frontend never refers to a missing endpoint, and a frontend that stays is never
// missing. A data plane with transactions may use any order. Apply must be idempotent. It
// returns a [*PartialError] if single Services fail, and [ErrNeedFull] if the tables are not
// in the expected state. BACKEND.md in this directory has the details, the path of a packet,
// and how a restarted process keeps its tables.
//
// A data plane with limits implements [Limiter]. Package dataplane has the contract of
// backends whose rules other processes can alter, and joins a backend for IPv4 and one
// for IPv6.
//
// # Differences from kube-proxy
//
// They are intended and the same in every backend:
//
//   - If loadBalancerSourceRanges contain one of the node's addresses, a load-balancer
//     IP also admits itself as the source: if the IP is bound to the node, the kernel may
//     choose it. kube-proxy then admits every load-balancer IP of the Service at each.
//   - loadBalancerSourceRanges restrict an address that is both an external IP and a
//     load-balancer IP. kube-proxy's iptables mode admits every source there.
//   - NodePorts at loopback addresses ([NodePorts].Loopback) are for TCP and UDP.
//     kube-proxy 1.37 serves TCP there, in mode nftables.
//   - One address and port that several Services ask for belongs to the same Service on
//     every node; see Guarantees. In kube-proxy it differs by node and by sync.
//
// # See also
//
// Package driver has gapless pools, numbers that survive a restart and a ledger of shared
// endpoints, too. Package maglev has tables for consistent hashing.
// Package placement computes the rules of many nodes in one process.
// MIGRATING.md shows how the parts of a kube-proxy-style sync loop map to this package.
package ruleset
