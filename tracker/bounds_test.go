package tracker_test

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// TestProductsOfAServiceAreBounded has lists that are as long as the API allows.
func TestProductsOfAServiceAreBounded(t *testing.T) {
	for _, c := range []struct {
		ports, addresses         int
		wantPorts, wantAddresses int // addresses: external and load-balancer IPs of a port
		wantRanges               int
	}{
		{10, 100, 10, 200, 100},
		{3, 20_000, 3, 2000, 33},
		{5000, 3, 2000, 5, 3},
		{1000, 1000, 1000, 10, 10},
	} {
		s, e := newServices(t, tracker.Config{})
		obj := dualStack()
		obj.Spec.Type = v1.ServiceTypeLoadBalancer
		obj.Spec.ExternalIPs, obj.Spec.LoadBalancerSourceRanges, obj.Status.LoadBalancer.Ingress, obj.Spec.Ports = nil, nil, nil, nil
		for i := range c.ports {
			obj.Spec.Ports = append(obj.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(1 + i)})
		}
		for i := range c.addresses {
			a := fmt.Sprintf("%d.%d", i/250, i%250)
			obj.Spec.ExternalIPs = append(obj.Spec.ExternalIPs, "198.18."+a)
			obj.Status.LoadBalancer.Ingress = append(obj.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: "198.19." + a})
			obj.Spec.LoadBalancerSourceRanges = append(obj.Spec.LoadBalancerSourceRanges, "10.1."+a+"/32")
		}
		s.Set(obj)
		s.Take()
		n := 0
		for k, p := range s.Map() {
			if k.Family != tracker.IPv4 {
				continue
			}
			n++
			if got := len(p.ExternalIPs) + len(p.LoadBalancerIPs); got != c.wantAddresses || len(p.SourceRanges) != c.wantRanges {
				t.Fatalf("%d x %d: %d addresses, %d ranges, want %d, %d", c.ports, c.addresses, got, len(p.SourceRanges), c.wantAddresses, c.wantRanges)
			}
		}
		if n != c.wantPorts {
			t.Errorf("%d ports, want %d", n, c.wantPorts)
		}
		reported := strings.Contains(strings.Join(*e, " "), string(tracker.ReasonLimitExceeded))
		if cut := n != c.ports || c.wantAddresses != 2*c.addresses; reported != cut {
			t.Errorf("%d x %d: reported %q", c.ports, c.addresses, *e)
		}
	}
}
