// Package informers feeds a tracker from client-go, or from shared informers that a program has.
//
//	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: nodeName}})
//	...
//	go func() { done <- informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: nodeName}) }()
//
// It is all the code between client-go and the library; examples/minimal is a whole agent with it:
//
//   - Feed uses client-go's reflectors without the stores of its informers, so a node does not keep a second copy of every
//     Service and EndpointSlice of the cluster. It keeps only names, by which it detects objects that were deleted while
//     the API server was unreachable.
//
//   - While the API server is unreachable, the rules stay as they are. Within 10 seconds of its return Feed lists all
//     objects again; client-go's own pauses grow to a minute. A request that the API server accepts and does not begin to
//     answer is repeated after 18 seconds, or after 75 if the API server answers small requests. Feed replaces a watch
//     without an event, of which there is one a minute, after 150 seconds. Pauses are random, and at most 6 seconds, even
//     if an answer's Retry-After asks for more.
//
//   - Feed reads API servers that do not know the field selector of Services (before Kubernetes 1.31), which list headless
//     Services, too, or that have no ServiceCIDRs (before 1.33). It returns soon after its context ends.
//
//   - A deleted Node leaves node information that consists of the name alone, so endpoints
//     on the node stay local.
//
//   - Each source is marked synced when its own handler has received the first list.
//
// A program that has informers of Services, EndpointSlices or Nodes gives them to Feed in its
// Config. Feed then sends no requests for these. With Config.Engine it follows ServiceCIDRs, too.
package informers
