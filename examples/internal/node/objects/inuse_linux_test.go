package objects

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestAddressesInUseAreNotDropped checks each way in which the node sees that addresses in a Service CIDR are
// in use, with a real network.
func TestAddressesInUseAreNotDropped(t *testing.T) {
	lab, hosts := netlab.NewHosts(t, "node", "peer")
	h, peer := hosts["node"], hosts["peer"]
	lab.Link(h, "eth0", peer, "eth0")
	h.Addrs("eth0", "10.100.0.9/16", "fd00:10:96::1:9/112")
	h.Addrs("lo", "10.96.0.10/32") // as of node-local-dns
	h.Routes("eth0", "10.100.0.1", "10.103.0.0/24", "10.104.0.7/32", "10.96.0.0/12", "10.0.0.0/8", "0.0.0.0/0")
	var log bytes.Buffer
	var events []string
	err := h.Do(func() error {
		own, ranges, stop, err := OpenAddresses()
		if err != nil {
			return err
		}
		defer stop()
		node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: v1.NodeSpec{PodCIDRs: []string{"10.102.1.0/24"}}}
		hooks := WorldHooks{
			Own: own, Ranges: ranges, Overlap: func(m string) { events = append(events, m) },
			APIServer: apiAddresses{netip.MustParseAddrPort("10.105.0.1:6443"), netip.MustParseAddrPort("10.96.0.1:443")},
		}
		cfg := configtest.Parsed(t, []string{"run", "--hostname-override=n1", "--cluster-cidr=10.101.0.0/16"})
		w, err := New(cfg, nil, node, hooks, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			return err
		}
		w.SetServiceCIDR(&networking.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networking.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12", "fd00:10:96::/108"}}})
		w.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
			Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol}, Ports: []v1.ServicePort{{Port: 443, Protocol: v1.ProtocolTCP}}},
		})
		w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		drops := func(to string) bool {
			p := ruleset.Packet{From: netip.MustParseAddr("192.0.2.1"), Protocol: v1.ProtocolTCP, To: netip.AddrPortFrom(netip.MustParseAddr(to), 80), NodeAddresses: w.Tracker.Node().Addresses}
			return w.Engine.Snapshot().Trace(p).Action == ruleset.ActionDrop
		}
		used := []string{"10.100.3.4", "fd00:10:96::1:5", "10.101.9.9", "10.102.1.200", "10.103.0.8", "10.104.0.7", "10.105.0.1"}
		for _, to := range used {
			if drops(to) {
				t.Errorf("%s is dropped, though it is in use", to)
			}
		}
		for _, to := range []string{"10.96.0.2", "10.102.2.1", "10.103.1.1", "10.105.0.2", "10.111.255.255", "fd00:10:96::5"} {
			if !drops(to) {
				t.Errorf("%s is not dropped, though no Service has it", to)
			}
		}
		w.RefreshServiceCIDRs()
		w.RefreshServiceCIDRs()

		// More ranges than are worth rules.
		for i := range maxInUse + 1 {
			h.Routes("eth0", "10.100.0.1", netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 106, byte(i), 128}), 25).String())
		}
		w.RefreshServiceCIDRs()
		for _, to := range []string{"10.96.0.2", "10.106.0.200", "10.106.32.200"} {
			if drops(to) {
				t.Errorf("%s is dropped beside more than %d ranges in use", to, maxInUse)
			}
		}
		if !drops("fd00:10:96::5") {
			t.Error("the other family's range is not dropped")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"10.100.0.0/16", "fd00:10:96::1:0/112", "10.101.0.0/16", "10.102.1.0/24", "10.103.0.0/24", "10.104.0.0/24", "10.105.0.1/32"} {
		if n := strings.Count(log.String(), "inUse="+p+" "); n != 1 {
			t.Errorf("%d lines about %s, want 1", n, p)
		}
		if !slices.ContainsFunc(events, func(m string) bool { return strings.Contains(m, "overlaps "+p+" (") }) {
			t.Errorf("no Event about %s", p)
		}
	}
	if n := strings.Count(log.String(), "serviceCIDR="); n != len(events) || n > 2*maxInUse || strings.Contains(log.String(), "10.96.0.1/32") {
		t.Errorf("%d lines and %d Events:\n%s", n, len(events), &log)
	}
}
