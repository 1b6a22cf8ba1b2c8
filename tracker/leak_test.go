package tracker

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/usage"
)

// TestDeletedObjectsAreFreed creates and deletes thousands of Services and slices,
// with names and addresses that are used once, changes the node, and recomputes endpoints. Afterwards the
// tracker must hold no more than before.
func TestDeletedObjectsAreFreed(t *testing.T) {
	tr, err := New(Config{
		Node: NodeInfo{Name: "node-0", Zone: "zone-0"},
		OnServiceEndpoint: func(_ *ServicePort, e *Endpoint) error {
			e.Weight = 2
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(KindServices, KindSlices, KindNodes)
	const cycles, each = 150, 20
	port, protocol, app := int32(8080), v1.ProtocolTCP, "p"
	cycle := func(n int) {
		name := func(i int) types.NamespacedName {
			return types.NamespacedName{Namespace: "ns", Name: fmt.Sprint("svc-", n, "-", i)}
		}
		for i := range each {
			ip := netip.AddrFrom4([4]byte{10, byte(n >> 8), byte(n), byte(i + 1)}).String()
			s := &v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: name(i).Namespace, Name: name(i).Name},
				Spec: v1.ServiceSpec{
					Type: v1.ServiceTypeLoadBalancer, ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
					ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: int32(30000 + i),
					Ports: []v1.ServicePort{{Name: app, Port: 80, NodePort: int32(31000 + i), Protocol: protocol}},
				},
			}
			es := &discovery.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: s.Namespace, Name: s.Name, Labels: map[string]string{discovery.LabelServiceName: s.Name},
					Annotations: map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Add(time.Hour).Format(time.RFC3339Nano)},
				},
				AddressType: discovery.AddressTypeIPv4,
				Ports:       []discovery.EndpointPort{{Name: &app, Port: &port, Protocol: &protocol}},
			}
			for e := range 4 {
				node := fmt.Sprint("node-", e)
				a := netip.AddrFrom4([4]byte{11, byte(n >> 8), byte(n), byte(4*i + e)}).String()
				es.Endpoints = append(es.Endpoints, discovery.Endpoint{
					Addresses: []string{a}, NodeName: &node,
					Hints: &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: fmt.Sprint("zone-", e)}}},
				})
			}
			if n%2 == 0 || i%2 == 0 { // the slice may come first
				tr.SetSlice(es)
				tr.SetService(s)
			} else {
				tr.SetService(s)
				tr.SetSlice(es)
			}
			if i%5 == 4 { // some are deleted before the Take
				tr.DeleteService(name(i))
				tr.DeleteSlice(name(i))
			}
			if i%7 == 6 { // some slices move to another Service
				es.Labels[discovery.LabelServiceName] = "missing"
				tr.SetSlice(es)
			}
		}
		tr.SetNode(NodeInfo{Name: fmt.Sprint("node-", n%4), Zone: fmt.Sprint("zone-", n%4)})
		tr.Take()
		for i := range each {
			tr.DeleteService(name(i))
			tr.DeleteSlice(name(i))
		}
		tr.Take()
	}
	for n := range cycles {
		cycle(n)
	}
	lengths, before := usage.Lengths(tr), usage.Now()
	for n := range cycles {
		cycle(cycles + n)
	}
	for at, n := range usage.Lengths(tr) {
		if n != lengths[at] || n > 2*each {
			t.Errorf("%s holds %d elements, held %d before", at, n, lengths[at])
		}
	}
	// Less than 40 bytes for each of the 3,000 Services and slices.
	before.Keep(t, 100<<10)
	runtime.KeepAlive(tr)
}
