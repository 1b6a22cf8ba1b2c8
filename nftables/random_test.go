//go:build linux

package nftables

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestRandomWorlds sends packets through random worlds, and compares the tables after each change
// with those of a cold start.
func TestRandomWorlds(t *testing.T) {
	t.Parallel()
	worlds := 50
	if !testtime.Thorough() {
		worlds = 5
	}
	conformance.RunRandom(t, conformance.Options{New: newForWorld}, conformance.Random{
		First: *backendtest.Seed, Worlds: worlds, For: *backendtest.Soak,
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
