package nftables

import (
	"fmt"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// setPorts sets Service i with n ports and the edits made, and its IPv4 endpoints.
func (r *memoryRig) setPorts(i, n int, eps []int, edits ...func(*v1.Service)) {
	slice := epSlice(i, tracker.IPv4, eps...)
	slice.Ports = nil
	r.tracker.SetService(svc(i, append([]func(*v1.Service){func(s *v1.Service) {
		s.Spec.Ports = nil
		for p := range int32(n) {
			name, number, proto := fmt.Sprint("p", p), 1000+p, v1.ProtocolTCP
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: name, Port: number, Protocol: proto})
			slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: &name, Port: &number, Protocol: &proto})
		}
	}}, edits...)...))
	r.tracker.SetSlice(slice)
}

// TestServiceThatAlternatesCausesFewFullDeltas changes a Service so that the same number of elements
// are in one set and in another by turns, more than an empty set has room for.
func TestServiceThatAlternatesCausesFewFullDeltas(t *testing.T) {
	t.Parallel()
	const ports, rounds = 5, 12
	// sources returns an edit with 1,000 source ranges of a prefix length.
	sources := func(bits int) func(*v1.Service) {
		return func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}}
			for i := range 1000 {
				n := (uint32(i) + 1) << (32 - bits)
				a := netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, netip.PrefixFrom(a, bits).String())
			}
		}
	}
	plain := func(*v1.Service) {}
	manyIPs := func(s *v1.Service) {
		for i := range 1000 {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}).String())
		}
	}
	for _, c := range []struct {
		name string
		edit func(round int) (eps int, edit func(*v1.Service))
		full int
	}{
		{"two prefix lengths", func(round int) (int, func(*v1.Service)) { return 1, sources(24 + round%2) }, 1},
		{"many prefix lengths", func(round int) (int, func(*v1.Service)) { return 1, sources(32 - round) }, 1},
		// The maps of pools with affinity and of frontends grow once.
		{"three maps", func(round int) (int, func(*v1.Service)) {
			return []int{1000, 1000, 1}[round%3], []func(*v1.Service){plain, sticky(600), manyIPs}[round%3]
		}, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newMemoryRig(t)
			for process := range 2 { // the second one keeps the sizes of the sets
				for round := range rounds {
					eps, edit := c.edit(round)
					r.setPorts(0, ports, upTo(eps), edit)
					r.sync()
				}
				if want := c.full + process; r.full != want {
					t.Errorf("%d full deltas for %d changes, want %d", r.full, rounds, want)
				}
				r.verify()
				r.start()
			}
		})
	}
}

// TestFullDeltaHasRoom has Services that need more elements of a set than others suggest. A full delta
// with too little room fails for all Services.
func TestFullDeltaHasRoom(t *testing.T) {
	t.Parallel()
	many := model.SizeFor(0)
	t.Run("without affinity", func(t *testing.T) {
		r := newMemoryRig(t)
		r.layout.Sticky = 1
		r.start()
		const ports = 1000
		for i := range many/ports + 2 {
			r.setPorts(i, ports, []int{1}, sticky(600))
		}
		r.sync()
		if n := r.backend.tables.Table(tracker.IPv4).Room.Count(layout.Endpoints); n <= many {
			t.Errorf("%d endpoints of Services that lack affinity, want more than %d", n, many)
		}
	})
}
