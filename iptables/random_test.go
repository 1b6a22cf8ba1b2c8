//go:build linux

package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/backendtest"
	"github.com/go-proxier/proxier/internal/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestRandomWorlds sends packets through random worlds, and compares the tables after each
// change with the tables of a cold start.
func TestRandomWorlds(t *testing.T) {
	flavours(t, func(t *testing.T, flavour Flavour) {
		worlds := 25
		if !testtime.Thorough() {
			worlds = 3
		}
		conformance.RunRandom(t, conformance.Options{New: newForWorld(flavour), Skip: skips}, conformance.Random{
			First: *backendtest.Seed, Worlds: worlds, For: max(0, *backendtest.Soak/2),
			Dump: func(tb testing.TB, env conformance.Env, b ruleset.Backend) string { return dump(tb, b.(*Backend)) },
		})
	})
}

// saved returns the output of iptables-save for all tables.
func saved(ctx context.Context, f *family) (string, error) {
	var out strings.Builder
	err := f.tool.Save(ctx, "", &out)
	return out.String(), err
}

// dump returns our chains and the rules of the kernel's own chains.
func dump(tb testing.TB, b *Backend) string {
	var out strings.Builder
	for _, f := range b.families {
		text, err := saved(tb.Context(), f)
		if err != nil {
			tb.Fatal(err)
		}
		l := listingOf(text)
		for _, name := range slices.Sorted(maps.Keys(l)) {
			for _, rule := range append([]string{"chain"}, l[name]...) {
				fmt.Fprintf(&out, "%v %s %s\n", f.family, name, rule)
			}
		}
	}
	return out.String()
}
