// Package informers feeds a tracker from client-go, or from shared informers that a program has.
//
//	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: nodeName}})
//	...
//	go func() { done <- informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: nodeName}) }()
//
// It is all the code between client-go and the library; examples/minimal is a whole agent with it:
//
//   - Feed keeps only the names of objects, as package kubeapi does, and reconnects as fast after an
//     outage. It returns soon after its context ends.
//
//   - A deleted Node leaves node information that consists of the name alone, so endpoints
//     on the node stay local.
//
//   - Each source is marked synced when its own handler has received the first list.
//
// A program that has informers of Services, EndpointSlices or Nodes gives them to Feed in its
// Config. Feed then sends no requests for these. With Config.Engine it follows ServiceCIDRs, too.
package informers
