// Package worldgen makes up Services, EndpointSlices and changes to them, at
// random but the same for the same seed, for tests that compare what a data plane
// does with what it should do. It goes for the odd corners on purpose: addresses
// and NodePorts that several Services want, endpoints that are the node's own
// addresses or are in several slices at once, Services without endpoints or with
// terminating ones only, hints that only some endpoints have, changes of type.
package worldgen
