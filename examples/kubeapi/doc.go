// Package kubeapi connects a node agent to the Kubernetes API. [ClientConfig] finds the
// API server, [Follow] follows the objects that a node's proxy depends on, and
// [NewRecorder] writes Events:
//
//	config, err := kubeapi.ClientConfig(connection, "")
//	client, err := kubeapi.NewClient(config)
//	kubeapi.Follow(ctx, client, selector, nodeName, handler, log)
//
// Follow uses client-go's reflectors without the stores of its informers, so a node does not keep a second copy
// of every Service and EndpointSlice of the cluster: the tracker holds what it needs. Follow keeps names alone.
// With them it notices objects that were deleted while the API server could not be reached.
//
// While the API server is unreachable, Follow calls no handler, so rules stay as they are. Later Follow lists
// all objects again and passes them to the handler. The tracker ignores unchanged objects. After an outage
// Follow reads again within 10 seconds of the API server's return; client-go's own pauses grow to a minute.
// A request that the API server accepts and does not begin to answer within 20 seconds is ended and repeated, so after
// such an outage Follow reads again within 25 seconds. If the API server answers small requests and not this one, it
// has 75 seconds. A watch without an event, of which there is one a minute, is replaced after 150 seconds. A pause is
// at most 6 seconds, even if an answer's Retry-After asks for more.
// Pauses are random, so that a thousand nodes do not return at one moment.
//
// Begin with package informers, beside this one, as examples/minimal does: it passes what Follow follows to a tracker.
// This package is made to be imported, too: see "Stability" in the project's README.
package kubeapi
