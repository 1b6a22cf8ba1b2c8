// Package informers feeds a tracker from client-go, or from shared informers that a program has.
//
//	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: nodeName}})
//	...
//	go func() { done <- informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: nodeName}) }()
//
// It is all the code between client-go and the library:
//
//   - Feed does not keep objects, but their names. It so finds those that were deleted while the API server
//     could not be reached.
//
//   - A deleted Node leaves node information that consists of the name alone, so endpoints
//     on the node stay local.
//
//   - The tracker ignores unchanged objects, which a list after a lost watch passes to it.
//
//   - Each source is marked synced when its own handler has received the first list.
//
//   - After an outage of the API server every node follows it again within 10 seconds, not within a minute as
//     with client-go's own pauses, and within 25 seconds if the API server accepted requests without an answer. Feed
//     returns soon after its context ends, even during an outage.
//
// A program that has informers of Services, EndpointSlices or Nodes gives them to Feed in its
// Config. Feed then sends no requests for these.
//
// With Config.Engine it follows ServiceCIDRs, too, and its hooks fit packages metrics and health.
// examples/minimal is a whole agent with it. Begin here. Package kubeapi, beside this one, follows objects
// in the same way for programs that pass them on themselves, as nodeproxy does.
//
// # Stability
//
// This package is made to be imported: see "Stability" in the project's README.
package informers
