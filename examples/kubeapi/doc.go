// Package kubeapi connects a node agent to the Kubernetes API. [ClientConfig] finds the
// API server, [Follow] follows the objects that a node's proxy depends on, and
// [NewRecorder] writes Events:
//
//	config, err := kubeapi.ClientConfig(connection, "")
//	client, err := kubeapi.NewClient(config)
//	kubeapi.Follow(ctx, client, selector, nodeName, handler, log)
//
// Follow uses client-go's reflectors without the stores of its informers, so a node does not keep a second copy
// of every Service and EndpointSlice of the cluster. It keeps only names, by which it detects objects that were
// deleted while the API server was unreachable.
//
// While the API server is unreachable, Follow calls no handler, so rules stay as they are. Within 10 seconds of its
// return Follow lists all objects again and passes them to the handler; client-go's own pauses grow to a minute. A
// request that the API server accepts and does not begin to answer is repeated after 18 seconds, or after 75 if the API
// server answers small requests. Each minute brings an event; Follow replaces a watch without one after 150 seconds.
// Pauses are random, and at most 6 seconds, even if an answer's Retry-After asks for more.
//
// Begin with package informers, beside this one, as examples/minimal does: it passes Follow's objects to a tracker.
package kubeapi
