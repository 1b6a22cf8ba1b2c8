//go:build linux

package ipvs

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestRandomWorlds sends packets through random worlds.
func TestRandomWorlds(t *testing.T) {
	if !inMachine(t) {
		return
	}
	worlds := 3
	if testtime.Thorough() {
		worlds = 10
	}
	conformance.RunRandom(t, conformance.Options{New: newForWorld, Skip: skips}, conformance.Random{First: *backendtest.Seed, Worlds: worlds, Steps: 3, Packets: 30, For: *backendtest.Soak})
}
