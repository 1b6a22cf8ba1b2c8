package ruleset

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// views is a backend that keeps the ports of each Service by what a delta yields, and fails for some
// Services.
type views struct {
	fail  func() bool
	ports map[types.NamespacedName][]*Port
	pools map[tracker.Key][2]bool
}

func (v *views) Apply(_ context.Context, d *Delta) error {
	failed := map[tracker.Key]error{}
	for i := range d.Changes {
		c := &d.Changes[i]
		if v.fail() {
			failed[c.Key] = errors.New("refused")
			if v.fail() { // half-way
				continue
			}
		}
		if failed[c.Key] != nil {
			continue
		}
		had := v.pools[c.Key]
		for i, t := range []Target{TargetCluster, TargetLocal} {
			if c.Fields&FieldPools == 0 && had[i] != c.New.HasPool(t) {
				return fmt.Errorf("%v: pools differ without FieldPools", c.Key)
			}
			had[i] = c.New.HasPool(t)
		}
		v.pools[c.Key] = had
	}
	seen := 0
	for s := range d.Services() {
		v.ports[s.Name] = s.Ports
		seen += len(s.Changes)
	}
	if seen != len(d.Changes) {
		return fmt.Errorf("Services yields %d of %d changes", seen, len(d.Changes))
	}
	if len(failed) != 0 {
		return &PartialError{Failed: failed}
	}
	return nil
}

// TestViewsOfADeltaFollowTheRuleset compares what a backend keeps by FieldPools and Delta.Services
// with a snapshot.
func TestViewsOfADeltaFollowTheRuleset(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 4))
		tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
		failing := false
		v := &views{
			fail:  func() bool { return failing && r.IntN(3) == 0 },
			ports: map[types.NamespacedName][]*Port{}, pools: map[tracker.Key][2]bool{},
		}
		serves := func(s *Port) bool { return seed%2 == 0 || len(s.Spec.ExternalIPs) != 1 }
		c := e.AttachPart("views", v, serves)
		for step := range 40 {
			n := r.IntN(4)
			name := fmt.Sprint("s", n)
			switch r.IntN(6) {
			case 0:
				tr.DeleteService(types.NamespacedName{Namespace: "default", Name: name})
			case 1, 2:
				tr.SetSlice(sliceOn(name, pick(r, "n1", "n2"), []string{"10.0.0.1", "10.0.0.2"}[:r.IntN(3)]...))
			default:
				tr.SetService(service(name, fmt.Sprint("172.30.0.", 1+n), func(s *v1.Service) {
					for _, a := range []string{"192.0.2.1", "192.0.2.2"} {
						if r.IntN(2) == 0 {
							s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, a)
						}
					}
					s.Spec.Ports[0].Port = int32(80 + n + r.IntN(2))
					if r.IntN(2) == 0 {
						s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprint("fd00::", 1+n))
						s.Spec.IPFamilies = append(s.Spec.IPFamilies, v1.IPv6Protocol)
					}
					if r.IntN(2) == 0 {
						s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "q", Port: 90, Protocol: v1.ProtocolUDP})
					}
					if r.IntN(3) == 0 {
						s.Spec.InternalTrafficPolicy = ptr(v1.ServiceInternalTrafficPolicyLocal)
					}
				}))
			}
			failing = step%10 < 7
			if err := c.Sync(t.Context()); err != nil && !failing {
				t.Fatal(err)
			}
			if failing {
				var p *PartialError
				if err := c.Sync(t.Context()); err != nil && !errors.As(err, &p) {
					t.Fatal(err)
				}
				continue
			}
			snap := partOf(e.Snapshot(), serves)
			for _, s := range snap.Ports {
				if got := v.ports[s.Key.NamespacedName]; !slices.Equal(got, snap.PortsOf(s.Key.NamespacedName)) {
					t.Fatalf("seed %d step %d: %v has ports %v", seed, step, s.Key, got)
				}
			}
			for n, ports := range v.ports {
				if len(ports) != 0 && snap.PortsOf(n) == nil {
					t.Fatalf("seed %d: %v stays", seed, n)
				}
			}
		}
	}
}

// TestEndedNotifyIsNotCalled ends a registration while another stays.
func TestEndedNotifyIsNotCalled(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var ended, stays int
	end := e.Notify(func() { ended++ })
	e.Notify(func() { stays++ })
	end()
	end()
	tr.SetService(service("a", "172.30.0.1"))
	e.SetServiceCIDRs(prefixes("172.30.0.0/16"))
	if ended != 0 || stays != 2 || len(e.notify) != 1 {
		t.Errorf("%d calls after the end, %d of the other, %d registered", ended, stays, len(e.notify))
	}
}
