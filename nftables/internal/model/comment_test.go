package model

import (
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestCommentsNameTheServicePort reads the comments of frontends of every kind as Lookup, Ready and
// Traffic do, and those of sticky pools as Adopt does. Both are formats that other versions read.
func TestCommentsNameTheServicePort(t *testing.T) {
	r := newRig(t)
	balanced := func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.8"}, {IP: "2001:db8::8"}}
	}
	unnamed := backendtest.Service(backendtest.ServiceName(3), "", "10.96.0.4", "fd00:10:96::4", backendtest.NodePort(30004))
	r.tracker.SetService(svc(0))
	r.tracker.SetService(svc(1, backendtest.NodePort(30002), backendtest.ExternalIPs("192.0.2.7", "2001:db8::7"), backendtest.ExternalLocal, backendtest.Affinity(10), balanced))
	r.tracker.SetService(svc(2, backendtest.NodePort(30003), backendtest.Over(v1.ProtocolUDP)))
	r.tracker.SetService(unnamed)
	for i, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r.tracker.SetSlice(epSlice(1, f, 2*i, 2*i+1))
	}
	r.sync()

	kinds := map[ruleset.Kind]bool{}
	sticky := 0
	for _, s := range r.engine.Snapshot().Services {
		sets := r.backend.kernel.tables[s.Key.Family].sets
		for i := range s.Frontends {
			f := &s.Frontends[i]
			kinds[f.Kind] = true
			all, _, key := keyOf(s, f)
			comment := sets[all].elements[key].text
			if got := layout.ParseServiceComment(comment, s.Key.Protocol); got != s.Key.ServicePortName {
				t.Errorf("%v: the comment %q of a frontend of kind %v names %v", s.Key, comment, f.Kind, got)
			}
		}
		if s.Port.Affinity == 0 {
			continue
		}
		a := NewAdopted()
		for key, e := range sets[layout.StickyEndpoints].elements {
			a.Add(key.Bytes(), e.data.Bytes(), e.text)
		}
		for _, owner := range []StickyOwner{StickyOwner(s.Key.String()), StickyOwner(s.Key.String() + " local")} {
			if p := a.Pools[owner]; p == nil || len(p.members) == 0 {
				t.Errorf("%v: no comment names the sticky pool %q; those named are %v", s.Key, owner, a.Pools)
			}
			sticky++
		}
	}
	if len(kinds) != 4 || sticky != 4 {
		t.Errorf("frontends are of the kinds %v, and sticky pools %d", kinds, sticky)
	}
}
