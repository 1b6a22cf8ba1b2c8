// Package worldgen generates random Services, EndpointSlices and changes of them, for
// tests that compare the behavior of a data plane with the expected one. The same seed
// generates the same world:
//
//	g := worldgen.New(seed, worldgen.Params{ ... })
//	for ops := g.Start(); ; ops = g.Step() {
//		... // op.Apply(tracker) for each, Sync, and compare with Engine.Snapshot
//	}
//
// Worlds contain unusual cases on purpose, such as addresses that several Services ask for and endpoints in several
// slices. [Minimize] finds a small set of changes with which a test still fails.
//
// The API has no fields for weights and hashes. Objects carry them in annotations, which [OnService] and
// [OnEndpoint] read: set both in the [tracker.Config].
package worldgen
