package ruleset

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// TestChangeYieldsWhatDiffers compares Upserted, Removed and GoneFrontends with their
// definitions.
func TestChangeYieldsWhatDiffers(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 2))
		pool := make([]*tracker.Endpoint, 40)
		for i := range pool {
			pool[i] = endpoint(fmt.Sprintf("10.0.0.%d:80", i), "n1")
		}
		some := func() *Port {
			if r.IntN(4) == 0 {
				return nil
			}
			s := &Port{ID: 1, Key: key("s", tracker.IPv4), Spec: &tracker.ServicePort{}}
			most := pick(r, 3, 40)
			for i, ep := range pool[:most] {
				switch r.IntN(4) {
				case 0:
					continue
				case 1:
					c := *ep
					c.Weight = pick[uint16](r, 1, 2)
					ep = &c
				}
				s.Selection.Reachable = append(s.Selection.Reachable, ep)
				if r.IntN(2) == 0 {
					s.Frontends = append(s.Frontends, Frontend{Kind: KindExternalIP, Addr: pool[i].Addr.Addr(), Port: 80})
				}
			}
			s.Selection.Cluster = s.Selection.Reachable
			return s
		}
		c := Change{Key: key("s", tracker.IPv4), Old: some(), New: some()}
		if c.Fields = diff(c.Old, c.New); r.IntN(3) == 0 {
			c.Fields = FieldAll
		}
		var taken *l4Key
		if c.Old != nil && len(c.Old.Frontends) > 0 && r.IntN(2) == 0 {
			at := l4KeyOf(c.Old, &c.Old.Frontends[0])
			taken, c.lost = &at, []move{{at: at, key: key("other", tracker.IPv4)}}
		}

		before, now := map[netip.AddrPort]*tracker.Endpoint{}, map[netip.AddrPort]*tracker.Endpoint{}
		frontsBefore, frontsNow := map[l4Key]bool{}, map[l4Key]bool{}
		if s := c.Old; s != nil {
			for _, ep := range s.Selection.Reachable {
				before[ep.Addr] = ep
			}
			for i := range s.Frontends {
				frontsBefore[l4KeyOf(s, &s.Frontends[i])] = true
			}
		}
		if c.New != nil {
			for _, ep := range c.New.Selection.Reachable {
				now[ep.Addr] = ep
			}
			for i := range c.New.Frontends {
				frontsNow[l4KeyOf(c.New, &c.New.Frontends[i])] = true
			}
		}
		var wantUp, wantDown, wantFronts, gotUp, gotDown, gotFronts []string
		for a, ep := range now {
			if c.Fields == FieldAll || !before[a].Equal(ep) {
				wantUp = append(wantUp, fmt.Sprint(ep, ep.Weight))
			}
		}
		for a := range before {
			if now[a] == nil {
				wantDown = append(wantDown, a.String())
			}
		}
		for at := range frontsBefore {
			if !frontsNow[at] && (taken == nil || at != *taken) {
				wantFronts = append(wantFronts, netip.AddrFrom16(at.addr).Unmap().String())
			}
		}
		for ep := range c.Upserted() {
			gotUp = append(gotUp, fmt.Sprint(ep, ep.Weight))
		}
		for ep := range c.Removed() {
			gotDown = append(gotDown, ep.String())
		}
		for f := range c.GoneFrontends() {
			gotFronts = append(gotFronts, f.Addr.String())
		}
		for _, x := range []struct {
			what      string
			got, want []string
		}{{"upserted", gotUp, wantUp}, {"removed", gotDown, wantDown}, {"gone", gotFronts, wantFronts}} {
			slices.Sort(x.got)
			slices.Sort(x.want)
			if !slices.Equal(x.got, x.want) {
				t.Fatalf("seed %d: %s\n got %v\nwant %v", seed, x.what, x.got, x.want)
			}
		}
		// Iterations may stop early.
		for range c.Upserted() {
			break
		}
		for range c.Removed() {
			break
		}
		for range c.GoneFrontends() {
			break
		}
	}
}

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
