// Package endpointslice merges the EndpointSlices of a Service into one list of endpoints for each of its ports. A [Cache]
// takes each slice in its current state and returns the Services whose endpoints changed:
//
//	c := endpointslice.New(endpointslice.Plain(nil))
//	c.Set(slice)
//	for _, change := range c.Take() {
//		fmt.Println(change.Service, len(change.Old), len(change.New))
//	}
//
// The cache works with any endpoint type, through the functions of [Config].
//
// # Guarantees
//
// Only differences in the resulting endpoints count as changes. Rewriting or reordering a slice does not, and neither does
// moving an endpoint to another slice. An unchanged endpoint keeps its pointer and an unchanged list its memory. The
// cache never modifies values that it has returned or objects that it is given, and keeps none of these objects.
//
// The result depends only on the current slices. If two list the same address and port, the cache keeps one endpoint: it
// prefers endpoints that are not terminating, then ready ones, then those with a nodeName, then the slice whose name sorts
// first. Within a slice it prefers the node and zone that sort first, then the endpoint listed first.
//
// A slice belongs to the Service in its label kubernetes.io/service-name. Without one, or with another address type than
// IPv4 or IPv6, it counts as empty. An invalid part of a slice is left out; the rest is used. An endpoint with several
// addresses is used with its first. [Config].Report receives everything that is left out, with a [Reason].
//
// Set and Delete take time proportional to the slice, and Take to the Services that changed.
package endpointslice
