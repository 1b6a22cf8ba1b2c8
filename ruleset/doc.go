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
// A Cursor also answers what its backend has acknowledged: by Service port
// ([Cursor.Service]), by frontend ([Cursor.Lookup]) and by endpoint
// ([Cursor.LookupEndpoint]). That is what is in effect, where a [Snapshot] is what is
// wanted.
//
// A Snapshot is the whole ruleset at one moment. Its [Snapshot.Trace] says what
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
//     gets it when it becomes free. The log and an event for the other Service
//     ([tracker.ReasonFrontendConflict]) name the winner.
//   - Nothing is offered before all of the tracker's sources are synced: see
//     [tracker.Config.Sources]. The first Sync that comes too early returns a
//     [*NotSyncedError].
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
//  3. Prove it: package conformance, below this one, judges what the backend writes
//     without a network, and then sends real packets through the data plane. What it
//     cannot do is declared there.
//  4. Put it into an agent, as in the project's README: an Engine, a Cursor, package
//     runner, and as further followers conntrack and runner/health.
//
// Examples/userspace is all of that for a data plane in userspace, and examples/ovs is a
// backend with groups, Services in the keys of frontends and shared endpoints.
//
// What to do with a delta:
//
//  1. If d.Full, find what the data plane has that d.Changes does not call for, such
//     as entries left by an earlier process. Remove frontends among it before step 7,
//     because they may lead to what that step removes, and everything else after
//     step 7. Write everything that is called for, whatever [Change.What] says.
//  2. If d.Node is another pointer than d.OldNode, write what depends on the node:
//     NodePort addresses, Service CIDRs, how pods are recognised.
//  3. Delete the [Change.GoneFrontends] of all changes.
//  4. Write the endpoints: the pools whose bit ([FieldCluster], [FieldLocal]) What
//     has, except those that must be empty or absent now, or [Change.Upserted] (by
//     pool: [Change.UpsertedIn]). Write everything else about a Service that
//     frontends lead to, each part if What has the bit that stands for it: see
//     [Field].
//  5. Write the frontends of all changes whose What has [FieldFrontends], or a
//     further bit that an entry depends on: [FieldAffinity] if it holds the timeout,
//     [FieldHash] and [FieldExt] likewise, [FieldCluster] and [FieldLocal] if it
//     holds the size of a pool or a reference that changes with the pool.
//  6. If the keys of frontends' entries contain their Service, delete the
//     [Change.LostFrontends] of all changes. If they do not, there is nothing to
//     delete: step 5 replaced these entries.
//  7. Delete the endpoints that no frontend leads to any more: [Change.Removed] (by
//     pool: [Change.RemovedFrom]). Empty the pools that must be empty, delete those
//     that must be absent, and delete everything that belongs to a Service whose New
//     is nil.
//
// In this order, each step done for all changes before the next, no frontend
// ever leads to an endpoint that is missing, and no frontend that is wanted before
// and after is missing in between. A data plane with transactions may use any order.
//
// A frontend may move from one Service to another. It is among the
// [Change.TakenFrontends] of the Service that has it now and among the
// LostFrontends of the Service that had it, and never among the GoneFrontends. A
// data plane that does all steps for one Service before it turns to the next may do
// so too, in the order of d.Changes: the Service that takes a frontend over comes
// first. It loses packets only where Services exchange frontends in a circle.
//
// A Service for which a step fails has no further steps in this Apply. Steps 6
// and 7 are also left out for a Service that loses a frontend to a failed one: until
// that one is in place, its clients are served where they were. Name the failed
// Services in a [*PartialError]; the Cursor counts those that lose a frontend to
// them as failed too, and offers both again. If something fails in a full delta, leave
// out steps 6 and 7 for every Service: a frontend of an earlier process may be among
// those that were not replaced. Return another error instead, so that the next delta
// is full and can remove what is stale.
//
// A pool that exists may be empty: there are endpoints, but none this node may use,
// or none at all. [tracker.Selection].UsesCluster and UsesLocal report whether the
// pool exists, which is whether some traffic may be sent to it. Most data planes
// need not tell an empty pool from an absent one, since no frontend's Target is
// either. examples/vendor-patterns/grouptable can do both.
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
// [Frontend.ShortCircuit] says so, and does what Target or Internal says. The endpoint
// is chosen from [Service.Pool], with the one used before if Port.Affinity is set
// and that one is still in the pool. The source is replaced as Masquerade says,
// and always if endpoint and source are the same address. What is addressed to
// none of the frontends is determined by [Node.ServiceCIDRs] and the cluster IPs:
// see Trace.
//
// A data plane in software has [Frontend.Admits] to tell whether a source is let in
// and [LocalTraffic.Recognises] to tell a pod's. IDs are given out afresh by each
// Engine: what outlives the process and is not replaced in one step is better named
// by [tracker.Key].
//
// Apply must be idempotent, since whatever it does not accept is offered again.
// Return a [*PartialError] if single Services fail, and [ErrNeedFull] if the
// tables are not what they should be. Where a Service's own data is needed, a hook
// of [tracker.Config] puts it in Service.Port.Ext or an endpoint's Ext.
//
// A data plane that cannot do everything declares its [Limits]: see [Limiter]. A
// Service that exceeds one is reported to the log and as an event, however the
// backend deals with it.
//
// A data plane that counts connections by Service implements [TrafficReader], too. The
// conformance suite compares what it counted with the connections that were made.
//
// [ByFamily] joins a backend for IPv4 and one for IPv6.
//
// # Tables of a data plane
//
// The packages below this one hold what data planes need beside the deltas: slots for
// pools that are numbered without gaps, ids for IDs that survive a restart, ledger for
// endpoints that Services share, and maglev for tables of consistent hashing.
//
// # Restarts
//
// The first delta of a process is full, and so is the first one after [ErrNeedFull]. A
// backend that can read its tables keeps what is in them:
//
//  1. Before the steps, it reads the tables and hands what it finds to the packages
//     above: (*ids.Allocator).Adopt for each numbered thing, (*slots.Table).Adopt for each
//     entry of a pool, (*ledger.Ledger).Installed for each shared endpoint. It keeps
//     the frontends that it finds in a map.
//  2. It does the steps. IDs and slots come out as they were, (*ledger.Ledger).Claim
//     asks for what is missing, and an entry that equals the one found is not written.
//  3. It removes what was found and not called for: frontends before step 7, everything
//     else after it.
//
// A restart with nothing changed then writes nothing. Names in such tables must not
// contain [Service.ID], which each Engine gives out again: a name is a [tracker.Key], or
// a number from package ids. If the tables have no room for a name, the process keeps
// the numbers in a file of its own. examples/ovs does this for flows, groups and shared
// endpoints, and examples/vendor-patterns/mapplane for numbered pools.
//
// # Coming from a sync loop
//
// For those who have a sync loop with maps of what is installed, MIGRATING.md in this
// folder shows what each of its parts becomes.
package ruleset
