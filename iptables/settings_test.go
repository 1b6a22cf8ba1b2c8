//go:build linux

package iptables

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// TestInvalidPacketsAreDropped looks whether packets that connection tracking takes for
// invalid are dropped: not where it was told to be liberal.
func TestInvalidPacketsAreDropped(t *testing.T) {
	needFlavour(t, NFT)
	t.Parallel()
	r := newRig(t, NFT)
	for _, liberal := range []string{"0", "1"} {
		if err := r.host.Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", liberal); err != nil {
			t.Fatal(err)
		}
		r.start()
		r.sync()
		drops := slices.ContainsFunc(r.kernel(tracker.IPv4)["filter "+chainForward], func(rule string) bool {
			return strings.Contains(rule, "--ctstate INVALID") && strings.HasSuffix(rule, "-j DROP")
		})
		if drops != (liberal == "0") {
			t.Errorf("be_liberal %s: dropped %v", liberal, drops)
		}
	}
}

// TestRouteLocalnetFollowsConfig sets route_localnet for NodePorts at loopback addresses, and only
// then.
func TestRouteLocalnetFollowsConfig(t *testing.T) {
	needFlavour(t, NFT)
	t.Parallel()
	for _, on := range []bool{false, true} {
		r := newRig(t, NFT, func(c *Config) { c.LocalhostNodePorts = on })
		r.sync()
		var value []byte
		if err := r.host.Do(func() (err error) {
			value, err = os.ReadFile(routeLocalnet)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSpace(string(value)); (got == "1") != on {
			t.Errorf("LocalhostNodePorts %v: route_localnet is %s", on, got)
		}
	}
}
