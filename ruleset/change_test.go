package ruleset

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

func TestDiffSetsFieldOfEachPart(t *testing.T) {
	base := func() *Port {
		a, b, c := endpoint("10.0.0.1:80", "n1"), endpoint("10.0.0.2:80", "n2"), endpoint("10.0.0.3:80", "n2")
		c.Ready = false
		return &Port{
			Key:  key("s", tracker.IPv4),
			Spec: &tracker.ServicePort{Key: key("s", tracker.IPv4), ClusterIP: addrs("172.30.0.1")[0], Port: 80},
			Selection: tracker.Selection{
				Cluster: []*tracker.Endpoint{a, b}, Local: []*tracker.Endpoint{a}, Reachable: []*tracker.Endpoint{a, b},
				UsesCluster: true, UsesLocal: true, HasAny: true,
			},
			Endpoints: []*tracker.Endpoint{a, b, c},
			Frontends: []Frontend{{Kind: KindClusterIP, Addr: addrs("172.30.0.1")[0], Port: 80, Target: TargetCluster, Internal: TargetCluster}},
		}
	}
	for _, c := range []struct {
		name string
		edit func(*Port)
		want Field
	}{
		{"nothing", func(*Port) {}, 0},
		{"id", func(s *Port) { s.ID = 7 }, 0},
		{"target", func(s *Port) { s.Frontends[0].Target = TargetDrop }, FieldFrontends},
		{"near", func(s *Port) { s.Frontends[0].Internal = TargetDrop }, FieldFrontends},
		{"masquerade", func(s *Port) { s.Frontends[0].Masquerade = MasqueradeAlways }, FieldFrontends},
		{"sources", func(s *Port) { s.Frontends[0].Sources = prefixes("10.0.0.0/8") }, FieldFrontends},
		{"frontend port", func(s *Port) { s.Frontends[0].Port, s.Spec.Port = 81, 81 }, FieldFrontends},
		{"one frontend less", func(s *Port) { s.Frontends = nil }, FieldFrontends},
		{"cluster", func(s *Port) { s.Selection.Cluster = s.Selection.Cluster[1:] }, FieldCluster},
		{"local", func(s *Port) { s.Selection.Local = nil }, FieldLocal},
		{"an endpoint of both pools", func(s *Port) { s.Selection.Cluster[0].Weight = 9 }, FieldCluster | FieldLocal | FieldEndpoints},
		{"affinity", func(s *Port) { s.Spec.Affinity = 1 }, FieldAffinity},
		{"health-check port", func(s *Port) { s.Spec.HealthCheckNodePort = 1 }, FieldOther},
		{"an endpoint in no pool", func(s *Port) { s.Endpoints[2].Serving = false }, FieldEndpoints},
		{"one endpoint in no pool less", func(s *Port) { s.Endpoints = s.Endpoints[:2] }, FieldEndpoints},
		{"no cluster pool, though as empty as before", func(s *Port) { s.Selection.UsesCluster = false }, FieldPools},
		{"no local pool", func(s *Port) { s.Selection.UsesLocal, s.Selection.Local = false, nil }, FieldLocal | FieldPools},
		{"no endpoints at all", func(s *Port) { s.Selection.HasAny = false }, FieldOther},
		{"hash", func(s *Port) { s.Spec.Hash = tracker.HashSource }, FieldHash},
		{"extension", func(s *Port) { s.Spec.Ext = ext(1) }, FieldExt},
		{"extension and frontend", func(s *Port) { s.Spec.Ext = ext(1); s.Frontends = nil }, FieldExt | FieldFrontends},
	} {
		a, b := base(), base()
		c.edit(b)
		if got := diff(a, b); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if got := diff(b, a); got != c.want {
			t.Errorf("%s, reversed: %s, want %s", c.name, got, c.want)
		}
	}
	if diff(nil, nil) != 0 || diff(base(), nil) != FieldAll || diff(nil, base()) != FieldAll {
		t.Error("nil")
	}
}

type ext int

func (e ext) Equal(o tracker.Extension) bool { x, ok := o.(ext); return ok && x == e }

// TestFinderFindsFirst compares the two ways of searching, for long and for short lists.
func TestFinderFindsFirst(t *testing.T) {
	for n := range 40 {
		list := make([]int, n)
		for i := range list {
			list[i] = i * i % 23 // with duplicates
		}
		f := newFinder(list, func(x int) int { return x })
		for k := range 25 {
			if got, want := f.first(k), slices.Index(list, k); got != want || f.has(k) != (want >= 0) {
				t.Errorf("%d elements: %d is at %d, want %d", n, k, got, want)
			}
		}
	}
}

// TestEndpointsAreFoundInEveryOrder compares the search in a sorted list with that in others.
func TestEndpointsAreFoundInEveryOrder(t *testing.T) {
	var list []*tracker.Endpoint
	for i := range 40 {
		list = append(list, &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(2 * i)}), 80)})
	}
	for _, sorted := range []bool{true, false} {
		if !sorted {
			slices.Reverse(list)
		}
		f := findEndpoints(list)
		for i := range 80 {
			at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)
			want := slices.IndexFunc(list, func(ep *tracker.Endpoint) bool { return ep.Addr == at })
			if got := f.first(at); got != want {
				t.Errorf("sorted=%t: %s is at %d, want %d", sorted, at, got, want)
			}
		}
	}
}
