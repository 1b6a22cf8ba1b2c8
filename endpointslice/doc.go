// Package endpointslice merges the EndpointSlices of a Service into one list of
// endpoints for each of its ports.
//
// A Service's endpoints are spread over any number of EndpointSlices, whose
// division changes without the endpoints changing. A [Cache] is given each slice
// as it is now and answers with the Services whose endpoints have changed, old
// and new:
//
//	c := endpointslice.New(endpointslice.Plain(nil))
//	c.Set(slice)
//	for _, change := range c.Take() {
//		fmt.Println(change.Service, len(change.Old), len(change.New))
//	}
//
// # What it promises
//
// Objects are compared by what they say of endpoints: a slice whose metadata,
// ports or endpoints were only rewritten or reordered is no change, and neither
// is an endpoint that moves from one slice to another. An unchanged endpoint
// keeps its pointer, and an unchanged list its memory, through any number of
// updates. Nothing handed out is ever written to again. Nothing handed in is
// kept or written to.
//
// The outcome depends only on the slices there are, never on the order they came
// in. Two slices that name the same address and port (as they do for a moment
// when an endpoint moves) give one endpoint: one that is not terminating is
// preferred to one that is, then a ready one to one that is not, then that of the
// slice whose name sorts first; and within a slice, the node and zone that sort
// first, then the one listed first.
//
// A slice that changes its owner (label kubernetes.io/service-name) moves. A
// slice that cannot be attributed, or of an address type that is not an IP
// family, holds nothing. What cannot be used in a slice (an address that is none,
// a port out of range or without a name) costs only itself and is reported to
// [Config.Report]. An endpoint with several addresses is reached at the first.
//
// # Cost
//
// Set and Delete cost what the slice holds; Take costs what the Services that
// changed hold. Names and hints that endpoints have in common are stored once.
// The cache knows nothing of the endpoint type it is used with beyond the
// functions of [Config], so it can be used with any: package tracker uses it with
// its own, and [Plain] is for those who need none.
package endpointslice
