package tracker_test

import (
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/tracker"
)

func TestNodeInfoOf(t *testing.T) {
	type addrs = []v1.NodeAddress
	const in, ex = v1.NodeInternalIP, v1.NodeExternalIP
	for _, c := range []struct {
		name string
		in   addrs
		want []string
	}{
		{"none", nil, nil},
		{"one", addrs{{Type: in, Address: "192.0.2.1"}}, []string{"192.0.2.1"}},
		{"the first of each family", addrs{
			{Type: v1.NodeHostName, Address: "192.0.2.9"},
			{Type: in, Address: "2001:db8::1"},
			{Type: in, Address: "192.0.2.1"},
			{Type: in, Address: "192.0.2.2"},
			{Type: in, Address: "2001:db8::2"},
		}, []string{"2001:db8::1", "192.0.2.1"}},
		{"internal before external", addrs{
			{Type: ex, Address: "198.51.100.1"}, {Type: in, Address: "192.0.2.1"}, {Type: ex, Address: "2001:db8::1"},
		}, []string{"192.0.2.1", "2001:db8::1"}},
		{"mapped", addrs{{Type: in, Address: "::ffff:192.0.2.1"}}, []string{"192.0.2.1"}},
		{"bad ones", addrs{{Type: in, Address: "node-a"}, {Type: in}, {Type: in, Address: "fe80::1%eth0"}, {Type: ex, Address: "192.0.2.1"}}, []string{"192.0.2.1"}},
	} {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"topology.kubernetes.io/zone": "z"}}}
		n.Status.Addresses = c.in
		want := tracker.NodeInfo{Name: "n", Zone: "z"}
		for _, a := range c.want {
			want.Addresses = append(want.Addresses, netip.MustParseAddr(a))
		}
		if got := tracker.NodeInfoOf(n); !got.Equal(want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, want)
		}
	}
	if got := tracker.NodeInfoOf(nil); !got.Equal(tracker.NodeInfo{}) {
		t.Errorf("nil: %+v", got)
	}
}
