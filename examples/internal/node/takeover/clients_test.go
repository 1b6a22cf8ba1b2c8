//go:build linux

package takeover

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// TestNamesOfMemoriesAreKubeProxys compares with names that kube-proxy 1.37 wrote.
func TestNamesOfMemoriesAreKubeProxys(t *testing.T) {
	k := tracker.Key{ServicePortName: tracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "default", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP,
	}, Family: tracker.IPv4}
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	name, ok := affinityName("affinity-7TCSBJI4-default/web/tcp/http__10.1.0.2/8080")
	if _, no := affinityName("service-endpoints"); !ok || no {
		t.Errorf("a set of clients: %t, another one: %t", ok, no)
	}
	c := Clients{name: {a}, "KUBE-SEP-IMFC5XQKDZMFROSF": {a, b}}
	got := c.Of(k, netip.MustParseAddrPort("10.1.0.2:8080"))
	if want := map[netip.Addr]time.Duration{a: 0, b: 0}; !maps.Equal(got, want) {
		t.Errorf("%v", got)
	}
	if got := c.Of(k, netip.MustParseAddrPort("10.1.0.3:8080")); len(got) != 0 {
		t.Errorf("another endpoint: %v", got)
	}
}
