//go:build linux

package nftables

import (
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

var (
	soak = flag.Duration("soak", 0, "for how long TestRandomWorlds goes on with further worlds")
	seed = flag.Uint64("seed", 1, "the first world of TestRandomWorlds")
)

// TestRandomWorlds sends packets through worlds made up at random, and compares
// the tables after each change with those of a cold start.
func TestRandomWorlds(t *testing.T) {
	worlds := 50
	if testing.Short() {
		worlds = 5
	}
	conformance.RunRandom(t, conformance.Options{New: newForWorld}, conformance.Random{
		First: *seed, Worlds: worlds, For: *soak,
		Dump: func(tb testing.TB, env conformance.Env, b ruleset.Backend) string {
			var out strings.Builder
			for _, f := range env.Families {
				v := kernelView(tb, b.(*Backend), f)
				for _, k := range slices.Sorted(maps.Keys(v)) {
					fmt.Fprintf(&out, "%v %s: %s\n", f, k, v[k])
				}
			}
			return out.String()
		},
	})
}
