//go:build linux

package iptables

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// flavours runs a test for each flavour that is installed.
func flavours(t *testing.T, f func(t *testing.T, flavour Flavour)) {
	for _, flavour := range []Flavour{NFT, Legacy} {
		t.Run(string(flavour), func(t *testing.T) {
			needFlavour(t, flavour)
			f(t, flavour)
		})
	}
}

func needFlavour(tb testing.TB, flavour Flavour) {
	tb.Helper()
	_, err4 := exec.LookPath("iptables-" + string(flavour) + "-restore")
	_, err6 := exec.LookPath("ip6tables-" + string(flavour) + "-restore")
	netlab.Need(tb, err4 == nil && err6 == nil, "iptables-"+string(flavour)+"-restore and ip6tables-"+string(flavour)+"-restore")
}

// testConfig returns a configuration for a test.
func testConfig(tb testing.TB, flavour Flavour) Config {
	tb.Helper()
	needFlavour(tb, flavour)
	// Only root may open the usual lock file.
	return Config{Flavour: flavour, LockFile: filepath.Join(tb.TempDir(), "lock")}
}

// newForWorld returns a function that opens backends of a flavour for worlds.
func newForWorld(flavour Flavour) func(testing.TB, conformance.Env) ruleset.Backend {
	return func(tb testing.TB, env conformance.Env) ruleset.Backend {
		c := testConfig(tb, flavour)
		c.NetNS, c.Families = env.NetNS, env.Families
		b, err := New(context.Background(), c)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}
}

// skips lists the features of the suite that iptables lacks.
var skips = map[conformance.Feature]string{
	conformance.ConsistentHash:    "iptables has no match that hashes",
	conformance.LoopbackNodePorts: "Config.LocalhostNodePorts serves them in IPv4, whatever the ruleset says",
}

// TestConformance runs the suite that all backends must pass.
func TestConformance(t *testing.T) {
	flavours(t, func(t *testing.T, flavour Flavour) {
		conformance.Run(t, conformance.Options{New: newForWorld(flavour), Skip: skips})
	})
}
