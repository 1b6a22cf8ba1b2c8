//go:build linux

package backendtest

import "flag"

// Flags of the tests with random worlds.
var (
	// Soak is for how long they go on with further worlds.
	Soak = flag.Duration("soak", 0, "for how long TestRandomWorlds goes on with further worlds")
	// Seed is the first world.
	Seed = flag.Uint64("seed", 1, "the first world of TestRandomWorlds, and of random changes")
)
