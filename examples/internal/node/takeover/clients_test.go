//go:build linux

package takeover

import (
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
	c := Clients{byName: map[string]map[netip.Addr]time.Duration{}}
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	c.put("affinity-7TCSBJI4-default/web/tcp/http__10.1.0.2/8080"[len(affinityPrefix)+hashLength:], a, time.Minute)
	c.put("KUBE-SEP-IMFC5XQKDZMFROSF", a, time.Second)
	c.put("KUBE-SEP-IMFC5XQKDZMFROSF", b, -time.Second)
	got := c.Of(k, netip.MustParseAddrPort("10.1.0.2:8080"))
	if len(got) != 2 || got[a] != time.Second || got[b] != 0 {
		t.Errorf("%v", got)
	}
	if got := c.Of(k, netip.MustParseAddrPort("10.1.0.3:8080")); len(got) != 0 {
		t.Errorf("another endpoint: %v", got)
	}
}

func TestRecentLine(t *testing.T) {
	addr, seen, ok := recentLine("src=192.0.2.9 ttl: 64 last_seen: 4295470320 oldest_pkt: 1 4295470320")
	if !ok || addr != netip.MustParseAddr("192.0.2.9") || seen != 4295470320 {
		t.Errorf("%v %d %v", addr, seen, ok)
	}
	for _, line := range []string{"", "src=x ttl: 64 last_seen: 1", "src=::1 ttl: 64 last_seen: x", "src=::1 ttl: 64 seen: 1"} {
		if _, _, ok := recentLine(line); ok {
			t.Errorf("%q", line)
		}
	}
}

// TestJiffiesArePlausible checks the bounds that every kernel has.
func TestJiffiesArePlausible(t *testing.T) {
	now, hz, err := jiffies()
	if err != nil || hz < 24 || hz > 10000 || now < uint64(uint32(-300*hz)) {
		t.Errorf("%d at %d Hz, error %v", now, hz, err)
	}
}
