package backendtest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// ChangeBesideAttacker measures the time from a change of one endpoint until it is in effect,
// beside a tenant whose worst allowed object changes every 20 ms, for each kind of attack. The
// rules are those of 1,000 Services with 10 endpoints each, of IPv4. open returns a new backend
// of a new node.
func ChangeBesideAttacker(b *testing.B, open func(testing.TB) ruleset.Backend) {
	for _, a := range attacks() {
		b.Run("attack="+a.name, func(b *testing.B) { besideAttacker(b, a, open(b)) })
	}
}

const victims, victimEndpoints = 1000, 10

func victimName(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: "bench", Name: fmt.Sprint("service-", i)}
}

func victimService(i int) *v1.Service {
	s := Service(victimName(i), "http", fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255), "")
	s.Spec.ClusterIPs, s.Spec.IPFamilies = s.Spec.ClusterIPs[:1], s.Spec.IPFamilies[:1]
	return s
}

func victimSlice(i int) *discovery.EndpointSlice {
	var endpoints []discovery.Endpoint
	for n := i * victimEndpoints; n < (i+1)*victimEndpoints; n++ {
		endpoints = append(endpoints, Endpoint(fmt.Sprintf("10.128.%d.%d", n>>8, n&255), fmt.Sprint("node-", n%1000)))
	}
	return Slice(victimName(i), "abcde", tracker.IPv4, "http", v1.ProtocolTCP, endpoints...)
}

// attack is what a tenant does beside another's changes.
type attack struct {
	name string
	// hash lets the attacker's Services choose by a hash of 65,535 buckets.
	hash bool
	// step changes the attacker's objects for the i-th time.
	step func(tr *tracker.Tracker, i int)
}

// attackerService returns a Service with ports that begin with a letter, which is part of the
// ports' names.
func attackerService(ports int, letter string, edit func(*v1.Service)) *v1.Service {
	s := victimService(60_000)
	s.Namespace, s.Name, s.UID = "attacker", "evil", "u"
	s.Spec.Ports = nil
	for i := range ports {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint(letter, i), Protocol: v1.ProtocolTCP, Port: int32(1000 + i)})
	}
	edit(s)
	return s
}

// attackerSlice returns the n-th slice of the Service.
func attackerSlice(n, ports, endpoints int, letter string, shift int) *discovery.EndpointSlice {
	es := Slice(types.NamespacedName{Namespace: "attacker", Name: "evil"}, fmt.Sprint(letter, n), tracker.IPv4, "", v1.ProtocolTCP)
	es.Ports = nil
	for i := range ports {
		name, port := fmt.Sprint(letter, i), int32(8000+i)
		es.Ports = append(es.Ports, discovery.EndpointPort{Name: &name, Port: &port})
	}
	for e := range endpoints {
		k := n*endpoints + e + shift
		es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 200+k>>16, k>>8&255, k&255)}})
	}
	return es
}

func attacks() []attack {
	letter := func(i int) string { return []string{"a", "b"}[i%2] }
	return []attack{
		{name: "none", step: func(*tracker.Tracker, int) {}},
		// One of two endpoints behind 100 ports with a hash changes.
		{name: "hash", hash: true, step: func(tr *tracker.Tracker, i int) {
			if i == 0 {
				tr.SetService(attackerService(100, "a", func(*v1.Service) {}))
			}
			tr.SetSlice(attackerSlice(0, 100, 2, "a", i%2))
		}},
		// All endpoints of 200 ports change: 20,000 endpoints in one slice.
		{name: "ports", step: func(tr *tracker.Tracker, i int) {
			if i == 0 {
				tr.SetService(attackerService(200, "a", func(*v1.Service) {}))
			}
			tr.SetSlice(attackerSlice(0, 200, 100, "a", 100*(i%2)))
		}},
		// A Service gets another port, so that 20,000 endpoints go and 20,000 come.
		{name: "endpoints", step: func(tr *tracker.Tracker, i int) {
			if i == 0 {
				for n := range 20 {
					tr.SetSlice(attackerSlice(n, 1, 1000, "a", 0))
					tr.SetSlice(attackerSlice(n, 1, 1000, "b", 0))
				}
			}
			tr.SetService(attackerService(1, letter(i), func(*v1.Service) {}))
		}},
		// A Service with 20,000 endpoints gets client affinity and loses it.
		{name: "affinity", step: func(tr *tracker.Tracker, i int) {
			for n := 0; i == 0 && n < 20; n++ {
				tr.SetSlice(attackerSlice(n, 1, 1000, "a", 0))
			}
			tr.SetService(attackerService(1, "a", func(s *v1.Service) {
				if i%2 == 0 {
					s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
				}
			}))
		}},
		// A thousand endpoints at a time are replaced.
		{name: "slice", step: func(tr *tracker.Tracker, i int) {
			if i == 0 {
				tr.SetService(attackerService(1, "a", func(*v1.Service) {}))
				for n := range 10 {
					tr.SetSlice(attackerSlice(n, 1, 1000, "a", 0))
				}
			}
			tr.SetSlice(attackerSlice(i%10, 1, 1000, "a", 20_000*(i/10%2)))
		}},
		// 1,000 external IPs and load-balancer IPs with 1,000 source ranges each come and go.
		{name: "frontends", step: func(tr *tracker.Tracker, i int) {
			tr.SetSlice(attackerSlice(0, 20, 2, "a", 0))
			tr.SetService(attackerService(20, "a", func(s *v1.Service) {
				s.Spec.Type = v1.ServiceTypeLoadBalancer
				for n := range 1000 {
					s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("198.18.%d.%d", n/250+8*(i%2), n%250))
					s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("172.%d.%d.0/24", 16+n/250, n%250))
					if n < 100 {
						s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: fmt.Sprintf("198.19.%d.%d", i%2, n)})
					}
				}
			}))
		}},
	}
}

// victimBackend sends to inEffect when a change of the victim is in effect.
type victimBackend struct {
	ruleset.Backend
	inEffect chan<- struct{}
}

// Limits returns those of the backend, among them the size of its deltas.
func (v victimBackend) Limits(f tracker.Family) ruleset.Limits { return ruleset.LimitsOf(v.Backend, f) }

func (v victimBackend) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := v.Backend.Apply(ctx, d)
	for i := range d.Changes {
		// A set without room leads to a Full delta, which has all Services.
		if c := &d.Changes[i]; err == nil && c.Key.NamespacedName == victimName(7) && c.Old != nil && c.Old != c.New {
			v.inEffect <- struct{}{}
		}
	}
	return err
}

func besideAttacker(b *testing.B, a attack, backend ruleset.Backend) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	hook := func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
		if a.hash && s.Namespace == "attacker" {
			p.Hash, p.HashBuckets = tracker.HashSourcePort, 65535
		}
		return nil
	}
	p, err := NewPipeline(tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}, OnService: hook}, ruleset.Config{Budget: ruleset.DefaultBudget()})
	if err != nil {
		b.Fatal(err)
	}
	inEffect := make(chan struct{}, 1)
	cursor := p.Engine.Attach("victim", victimBackend{backend, inEffect})
	for i := range victims {
		p.Tracker.SetService(victimService(i))
		p.Tracker.SetSlice(victimSlice(i))
	}
	if err := cursor.Sync(ctx); err != nil {
		b.Fatal(err)
	}
	wake := make(chan struct{}, 1)
	p.Engine.Notify(func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	stopped := make(chan error, 1)
	go func() { // the loop of package runner
		for {
			select {
			case <-ctx.Done():
				stopped <- nil
				return
			case <-wake:
			}
			if err := cursor.Sync(ctx); err != nil && ctx.Err() == nil {
				stopped <- err
				return
			}
		}
	}()
	attacked := make(chan struct{})
	go func() {
		defer close(attacked)
		for i := 0; ctx.Err() == nil; i++ {
			a.step(p.Tracker, i)
			time.Sleep(20 * time.Millisecond)
		}
	}()
	time.Sleep(2 * time.Second) // the attacker's first rules
	var took []time.Duration
	i := 0
	for b.Loop() {
		es := victimSlice(7)
		i++
		es.Endpoints[0].Addresses = []string{fmt.Sprintf("10.127.%d.%d", i>>8&255, i&255)}
		start := time.Now()
		p.Tracker.SetSlice(es)
		select {
		case <-inEffect:
		case err := <-stopped:
			b.Fatal(err)
		case <-time.After(time.Minute):
			b.Fatal("no effect within a minute")
		}
		took = append(took, time.Since(start))
		time.Sleep(7 * time.Millisecond)
	}
	cancel()
	<-attacked
	<-stopped
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(took[len(took)/2]), "median-ms")
	b.ReportMetric(ms(took[len(took)*99/100]), "p99-ms")
	b.ReportMetric(ms(took[len(took)-1]), "worst-ms")
	b.ReportMetric(0, "ns/op")
}
