// Package informers feeds a tracker from client-go's shared informers.
//
//	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: nodeName}})
//	...
//	go func() { done <- informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: nodeName}) }()
//
// It is the whole of what stands between client-go and the library, in one file to
// import or to copy:
//
//   - A deletion that was missed while the API server could not be reached arrives as
//     a tombstone (cache.DeletedFinalStateUnknown). The tracker deletes by name, and
//     the name is all that is taken from a tombstone.
//   - A Node that was deleted leaves a node that has its name and nothing else, so
//     that endpoints on it stay local.
//   - A resync, or a list after a lost watch, hands in what the tracker has already,
//     which changes nothing.
//   - Each source is marked synced when its own handler has seen the first list.
//
// Informers keep every object of the cluster that they list. Package kubeapi, beside
// this one, follows objects without keeping them, which nodeproxy does.
//
// What is promised: this package is made to be imported and follows the newest
// client-go. Its API may change between minor versions, with a note on what to write
// instead.
package informers
