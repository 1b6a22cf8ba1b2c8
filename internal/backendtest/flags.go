//go:build linux

package backendtest

import "flag"

// Flags of the tests with random worlds.
var (
	// Soak is the time for further worlds.
	Soak = flag.Duration("soak", 0, "run further worlds of TestRandomWorlds for this `time`")
	// Seed is the seed of the first world.
	Seed = flag.Uint64("seed", 1, "`seed` of the first world of TestRandomWorlds, and of random changes")
)
