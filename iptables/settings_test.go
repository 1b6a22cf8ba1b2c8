//go:build linux

package iptables

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestInvalidPacketsAreDropped checks that packets that connection tracking considers invalid
// are dropped, unless nf_conntrack_tcp_be_liberal is set.
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

// TestRouteLocalnetFollowsConfig checks that the backend sets route_localnet if NodePorts answer
// at loopback addresses, and only then.
func TestRouteLocalnetFollowsConfig(t *testing.T) {
	needFlavour(t, NFT)
	t.Parallel()
	for _, on := range []bool{false, true} {
		r := newRig(t, NFT, func(c *Config) { c.LocalhostNodePorts = on })
		r.sync()
		var value []byte
		if err := r.host.Do(func() (err error) {
			value, err = os.ReadFile("/proc/sys/" + routeLocalnet)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSpace(string(value)); (got == "1") != on {
			t.Errorf("LocalhostNodePorts %v: route_localnet is %s", on, got)
		}
	}
}

// TestSetSysctlsSetsRouteLocalnet checks that SetSysctls, without any program, sets the sysctl
// for the same configurations as a Backend.
func TestSetSysctlsSetsRouteLocalnet(t *testing.T) {
	netlab.Require(t)
	t.Parallel()
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{}, "0"},
		{Config{LocalhostNodePorts: true, Families: []tracker.Family{tracker.IPv6}}, "0"},
		{Config{LocalhostNodePorts: true, Families: []tracker.Family{tracker.IPv4}}, "1"},
		{Config{LocalhostNodePorts: true}, "1"},
	} {
		h := netlab.NewHost(t)
		for _, ns := range []*os.File{nil, h.File()} {
			c.config.NetNS = ns
			if err := h.Sysctl("net/ipv4/conf/all/route_localnet", "0"); err != nil {
				t.Fatal(err)
			}
			set := func() error { return SetSysctls(t.Context(), c.config) }
			var err error
			if ns == nil {
				err = h.Do(set)
			} else {
				err = set()
			}
			got, err2 := h.Output("cat", "/proc/sys/"+routeLocalnet)
			if err != nil || err2 != nil || strings.TrimSpace(got) != c.want {
				t.Errorf("%+v: route_localnet is %q, want %s, errors %v, %v", c.config, got, c.want, err, err2)
			}
		}
	}
	if err := SetSysctls(t.Context(), Config{Flavour: "none"}); err == nil {
		t.Error("an invalid configuration was accepted")
	}
}
