package nftables

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestSetsKeepTheirRoom switches the affinity of a Service with more endpoints than an empty set has
// room for. The kernel's sets grow once, and a new process keeps their sizes.
func TestSetsKeepTheirRoom(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	slice := epSlice(0, tracker.IPv4, upTo(1000)...)
	slice.Ports = nil
	ports := func(s *v1.Service) {
		s.Spec.Ports = nil
		for p := range int32(5) {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", p), Port: 80 + p, Protocol: v1.ProtocolTCP})
		}
	}
	for p := range int32(5) {
		name, number, proto := fmt.Sprint("p", p), 8000+p, v1.ProtocolTCP
		slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: &name, Port: &number, Protocol: &proto})
	}
	r.tracker.SetSlice(slice)
	full := 0
	sync := func(affinity bool) {
		t.Helper()
		edits := []func(*v1.Service){ports}
		if affinity {
			edits = append(edits, sticky(600))
		}
		r.tracker.SetService(svc(0, edits...))
		r.sync()
		if r.last.Full {
			full++
		}
	}
	for range 3 {
		sync(false)
		sync(true)
	}
	if full != 2 {
		t.Errorf("%d full deltas, want 2: the first one, and one for the sets of pools with affinity", full)
	}
	r.verify()
	r.start()
	full = 0
	for range 3 {
		sync(true)
		sync(false)
	}
	if full != 1 {
		t.Errorf("%d full deltas after a restart, want 1", full)
	}
	r.verify()
}
