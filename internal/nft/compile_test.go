//go:build linux

package nft

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestUnknownRulesDoNotCompile compiles rules that the package does not have.
func TestUnknownRulesDoNotCompile(t *testing.T) {
	for _, rule := range []string{"log", "ip saddr == 10.0.0.0", "ip daddr == 10.0.0.0", "th dport http", "@th,x,8 == 1", "meta priority set", "dnat ip to", "update sets { counter }", "iifname == lo"} {
		if exprs, err := Compile(unix.NFPROTO_IPV4, rule, nil); err == nil {
			t.Errorf("%q became %q", rule, exprs)
		}
	}
}
