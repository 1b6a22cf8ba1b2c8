// Package endpointslice merges the EndpointSlices of a Service into one list of
// endpoints for each of its ports. A [Cache] takes each slice in its current state
// and returns the Services whose endpoints changed:
//
//	c := endpointslice.New(endpointslice.Plain(nil))
//	c.Set(slice)
//	for _, change := range c.Take() {
//		fmt.Println(change.Service, len(change.Old), len(change.New))
//	}
//
// # Guarantees
//
// Only differences in the resulting endpoints count as changes. Rewriting or reordering the metadata, ports or
// endpoints of a slice does not, and neither does moving an endpoint from one slice to another. An unchanged
// endpoint keeps its pointer and an unchanged list its memory. The cache never modifies values that it has
// returned or objects that it is given, and keeps none of these objects.
//
// The result depends only on the current slices, not on the order of their arrival.
// Two slices can list the same address and port, for example while an endpoint
// moves. The cache then keeps one endpoint: it prefers endpoints that are not
// terminating, then ready ones, then those with a nodeName, then the slice whose name
// sorts first. Within a slice it prefers the node and zone that sort first, then the
// endpoint listed first.
//
// A slice whose owner (label kubernetes.io/service-name) changes moves to the new
// Service. A slice without an owner, or of an address type that is not an IP family
// (FQDN), counts as empty. An invalid part of a slice, such as a malformed address or a
// port that is out of range or unnamed, is left out; the rest of the slice is used. An
// endpoint with several addresses is used with its first. [Config].Report receives
// everything that is left out, with a [Reason].
//
// # Cost
//
// Set and Delete take time proportional to the slice, and Take to the Services that
// changed. Names and hints that endpoints have in common are stored once.
//
// The cache works with any endpoint type, through the functions of [Config]. [Plain] is for callers that need
// no type of their own.
package endpointslice
