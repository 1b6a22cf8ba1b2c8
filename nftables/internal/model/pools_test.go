package model

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestStickyOwnersDiffer(t *testing.T) {
	seen := map[StickyOwner]string{}
	for _, name := range []string{"a", "a?", "a\"", "a\\", "a\x00", strings.Repeat("x", 300), strings.Repeat("x", 301), strings.Repeat("x", 300) + "?"} {
		for _, target := range []ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal} {
			var k tracker.Key
			k.Name = name
			o := ownerOf(k, target)
			if other, ok := seen[o]; ok {
				t.Errorf("%q and %q are both %q", name, other, o)
			}
			if nft.Printable(string(o)) != string(o) {
				t.Errorf("%q does not fit into a comment", o)
			}
			seen[o] = name
		}
	}
}
