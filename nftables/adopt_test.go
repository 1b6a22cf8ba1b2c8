//go:build linux

package nftables

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// longNamed returns Service number i and a slice of it. Their names have the greatest length
// that Kubernetes allows and differ only at the end.
func longNamed(i int) (*v1.Service, *discovery.EndpointSlice) {
	port := strings.Repeat("p", 15)
	s := svc(i, sticky(1000), func(s *v1.Service) {
		s.Namespace, s.Name = strings.Repeat("n", 63), strings.Repeat("s", 62)+string(rune('a'+i))
		s.Spec.Ports[0].Name = port
	})
	slice := epSlice(i, tracker.IPv4, 1, 2, 3)
	slice.Namespace, slice.Labels[discovery.LabelServiceName], slice.Ports[0].Name = s.Namespace, s.Name, &port
	return s, slice
}

// TestRestartKeepsLongNames restarts with Services whose names do not fit into a comment.
func TestRestartKeepsLongNames(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	for i := range 3 {
		s, slice := longNamed(i)
		r.tracker.SetService(s)
		r.tracker.SetSlice(slice)
	}
	r.sync()
	before := stickyEndpoints(r)
	if n := strings.Count(before, "10.244.0.1 "); n != 3 {
		t.Fatalf("%d pools: %s", n, before)
	}
	for range 2 {
		r.start()
		r.sync()
		r.verify()
		if after := stickyEndpoints(r); after != before {
			t.Errorf("endpoints are %s, were %s", after, before)
		}
	}
}

// makeOlder gives the tables the version of layout 1, and a chain and a map with their names in
// layout 1, and adds a table that version 0.2.0 had beside them. do runs a function in the network namespace.
func makeOlder(t *testing.T, do func(func() error) error, table string) {
	t.Helper()
	script := ""
	for _, family := range []string{"ip", "ip6"} {
		at := family + " " + table
		script += fmt.Sprintf("delete element %s layout { %#x }; add element %s layout { 1 };", at, layout.Version, at)
		script += fmt.Sprintf("add chain %s near; add map %s classes { type classid : verdict; };", at, at)
		script += fmt.Sprintf("add table %s %s; add chain %[1]s %[2]s count-input;", family, packetsOf(DefaultTable))
	}
	nft := netlab.Command(t, "nft", script)
	must.Do(t, do(func() error {
		if out, err := nft.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}))
}
