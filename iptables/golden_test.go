package iptables

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

var update = flag.Bool("update", false, "rewrite the golden listings in testdata")

// everyKind sets a Service of every kind.
func (r *rig) everyKind() {
	r.set(0, []int{1, 2})
	r.set(1, []int{3, 4}, loadBalancer)
	r.set(2, []int{6, 7}, nodePort(30081), externalLocal, externalIPs)
	r.set(3, []int{8, 9}, affinity(600))
	r.set(4, []int{10}, internalLocal) // no endpoint on this node
	r.set(5, []int{12, 13}, internalLocal)
	r.set(6, nil, nodePort(30086))
	r.set(7, nil, loadBalancer, func(s *v1.Service) {
		s.Spec.Ports[0].Port, s.Spec.Ports[0].NodePort = 81, 30087
		s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceExternalTrafficPolicyLocal, 30999
	})
	r.set(8, []int{16}, nodePort(30088), externalLocal)
}

// TestListingEqualsGolden programs a kernel of each flavor with a Service of every kind. The
// rules that it reads back must equal the rendered ones and the listing in testdata.
func TestListingEqualsGolden(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		for what, uncounted := range map[string]bool{"counted": false, "not counted": true} {
			t.Run(what, func(t *testing.T) {
				t.Parallel()
				testListing(t, flavor, uncounted)
			})
		}
	})
}

// testListing compares listings with or without counters, which must be the only difference.
func testListing(t *testing.T, flavor system, uncounted bool) {
	r := newRig(t, flavor, func(c *Config) {
		c.LocalhostNodePorts, c.uncounted = true, uncounted
	})
	if !uncounted {
		needCounters(t, r.backend)
	}
	r.everyKind()
	r.sync()
	r.verify()
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		var b strings.Builder
		l := r.kernel(f)
		for _, name := range slices.Sorted(maps.Keys(l)) {
			fmt.Fprintf(&b, "%s\n", name)
			for _, rule := range l[name] {
				fmt.Fprintf(&b, "\t%s\n", rule)
			}
		}
		path := filepath.Join("testdata", "listing-"+strings.ToLower(f.String())+".txt")
		if *update && !uncounted {
			must.Do(t, os.WriteFile(path, []byte(b.String()), 0o644))
		}
		text := must.Get(os.ReadFile(path))(t)
		want := string(text)
		if uncounted {
			var rest strings.Builder
			for line := range strings.Lines(want) {
				if !strings.Contains(line, counted(LocalhostNodePorts)) {
					rest.WriteString(strings.Replace(line, " "+counted(InvalidDropped), "", 1))
				}
			}
			want = rest.String()
		}
		if got := b.String(); got != want {
			t.Errorf("%s: listing differs (go test -run Listing -update rewrites it):\n%s", path, backendtest.FirstDifference(got, want))
		}
	}
}

// TestChainNamesMatchKubeProxy compares chain names with two that kube-proxy generated.
func TestChainNamesMatchKubeProxy(t *testing.T) {
	t.Parallel()
	var k tracker.Key
	k.Namespace, k.Name, k.Port, k.Protocol = "ns1", "svc1", "p80", v1.ProtocolTCP
	if got, want := prefixService+hashOf(serviceID(k)), "KUBE-SVC-XPGD46QRK7WJZT7O"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := prefixEndpoint+hashOf(serviceID(k), "10.180.0.1:80"), "KUBE-SEP-SXIVWICOYRO3J4NJ"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
