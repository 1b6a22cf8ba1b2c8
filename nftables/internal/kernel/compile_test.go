//go:build linux

package kernel

import (
	"bytes"
	"testing"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestInterfaceNamesAreKept compiles conditions about interfaces whose names could end a rule's words.
func TestInterfaceNamesAreKept(t *testing.T) {
	for _, name := range []string{"br0", "br*", `a"b`, "$mark", `\x41`, "a ip b", "bücke"} {
		whole := layout.InterfaceName(name)
		for _, c := range []struct {
			local ruleset.LocalTraffic
			want  []byte
		}{{ruleset.LocalTraffic{Bridge: name}, whole.Bytes()}, {ruleset.LocalTraffic{InterfacePrefix: name}, []byte(name)}} {
			w := Rules{Family: tracker.IPv6, Mark: 1, Local: c.local}
			rule := w.complete(w.localTraffic("== ")[0])
			exprs, err := compile(w.Family, rule, nil)
			if err != nil || len(exprs) != 2 || !bytes.Contains(exprs[1], c.want) {
				t.Errorf("%q: %q, %v", rule, exprs, err)
			}
		}
	}
}

// TestUnknownRulesDoNotCompile compiles rules that this package does not have.
func TestUnknownRulesDoNotCompile(t *testing.T) {
	for _, rule := range []string{"log", "ip saddr == 10.0.0.0", "meta priority set", "dnat ip to", "update sets { counter }", "iifname == lo"} {
		if exprs, err := compile(tracker.IPv4, rule, nil); err == nil {
			t.Errorf("%q became %q", rule, exprs)
		}
	}
}
