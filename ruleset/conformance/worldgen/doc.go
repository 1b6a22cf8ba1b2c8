// Package worldgen makes up Services, EndpointSlices and changes to them, for tests
// that compare what a data plane does with what it should do. The same seed makes the
// same world. It is what package conformance uses, for tests of one's own:
//
//	g := worldgen.New(seed, worldgen.Params{ ... })
//	ops := g.Start()
//	for range 100 {
//		for _, op := range ops {
//			op.Apply(myTracker)
//		}
//		// Sync, and compare with Engine.Snapshot.
//		ops = g.Step()
//	}
//
// Worlds contain odd cases on purpose: addresses and NodePorts that several Services
// ask for and that move between them, endpoints that are the node's own addresses or
// are in several slices at once, Services without endpoints or with terminating ones
// only, hints that only some endpoints have, changes of type. [Minimise] finds the few
// changes that make a test fail.
//
// The API has no fields for weights and hashes. Objects carry them in annotations, which
// [OnService] and [OnEndpoint] read: set both in the [tracker.Config].
package worldgen
