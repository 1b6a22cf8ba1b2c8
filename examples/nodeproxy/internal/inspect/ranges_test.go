package inspect

import (
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestExplainShowsPortsOfRanges checks that explain prints, and compares with the kernel, the ports
// to which packets to a range of ports go.
func TestExplainShowsPortsOfRanges(t *testing.T) {
	ep := func(addr string) *tracker.Endpoint {
		return &tracker.Endpoint{Addr: netip.MustParseAddrPort(addr), Node: "a", Ready: true, Serving: true, Weight: 1}
	}
	port := &tracker.ServicePort{
		Key:       tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "rtp"}, Protocol: v1.ProtocolUDP}, Family: tracker.IPv4},
		ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 10000, LastPort: 20000, TargetPort: 30000,
	}
	// Two endpoints differ only in their own port, which does not matter.
	svc := ruleset.Compile(tracker.PortState{Port: port, Endpoints: []*tracker.Endpoint{ep("10.0.0.1:80"), ep("10.0.0.1:81"), ep("10.0.0.2:80")}}, nil, tracker.TopologyOptions{})
	s := &ruleset.Snapshot{Node: &ruleset.Node{}, Ports: []*ruleset.Port{svc}}
	packet := ruleset.Packet{From: netip.MustParseAddr("192.0.2.1"), InInterface: "eth0", Protocol: v1.ProtocolUDP, To: netip.MustParseAddrPort("10.96.0.1:10007")}
	q := question{packet: packet, verdict: s.Trace(packet)}

	var out strings.Builder
	writeVerdict(&out, q.verdict)
	for _, want := range []string{"by its cluster IP, ports 10000-20000\n", "endpoint: 10.0.0.1:30007 on", "endpoint: 10.0.0.2:30007 on"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("explain prints\n%s\nwithout %q", out.String(), want)
		}
	}
	for _, c := range []struct {
		kernel []string
		agrees bool
	}{
		{[]string{"10.0.0.1:30007", "10.0.0.2:30007"}, true},
		{[]string{"10.0.0.1:30008", "10.0.0.2:30008"}, false},
		{[]string{"10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80"}, false},
	} {
		found := dataplane.Found{Entry: true}
		for _, a := range c.kernel {
			found.Endpoints = append(found.Endpoints, netip.MustParseAddrPort(a))
		}
		if err := q.compare(&out, found, q.entry()); (err == nil) != c.agrees {
			t.Errorf("a kernel with %v: %v, want agreement %t", c.kernel, err, c.agrees)
		}
	}
}
