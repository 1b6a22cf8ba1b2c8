package winkernel_test

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// TestOldVersion uses a service of HNS 9.1 by way of hnslib, which knows from the version what
// the service lacks. The service in memory lacks nothing.
func TestOldVersion(t *testing.T) {
	if *dllsVersion == "" {
		t.Skip("needs -dlls.version: TestOldVersionUnderWine runs it")
	}
	c := newCluster(t)
	for _, f := range []winkernel.Feature{winkernel.DSR, winkernel.RemoteSubnets, winkernel.DualStack} {
		if err := c.config.HNS.Supports(f); !errors.Is(err, winkernel.ErrNotImplemented) {
			t.Errorf("Supports(%q): %v", f, err)
		}
	}
	for what, change := range map[string]func(*winkernel.Config){
		"DSR":  func(c *winkernel.Config) { c.DSR = true },
		"IPv6": func(c *winkernel.Config) { c.NodeIPs = []netip.Addr{netip.MustParseAddr("2001:db8::1")} },
		"overlay": func(c *winkernel.Config) {
			c.HNS = api(t, fakehns.New(winkernel.Network{ID: networkID, Name: "cluster", Type: winkernel.Overlay}, true))
			c.SourceVIP, c.HostMAC = netip.MustParseAddr("10.244.1.2"), "00-15-5d-00-00-01"
		},
	} {
		config := newCluster(t).config
		change(&config)
		if err := winkernel.Probe(t.Context(), config); !errors.Is(err, dataplane.ErrUnsupported) {
			t.Errorf("Probe with %s: %v", what, err)
		}
	}
	c = newCluster(t)
	c.apply(t, true, map[int]*ruleset.Port{0: service(0, "10.244.2.1:80"), 1: service(1, "10.244.2.1:80")})
	for _, to := range []string{"10.244.2.2:80", "10.244.2.3:80"} {
		got := c.apply(t, false, map[int]*ruleset.Port{0: service(0, "10.244.2.1:80", to)})
		if got[fakehns.ModifyLoadBalancer] != 0 || got[fakehns.DeleteLoadBalancer] != 1 || got[fakehns.CreateLoadBalancer] != 1 {
			t.Errorf("a change took the calls %v, want one to delete the load balancer and one to create it", got)
		}
		if err := c.backend.Check(t.Context()); err != nil {
			t.Errorf("Check after a change: %v", err)
		}
	}
}
