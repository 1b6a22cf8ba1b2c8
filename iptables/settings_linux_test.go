package iptables

import (
	"os"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestSetSysctlsSetsRouteLocalnet checks that SetSysctls sets the sysctl for the same
// configurations as a Backend. Setting it to 1 needs programs.
func TestSetSysctlsSetsRouteLocalnet(t *testing.T) {
	netlab.Require(t)
	t.Parallel()
	h := netlab.NewHost(t)
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{}, "0"},
		{Config{LocalhostNodePorts: true, Families: []tracker.Family{tracker.IPv6}}, "0"},
		{Config{LocalhostNodePorts: true, Families: []tracker.Family{tracker.IPv4}}, "1"},
		{Config{LocalhostNodePorts: true}, "1"},
	} {
		if c.want == "1" {
			netlab.NeedPrograms(t, "iptables-restore", "iptables-save")
		}
		for _, ns := range []*os.File{nil, h.File()} {
			c.config.NetNS = ns
			must.Do(t, h.Sysctl("net/ipv4/conf/all/route_localnet", "0"))
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
	if err := SetSysctls(t.Context(), Config{Flavor: "none"}); err == nil {
		t.Error("an invalid configuration was accepted")
	}
}
