// Package informers feeds a tracker from client-go's shared informers.
//
//	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: nodeName}})
//	...
//	go func() { done <- informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: nodeName}) }()
//
// It is all the code between client-go and the library:
//
//   - A deletion that was missed while the API server could not be reached arrives as
//     a tombstone (cache.DeletedFinalStateUnknown). The tracker deletes by name, so Feed
//     uses the tombstone's name alone.
//
//   - A deleted Node leaves node information that consists of the name alone, so endpoints
//     on the node stay local.
//
//   - The tracker ignores unchanged objects, which a resync or a list after a lost watch
//     passes to it.
//
//   - Each source is marked synced when its own handler has received the first list.
//
//   - After an outage of the API server every node follows it again within 10 seconds, not within a minute as
//     with client-go's own pauses, and within 25 seconds if the API server accepted requests without an answer. Feed
//     returns soon after its context ends, even during an outage.
//
// A program that has informers of Services, EndpointSlices or Nodes gives them to Feed in its
// Config, which then makes none of its own for these.
//
// With Config.Engine it follows ServiceCIDRs, too, and its hooks fit packages metrics and health.
// examples/minimal is a whole agent with it. Begin here. Package kubeapi, beside this one, follows objects
// without keeping them, as nodeproxy does.
//
// # Stability
//
// This package is made to be imported: see "Stability" in the project's README.
package informers
