//go:build linux

package iptables

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

func TestOnlyBackendRulesAreOwned(t *testing.T) {
	t.Parallel()
	flavours(t, func(t *testing.T, flavour Flavour) {
		r := newRig(t, flavour)
		owned := func(what string, want bool) {
			t.Helper()
			if got, err := Owned(t.Context(), r.config); err != nil || got != want {
				t.Errorf("%s: %v, error %v", what, got, err)
			}
		}
		owned("empty tables", false)
		for _, args := range []string{"-N KUBE-PROXY-CANARY", "-N KUBE-SERVICES", "-A OUTPUT -j KUBE-SERVICES"} {
			r.command(tracker.IPv4, "", strings.Fields(args)...)
		}
		owned("kube-proxy's rules", false)
		r.sync()
		owned("a Backend's rules", true)
		if err := Cleanup(t.Context(), r.config); err != nil {
			t.Fatal(err)
		}
		owned("after Cleanup", false)
	})
}
