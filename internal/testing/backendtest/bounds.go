package backendtest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// RefusesNothing runs data planes through 400 random worlds at the default Budget. A data plane must accept
// every Service. The worlds have from one to about 200 elements, but two have up to 25,000, more than a port's
// bound. The long form has 1,000, and worlds as large as a namespace may be.
func RefusesNothing(t *testing.T, planes ...func(testing.TB, conformance.SimEnv) conformance.Fake) {
	t.Helper()
	t.Parallel()
	groups := 8 // each closes its planes
	if testtime.Thorough() {
		groups = 20
	}
	for group := range groups {
		t.Run(fmt.Sprint("group=", group), func(t *testing.T) {
			for i := range 50 {
				most := 200
				if i == 0 && group%4 == 0 {
					most = 25_000
				}
				refusesNothing(t, *Seed+uint64(50*group+i), most, planes)
			}
		})
	}
	for i := 0; i < 3 && testtime.Thorough(); i++ {
		refusesNothing(t, *Seed+uint64(i), ruleset.DefaultBudget().Namespace, planes)
	}
}

// refusesNothing runs data planes through the world of a seed, whose changes have at most about the given number
// of elements.
func refusesNothing(t *testing.T, seed uint64, most int, planes []func(testing.TB, conformance.SimEnv) conformance.Fake) {
	t.Helper()
	p, err := NewPipeline(
		tracker.Config{Node: tracker.NodeInfo{Name: ThisNode, Zone: "z1", Addresses: nodeAddrs}, OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint},
		ruleset.Config{Budget: ruleset.DefaultBudget()})
	if err != nil {
		t.Fatal(err)
	}
	var cursors []*ruleset.Cursor
	for i, plane := range planes {
		b := plane(t, SimEnv()).Backend()
		cursors = append(cursors, p.Engine.Attach(fmt.Sprint("plane ", i), acceptor{b, func(err *ruleset.PartialError) {
			t.Errorf("seed %d, %d elements: %v", seed, most, err)
		}}))
	}
	rng := rand.New(rand.NewPCG(seed, 55))
	for range 3 {
		for left := logUniform(rng, most); left > 0; {
			left -= change(p.Tracker, rng, left)
		}
		if rng.IntN(4) == 0 {
			cursors[rng.IntN(len(cursors))].Resync()
		}
		if err := ruleset.SyncAll(t.Context(), cursors[0], cursors[1:]...); err != nil {
			t.Fatalf("seed %d, %d elements: %v", seed, most, err)
		}
	}
}

// SimEnv returns an environment in which no write fails.
func SimEnv() conformance.SimEnv {
	return conformance.SimEnv{
		Families: []tracker.Family{tracker.IPv4, tracker.IPv6}, NodeAddresses: nodeAddrs,
		Fail: func() error { return nil }, Look: func() {},
	}
}

// logUniform returns a number from 1 to most. It has each order of magnitude with the same probability.
func logUniform(rng *rand.Rand, most int) int {
	return min(most, int(math.Exp(rng.Float64()*math.Log(float64(most+1)))))
}

// change changes one of 50 Services and its endpoints, or deletes it. It returns about how many elements that
// adds, at most the given number.
func change(tr *tracker.Tracker, rng *rand.Rand, most int) int {
	name := types.NamespacedName{Namespace: fmt.Sprint("ns", rng.IntN(3)), Name: fmt.Sprint("svc-", rng.IntN(50))}
	if rng.IntN(5) == 0 {
		tr.DeleteService(name)
		return 1
	}
	// Each number of parts multiplies the elements. One beyond each bound is among them.
	n := [4]int{}
	left := most
	for _, i := range rng.Perm(len(n)) {
		n[i] = logUniform(rng, min(left, [...]int{2001, 1001, 20_001, 100_001}[i]))
		left /= n[i]
	}
	ports, addresses, endpoints, sources := n[0], n[1], n[2], n[3]
	own := rng.IntN(1 << 16)
	s := Service(name, "p0", fmt.Sprintf("10.96.%d.%d", own>>8, own&255), fmt.Sprintf("fd00:10:96::%x", own+1))
	es := []string{"10.244", "fd00:10:244::"}
	s.Spec.Ports = nil
	for i := range ports {
		port := v1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(1 + i), Protocol: []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}[rng.IntN(3)]}
		if rng.IntN(2) == 0 {
			port.NodePort = int32(1 + rng.IntN(1<<16-1))
		}
		s.Spec.Ports = append(s.Spec.Ports, port)
	}
	s.Spec.Type = []v1.ServiceType{v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer}[rng.IntN(2)]
	shared := rng.IntN(2) // with other Services
	for i := range addresses {
		a := shared*own&63<<10 + i
		four, six := fmt.Sprintf("198.18.%d.%d", a>>8, a&255), fmt.Sprintf("2001:db8::%x", a+1)
		if rng.IntN(2) == 0 {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, four, six)
		} else {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: four}, v1.LoadBalancerIngress{IP: six})
		}
	}
	for i := range sources {
		s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("20.%d.%d.%d/32", i>>15, i>>7&255, i<<1&255), fmt.Sprintf("2001:db9::%x/128", 2*i))
	}
	if rng.IntN(50) == 0 {
		worldgen.SetHash(s, tracker.Hash(1+rng.IntN(2)))
	}
	for _, edit := range []func(*v1.Service){Affinity(int32(1 + rng.IntN(86_400))), ExternalLocal, InternalLocal, worldgen.SetPreferLocal} {
		if rng.IntN(3) == 0 {
			edit(s)
		}
	}
	tr.SetService(s)
	weighted := rng.IntN(10) == 0
	for i, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		slice := Slice(name, f.String(), f, "", v1.ProtocolTCP)
		base := slice.Ports[0]
		slice.Ports = nil
		for _, p := range s.Spec.Ports {
			base.Name, base.Protocol = &p.Name, &p.Protocol
			slice.Ports = append(slice.Ports, base)
		}
		for k := range endpoints {
			k += own & 15
			addr := fmt.Sprintf("%s%x", es[i], k+1)
			if f == tracker.IPv4 {
				addr = fmt.Sprintf("%s.%d.%d", es[i], k>>8, k&255)
			}
			slice.Endpoints = append(slice.Endpoints, Endpoint(addr, []string{ThisNode, "other"}[rng.IntN(2)]))
			if weighted {
				worldgen.SetWeight(slice, addr, rng.IntN(1<<16))
			}
		}
		tr.SetSlice(slice)
	}
	return ports * (2 + addresses) * (1 + endpoints + sources)
}

// acceptor is a Backend that passes on what its Apply refuses.
type acceptor struct {
	ruleset.Backend
	refused func(*ruleset.PartialError)
}

func (a acceptor) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := a.Backend.Apply(ctx, d)
	var partial *ruleset.PartialError
	if errors.As(err, &partial) {
		a.refused(partial)
	}
	return err
}

// Limits implements [ruleset.Limiter].
func (a acceptor) Limits(f tracker.Family) ruleset.Limits { return ruleset.LimitsOf(a.Backend, f) }
