// Package tracker turns Kubernetes Services and EndpointSlices into plain values
// and says what has changed. It is what every kind of service proxy, DNS server
// or policy agent needs first, and knows nothing of kernels.
//
//	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
//	...
//	t.SetService(service) // from a watch, a file, a test
//	t.SetSlice(slice)
//	t.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
//	for _, u := range t.Take().Updates {
//		fmt.Println(u.Name, u.Ports)
//	}
//
// [Tracker] takes objects as they are now, and their names when they are gone; it
// does not need to be told what they were. [Tracker.Take] yields each Service that
// may differ, whole, in every family. [Select] chooses from a port's endpoints
// those that a node may use. [ServiceChangeTracker] and [EndpointsChangeTracker]
// are its halves, for those who need only one.
//
// # What it promises
//
// Values that are handed out ([ServicePort], [Endpoint], slices of them) are never
// changed afterwards: they may be kept, and read from any goroutine. Objects that
// are handed in are neither kept nor changed, nor is any part of their memory
// kept. What an update leaves as it was keeps its pointer and its slice.
//
// A change is one of what the values say: rewriting or reordering an object, or
// changing what no value tells, is none.
//
// What cannot be used in an object costs only itself, is told to [Config.Log] and
// [Config.Events], and never panics.
//
// Incremental work is that of the object that changed and, at the Take, of its
// Service. Nothing else that exists is looked at, except by [Tracker.SetNode] when
// the node's name or zone changes.
//
// # Which Services have ports
//
// Those that [Selector] selects and that have a cluster IP; never those of type
// ExternalName. Each entry of spec.ports makes one [ServicePort] in each family
// the Service has. Beyond what the fields of ServicePort say:
//
//   - Addresses may be written with leading zeros ([endpointslice.ParseAddr]), and
//     source ranges with spaces around them. Unspecified and multicast addresses
//     are not accepted.
//   - A port whose protocol is not TCP, UDP or SCTP, whose number is out of range,
//     or which repeats the name or number of one before it with the same protocol,
//     is left out.
//   - Load-balancer addresses count whatever spec.loadBalancerClass and
//     spec.type, as in kube-proxy; spec.externalTrafficPolicy Local counts only
//     for NodePort and LoadBalancer Services and those with external IPs, and
//     spec.healthCheckNodePort only for LoadBalancer Services that have it.
//   - Source ranges restrict the family they are of. If there are some but none
//     of a family, the family's load-balancer addresses are open to all, as in
//     kube-proxy. But if some could not be parsed and none is left for a family,
//     they are closed to all: ServicePort.SourceRanges is then an address that no
//     packet comes from. kube-proxy ignores a range that it cannot parse, which
//     opens what was meant to be restricted.
//
// # How endpoints are merged
//
// See package [endpointslice]. Slices of a Service that is not there, or not
// selected, are kept for when it is.
//
// # Extensions
//
// [Config.OnService] and [Config.OnEndpoint] see the objects themselves and may
// change the values made from them, or add to them: see [Extension].
//
// # Coming from kube-proxy's trackers
//
// For those who carry a copy of kube-proxy's trackers, or import them. What it was
// called there, what it is here, and what is different:
//
//   - ServicePortName: [ServicePortName], and [Key] with the address family.
//   - ServicePort, BaseServicePortInfo: [ServicePort], a struct whose fields are
//     exported, for tests and hooks to write. String, ExternallyAccessible,
//     UsesClusterEndpoints and UsesLocalEndpoints are methods as before; addresses
//     are netip's.
//   - Endpoint, BaseEndpointInfo: [Endpoint], likewise. IsLocal is asked with a
//     node's name, since nothing here belongs to one node.
//   - makeServicePortFunc, makeEndpointFunc: [Config.OnService] and
//     [Config.OnEndpoint]. What your type had besides goes into Ext, an
//     [Extension], and comes out by [ExtAs]. No type assertions on every use, and
//     a change of it is noticed by its Equal, where one of an interface value was
//     noticed by comparing pointers.
//   - ServiceChangeTracker.Update(previous, current): the same; or Set and Delete,
//     which need no previous. It reports whether this call changed anything.
//   - ServicePortMap.Update(tracker), with processServiceMapChange:
//     [ServiceChangeTracker.Take] yields old and new of each Service that differs.
//     Nothing has to be merged, and what is yielded never changes.
//     [ServiceChangeTracker.Map] is the whole map, if it must be.
//   - HealthCheckNodePorts: the same.
//   - EndpointsChangeTracker.EndpointSliceUpdate(slice, remove): the same; or Set
//     and Delete.
//   - EndpointsMap.Update(tracker): [EndpointsChangeTracker.Take].
//     LastChangeTriggerTimes are the Triggers of each change; whether flows are to
//     be cleaned up is found by package conntrack, which does not forget it when a
//     sync fails.
//   - LocalReadyEndpoints: the same, asked for a node. Kube-proxy's tracker has one
//     family; a tracker with both counts the family with more.
//   - EndpointSliceCache: package endpointslice. It compares what slices say of
//     endpoints, not whole objects, and may be used with an endpoint type of yours.
//   - CategorizeEndpoints(endpoints, service, node, labels): [Select]. Its nil for
//     "not used" and empty for "none" are the booleans [Selection].UsesCluster and
//     UsesLocal.
//   - Two trackers, one for each family, behind a meta proxier: one [Tracker] with
//     the family in its keys; ruleset.ByFamily joins two backends.
//   - NodeManager and the node topology handler: [Tracker.SetNode] with
//     [NodeInfoOf]; only Services that it matters to come up again, and nothing
//     needs a restart. A deleted Node object, after which kube-proxy exits, leaves
//     the node as it was.
//   - The gate until informers have synced: [Tracker.MarkSynced].
//   - BoundedFrequencyRunner: package runner; a trigger before Run is kept.
//   - The service health server and the proxier's: package runner/health.
//   - The metrics, klog and event recorder inside: hooks, a slog.Logger and
//     [EventSink].
//
// The example ComingFromKubeProxy has event handlers and a sync loop of that shape
// on this package; the next step is to have a ruleset.Engine take the changes, and
// to drop what retries, compares and remembers.
package tracker
