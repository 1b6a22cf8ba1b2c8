//go:build linux

package iptables

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestOwned(t *testing.T) {
	t.Parallel()
	flavours(t, func(t *testing.T, flavour Flavour) {
		netlab.Require(t)
		lab, err := netlab.New()
		if err != nil {
			t.Fatal(err)
		}
		defer lab.Close()
		h, err := lab.Host("node")
		if err != nil {
			t.Fatal(err)
		}
		c := testConfig(t, flavour)
		c.NetNS = h.File()
		owned := func(what string, want bool) {
			t.Helper()
			if got, err := Owned(t.Context(), c); err != nil || got != want {
				t.Errorf("%s: %v, error %v", what, got, err)
			}
		}
		owned("nothing", false)
		// As kube-proxy leaves them.
		for _, args := range []string{"-N KUBE-PROXY-CANARY", "-N KUBE-SERVICES", "-A OUTPUT -j KUBE-SERVICES"} {
			program := "iptables-" + string(flavour)
			if _, err := h.Output("env", append([]string{"XTABLES_LOCKFILE=" + c.LockFile, program}, strings.Fields(args)...)...); err != nil {
				t.Fatal(err)
			}
		}
		owned("kube-proxy's", false)

		tr, err := tracker.New(tracker.Config{})
		if err != nil {
			t.Fatal(err)
		}
		e, err := ruleset.NewEngine(ruleset.Config{Tracker: tr})
		if err != nil {
			t.Fatal(err)
		}
		tr.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
		b, err := New(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		if err := e.Attach("iptables", b).Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		owned("a Backend's", true)
		if err := Cleanup(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		owned("cleaned up", false)
	})
}
