//go:build linux

package ipvs

import (
	"flag"
	"testing"

	"github.com/go-proxier/proxier/internal/vm"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

var (
	soak = flag.Duration("soak", 0, "for how long TestRandomWorlds goes on with further worlds")
	seed = flag.Uint64("seed", 1, "the first world of TestRandomWorlds, and of random changes")
)

// TestRandomWorlds sends packets through worlds made up at random.
func TestRandomWorlds(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes where there is no IPVS but in a virtual machine")
	}
	if !vm.Inside(t, vm.IPVS) {
		return
	}
	conformance.RunRandom(t, conformance.Options{New: newForWorld, Skip: notDone}, conformance.Random{First: *seed, Worlds: 12, Steps: 3, Packets: 30, For: *soak})
}
