// Package kubeapi is a node agent's side of the Kubernetes API: how to reach it
// ([ClientConfig]), how to follow the objects a node's proxy depends on ([Follow]),
// and how to tell an operator of something as an Event ([NewRecorder]).
//
// Objects are followed with client-go's reflectors, which is what its informers are
// made of, and without their stores: the tracker holds what it needs of an object,
// so that a node need not keep a second copy of every Service and EndpointSlice of
// the cluster. What is kept is names, by which an object is noticed that was deleted
// while the API server could not be reached: where an informer hands out a tombstone
// (cache.DeletedFinalStateUnknown), the name is all that is handed on here too.
//
// While the API server is gone nothing is handed on, so rules stay as they are; when
// it is back, everything is listed anew and handed in again, and what has not changed
// ends in the tracker.
//
// What is promised: this package is made to be imported and follows the newest
// client-go. Its API may change between minor versions, with a note on what to write
// instead. Package informers, beside this one, feeds a tracker from client-go's shared
// informers, for agents that have those anyway.
package kubeapi
