package ruleset

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// TestRemainingLosesWhatIsGone refuses changes of a Service and checks what stays of it.
func TestRemainingLosesWhatIsGone(t *testing.T) {
	node := &Node{Info: tracker.NodeInfo{Name: "n"}}
	compile := func(eps []string, edit func(*tracker.ServicePort)) *Port {
		p := tracker.PortState{Port: &tracker.ServicePort{
			ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80, NodePort: 30080,
			ExternalIPs: []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.2")},
		}}
		p.Port.Key.Namespace, p.Port.Key.Name = "ns", "a"
		p.Port.Key.Protocol, p.Port.Key.Family = v1.ProtocolTCP, tracker.IPv4
		for _, a := range eps {
			p.Endpoints = append(p.Endpoints, &tracker.Endpoint{Addr: netip.MustParseAddrPort(a), Ready: true, Serving: true, Weight: 1})
		}
		if edit != nil {
			edit(p.Port)
		}
		s := Compile(p, node, tracker.TopologyOptions{})
		s.ID = 7
		return s
	}
	old := compile([]string{"10.0.0.1:80", "10.0.0.2:80"}, nil)
	addresses := func(list []*tracker.Endpoint) (out []string) {
		for _, ep := range list {
			out = append(out, ep.Addr.String())
		}
		return out
	}

	got := old.remaining(compile([]string{"10.0.0.2:80", "10.0.0.3:80"}, func(p *tracker.ServicePort) {
		p.Affinity = time.Hour
		p.ExternalIPs = p.ExternalIPs[1:]
	}))
	if a := addresses(got.Pool(TargetCluster)); !slices.Equal(a, []string{"10.0.0.2:80"}) || len(got.Selection.Reachable) != 1 {
		t.Errorf("endpoints %v, reachable %d", a, len(got.Selection.Reachable))
	}
	if got.Spec.Affinity != 0 || got.ID != 7 || got.Key != old.Key {
		t.Errorf("%+v", got)
	}
	if n := len(got.Frontends); n != 3 || len(old.Frontends) != 4 {
		t.Errorf("%d frontends of %d", n, len(old.Frontends))
	}
	for _, f := range got.Frontends {
		if f.Target != TargetCluster || f.Addr == netip.MustParseAddr("198.51.100.1") {
			t.Errorf("%+v", f)
		}
	}
	if len(old.Selection.Cluster) != 2 {
		t.Error("the old Service changed")
	}

	// All endpoints are replaced: nothing is left to forward to.
	got = old.remaining(compile([]string{"10.0.0.9:80"}, nil))
	for _, f := range got.Frontends {
		if f.Target != TargetReject || f.Internal != TargetReject {
			t.Errorf("%+v", f)
		}
	}
	if old.remaining(nil) != nil {
		t.Error("something is left of a deleted Service")
	}
}
