package winkernel_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/Microsoft/hnslib/hcn"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// realNetwork is the network that TestRealService makes.
const realNetwork = "proxier-test"

// TestRealService programs load balancers in the Host Networking Service of this machine, in an
// l2bridge network of its own, which it deletes. It runs with PROXIER_HNS=1 in the environment,
// because it takes every load balancer of the machine for its own.
func TestRealService(t *testing.T) {
	if os.Getenv("PROXIER_HNS") == "" || *dlls {
		t.Skip("needs Windows, and PROXIER_HNS=1 in the environment: the test deletes load balancers of the machine")
	}
	network, err := (&hcn.HostComputeNetwork{
		Name: realNetwork, Type: hcn.L2Bridge, SchemaVersion: hcn.V2SchemaVersion(),
		Ipams: []hcn.Ipam{{Type: "Static", Subnets: []hcn.Subnet{{
			IpAddressPrefix: "10.244.0.0/16", Routes: []hcn.Route{{NextHop: "10.244.0.1", DestinationPrefix: "0.0.0.0/0"}},
		}}}},
	}).Create()
	if err != nil {
		t.Fatalf("cannot make the network: %v", err)
	}
	t.Cleanup(func() {
		if err := network.Delete(); err != nil {
			t.Errorf("cannot delete the network: %v", err)
		}
	})
	hns := must.Get(winkernel.Open())(t)
	config := winkernel.Config{HNS: hns, Network: realNetwork, Node: "win-1", NodeIPs: []netip.Addr{nodeIP}}
	t.Cleanup(func() {
		if err := winkernel.Cleanup(context.Background(), config); err != nil {
			t.Errorf("Cleanup: %v", err)
		}
	})
	c := &cluster{config: config, old: map[int]*ruleset.Port{}}
	c.restart(t)
	apply := func(full bool, services map[int]*ruleset.Port) {
		t.Helper()
		must.Do(t, c.backend.Apply(t.Context(), c.delta(full, services)))
	}
	check := func(what string, n int, want ...string) {
		t.Helper()
		if err := c.backend.Check(t.Context()); err != nil {
			t.Errorf("%s: Check: %v", what, err)
		}
		found, err := winkernel.Lookup(t.Context(), config, dataplane.Query{Packet: ruleset.Packet{
			Protocol: v1.ProtocolTCP, To: netip.AddrPortFrom(c.old[n].Spec.ClusterIP, 80),
		}})
		var got []string
		for _, a := range found.Endpoints {
			got = append(got, a.String())
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: endpoints %v, %v; want %v", what, got, err, want)
		}
	}
	apply(true, map[int]*ruleset.Port{
		0: service(0, "10.244.2.1:8080", "10.244.2.2:8080"),
		1: service(1, "10.244.2.1:9090"),
	})
	check("two endpoints", 0, "10.244.2.1:8080", "10.244.2.2:8080")
	check("the same address, another port", 1, "10.244.2.1:9090")
	apply(false, map[int]*ruleset.Port{0: service(0, "10.244.2.1:8080", "10.244.2.3:8080")})
	check("an endpoint replaced", 0, "10.244.2.1:8080", "10.244.2.3:8080")

	before := realIDs(t, hns)
	c.restart(t)
	apply(true, c.old)
	if after := realIDs(t, hns); !slices.Equal(before, after) {
		t.Errorf("a restart replaced load balancers: %v, then %v", before, after)
	}
	apply(false, map[int]*ruleset.Port{1: nil})
	if n := len(realIDs(t, hns)); n != 1 {
		t.Errorf("%d load balancers, want 1", n)
	}
	apply(false, map[int]*ruleset.Port{0: nil})
	left, err := hns.Endpoints()
	left = slices.DeleteFunc(left, func(e winkernel.Endpoint) bool { return !e.Remote || !strings.HasPrefix(e.MAC, "02-11-") })
	if ids := realIDs(t, hns); len(ids)+len(left) != 0 || err != nil {
		t.Errorf("after the last Service went: load balancers %v, endpoints %v, %v", ids, left, err)
	}
}

// realIDs returns the IDs of the load balancers with cluster IPs of the test, sorted.
func realIDs(t *testing.T, hns winkernel.HNS) (out []string) {
	t.Helper()
	lbs := must.Get(hns.LoadBalancers())(t)
	for _, lb := range lbs {
		if lb.Frontend.Family == tracker.IPv4 && lb.Frontend.Port == 80 {
			out = append(out, lb.ID)
		}
	}
	slices.Sort(out)
	return out
}

// TestDocumentsHaveTheNumbersOfTheLibrary encodes objects that set everything.
func TestDocumentsHaveTheNumbersOfTheLibrary(t *testing.T) {
	var lb hcn.HostComputeLoadBalancer
	text := must.Get(json.Marshal(winkernel.LoadBalancer{
		Frontend: winkernel.Frontend{Port: 80, Protocol: v1.ProtocolSCTP, Family: tracker.IPv6}, DSR: true, ClientAffinity: true,
		Flags: winkernel.LocalRoutedVIP | winkernel.UseMux | winkernel.PreserveDIP | winkernel.VIPExternalIP,
	}))(t)
	must.Do(t, json.Unmarshal(text, &lb))
	flags := hcn.LoadBalancerPortMappingFlagsLocalRoutedVIP | hcn.LoadBalancerPortMappingFlagsUseMux |
		hcn.LoadBalancerPortMappingFlagsPreserveDIP | hcn.LoadBalancerPortMappingFlags(winkernel.VIPExternalIP)
	want := hcn.LoadBalancerPortMapping{Protocol: 132, ExternalPort: 80, DistributionType: hcn.LoadBalancerDistributionSourceIP, Flags: flags}
	if lb.Flags != hcn.LoadBalancerFlagsDSR|hcn.LoadBalancerFlagsIPv6 || !slices.Equal(lb.PortMappings, []hcn.LoadBalancerPortMapping{want}) {
		t.Errorf("load balancer: %+v", lb)
	}
	var e hcn.HostComputeEndpoint
	text = must.Get(json.Marshal(winkernel.Endpoint{Remote: true, Provider: nodeIP}))(t)
	must.Do(t, json.Unmarshal(text, &e))
	if e.Flags != hcn.EndpointFlagsRemoteEndpoint || len(e.Policies) != 1 || e.Policies[0].Type != hcn.NetworkProviderAddress {
		t.Errorf("endpoint: %+v", e)
	}
	var n hcn.HostComputeNetwork
	text = must.Get(json.Marshal(winkernel.Network{RemoteSubnets: []winkernel.RemoteSubnet{{Prefix: netip.MustParsePrefix("10.244.2.0/24"), Provider: nodeIP}}}))(t)
	must.Do(t, json.Unmarshal(text, &n))
	var route hcn.RemoteSubnetRoutePolicySetting
	if len(n.Policies) != 1 || n.Policies[0].Type != hcn.RemoteSubnetRoute || json.Unmarshal(n.Policies[0].Settings, &route) != nil ||
		route.DestinationPrefix != "10.244.2.0/24" || route.ProviderAddress != nodeIP.String() {
		t.Errorf("network: %+v", n)
	}
}

// TestOldVersion uses a service of HNS 9.1 by way of hnslib, which knows from the version what
// the service lacks. The service in memory lacks nothing.
func TestOldVersion(t *testing.T) {
	if *dllsVersion == "" {
		t.Skip("needs -dlls.version: TestOldVersionUnderWine runs it")
	}
	c := newCluster(t)
	if has, err := c.config.HNS.Features(); has != (winkernel.Features{}) || err != nil {
		t.Errorf("Features: %+v, %v", has, err)
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
