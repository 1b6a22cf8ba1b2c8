package mapplane

import (
	"context"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
)

// setService gives Service web n endpoints. other replaces one of them by another address.
func (w *world) setService(n int, other bool) {
	w.tracker.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Port: 80}}},
	})
	slice := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "web", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
	}
	for i := range n {
		at := 2 * i
		if other && i == n/3 {
			at = 2*(2*n/3) + 1
		}
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", at>>8, at&255)}})
	}
	w.tracker.SetSlice(slice)
}

// BenchmarkReplacedEndpoint replaces one endpoint of a Service. The time and the allocations
// are those of the backend alone.
func BenchmarkReplacedEndpoint(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprint("of=", n), func(b *testing.B) {
			w := newWorld(b, func() bool { return false })
			w.frontends.look, w.members.look = func() {}, func() {}
			var apply applied
			w.cursor = w.engine.Attach("timed", &apply)
			plane := must.Get(New(w.frontends, w.members))(b)
			apply = applied{b, plane}
			sync := func() {
				must.Do(b, w.cursor.Sync(b.Context()))
			}
			w.setService(n, false)
			b.StopTimer()
			sync()
			b.ReportAllocs()
			b.ResetTimer()
			b.StopTimer()
			w.frontends.calls, w.members.calls = 0, 0
			for i := range b.N {
				w.setService(n, i%2 == 0)
				sync()
			}
			b.ReportMetric(float64(w.frontends.calls+w.members.calls)/float64(b.N), "calls/op")
		})
	}
}

// applied is a backend whose Apply is timed.
type applied struct {
	b *testing.B
	ruleset.Backend
}

func (a *applied) Apply(ctx context.Context, d *ruleset.Delta) error {
	a.b.StartTimer()
	defer a.b.StopTimer()
	return a.Backend.Apply(ctx, d)
}

// BenchmarkDeletedService deletes a Service of 1,000 endpoints.
func BenchmarkDeletedService(b *testing.B) {
	calls := 0
	for b.Loop() {
		w := newWorld(b, func() bool { return false })
		w.frontends.look, w.members.look = func() {}, func() {}
		w.setService(1000, false)
		must.Do(b, w.cursor.Sync(b.Context()))
		w.frontends.calls, w.members.calls = 0, 0
		w.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "web"})
		must.Do(b, w.cursor.Sync(b.Context()))
		calls += w.frontends.calls + w.members.calls
	}
	b.ReportMetric(float64(calls)/float64(b.N), "calls/op")
}
