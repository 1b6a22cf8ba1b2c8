// Package ruleset says what a node's data plane must do for every Service, and
// tells each data plane what changed.
//
// An [Engine] takes changed Services from a [tracker.Tracker] and compiles each
// port, in each address family, into a [Service]: where it is reached (its
// frontends), by whom, which endpoints that leads to, when the source address is
// replaced, and what happens where there is no endpoint. Every question of
// Kubernetes semantics ends here; a [Backend] only translates. [Compile] does
// this for one port and is a pure function.
//
// A backend is attached to the Engine and gets a [Cursor]. Each [Cursor.Sync]
// offers it a [Delta] against what it last accepted, and notes what it accepts
// now. So a failed update is retried by calling Sync again, for just the Services
// that failed if the backend can tell; nothing that was half done is forgotten;
// and backends that fail or lag do not concern each other.
//
// A [Snapshot] is the whole ruleset at one moment. Its [Snapshot.Trace] says what
// must become of a given packet, and is the specification in readable form; the
// conformance suite in the folder below judges backends by it.
//
// # What it promises
//
//   - The work of a Sync is proportional to what changed, not to what exists, but
//     for a Full delta.
//   - Everything handed out is immutable: it may be kept and read anywhere.
//   - No two Services that are live, or that some backend may still have, share
//     an ID. IDs are small: about as many as there are Service ports.
//   - No two Services have a frontend with the same address, port and protocol
//     (or the same NodePort). Where two ask for it, a cluster IP goes before
//     anything else and then the lowest [tracker.Key]; the other goes without, and
//     gets it when it becomes free.
//   - Nothing is offered before all of the tracker's sources are synced.
//   - No goroutine is started and no lock is held while a backend works.
//
// # Differences from kube-proxy
//
// These are intended, and the same in every backend:
//
//   - If a Service has loadBalancerSourceRanges that contain one of the node's own
//     addresses, a load-balancer IP also admits connections whose source is the same
//     IP: where the IP is bound to the node, the kernel may choose it as the source.
//     Kube-proxy then admits every load-balancer IP of the Service as a source at
//     each of them.
//   - An address that is both an external IP and a load-balancer IP of a Service is a
//     load-balancer IP, so loadBalancerSourceRanges restrict it. In kube-proxy's
//     iptables mode the rule for the external IP comes first and lets every source in.
//   - [ParseNodePortAddresses] accepts "primary" together with CIDRs, and NodePorts
//     then answer at the addresses of either. Kube-proxy 1.36 accepts "primary" only
//     by itself.
//
// # How to write a backend
//
// The way from nothing to a node agent with a data plane of one's own:
//
//  1. Print what a backend is told: the package example.
//  2. Implement [Backend], a single method. The example MapBackend is a whole one;
//     examples/vendor-patterns has one that writes entry by entry and may fail at
//     any (mapplane) and one with endpoints that Services share (grouptable).
//  3. Prove it: package conformance, below this one, sends real packets through it.
//     What it cannot do is declared there.
//  4. Put it into an agent, as in the project's README: an Engine, a Cursor, package
//     runner, and as further followers conntrack and runner/health.
//
// Examples/userspace is all of that for a data plane in userspace.
//
// What to do with a delta:
//
//  1. If d.Full, find what you have that d.Changes does not call for, such as
//     what an earlier process left, and remove it at the end; put in everything
//     else, whatever [Change.What] says.
//  2. Bring in d.Node if it is another pointer than d.OldNode: NodePort addresses,
//     Service CIDRs, how pods are told.
//  3. Take away the [Change.GoneFrontends] of all changes.
//  4. Bring in the endpoints: pools that What says differ, or [Change.Upserted] (by
//     pool: [Change.UpsertedIn]).
//  5. Bring in the frontends of all changes whose What has [FieldFrontends].
//  6. Take away the endpoints nobody leads to any more: [Change.Removed] (by pool:
//     [Change.RemovedFrom]), and all that belongs to a Service whose New is nil.
//
// In this order, each step done for all changes before the next, no frontend
// ever leads to an endpoint that is not there. A data plane with transactions may
// use any order. A frontend that moves from one Service to another is not among
// the GoneFrontends: the step that brings it in replaces it.
//
// A hook of the tracker's may give endpoints weights and have them chosen by a hash.
// Every endpoint in a pool has a weight of at least 1, and its share of the pool's
// new connections is its share of the pool's weights. One of weight 0 is in no
// pool: it counts as one that neither is ready nor serves, for every question that
// asks for endpoints, so that a Service with no others refuses new connections;
// but it is among [Service.Endpoints], and connections to it live on. If
// [Service.Hash] says so, the endpoint follows from the connection's source:
// [Service.Maglev] is the table in which to look it up, the same on every node that
// has the same pool and [Node.HashSeed]. Nodes do not have the same pool where a
// policy of Local or topology hints choose by node. Client affinity goes before
// the hash: a client that is remembered stays, one that is not gets the endpoint
// that the hash says.
//
// For each connection, a frontend first drops sources that [Frontend.Sources]
// does not contain. It then looks at where the connection started, if
// [Frontend.ShortCircuit] says so, and does what Target or Near says. The endpoint
// is chosen from [Service.Pool], with the one used before if Port.Affinity is set
// and that one is still in the pool. The source is replaced as Masquerade says,
// and always if endpoint and source are the same address. What is addressed to
// none of the frontends is settled by [Node.ServiceCIDRs] and the cluster IPs:
// see Trace.
//
// A data plane in software has [Frontend.Admits] to tell whether a source is let in
// and [LocalTraffic.Recognises] to tell a pod's. IDs are given out anew by each
// Engine: what outlives the process and is not replaced in one step is better named
// by [tracker.Key].
//
// Apply must be idempotent, since whatever it does not accept is offered again.
// Return a [*PartialError] if single Services fail, and [ErrNeedFull] if the
// tables are not what they should be. Where a Service's own data is needed, a hook
// of [tracker.Config] puts it in Service.Port.Ext or an endpoint's Ext.
//
// [ByFamily] joins a backend for IPv4 and one for IPv6.
package ruleset
