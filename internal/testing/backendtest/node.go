package backendtest

import (
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// ThisNode is the name of the node of [NewNode].
const ThisNode = "node-a"

// nodeAddrs are the node's addresses.
var nodeAddrs = []netip.Addr{netip.MustParseAddr("192.168.7.1"), netip.MustParseAddr("fd00:7::1")}

// NewNode returns the pipeline of a dual-stack node that recognizes its pods by address
// ranges. It sets the node of c.
func NewNode(tb testing.TB, c tracker.Config) *Pipeline {
	tb.Helper()
	c.Node = tracker.NodeInfo{Name: ThisNode, Zone: "z1", Addresses: nodeAddrs}
	p, err := NewPipeline(c, ruleset.Config{
		LocalTraffic: ruleset.LocalTraffic{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/108")},
	})
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

// ServiceName returns the name of Service number i.
func ServiceName(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: "ns", Name: fmt.Sprintf("svc-%d", i)}
}

// UpTo returns 1 to n.
func UpTo(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i + 1
	}
	return out
}
