//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// unprivileged is the size of the largest transaction of a process without privileges, with the
// kernel's default of net.core.wmem_max.
const unprivileged = 2*212992 - 32

// TestServiceTakesNoMoreThanMeasured writes random Services and compares their bytes with the
// measured ones.
func TestServiceTakesNoMoreThanMeasured(t *testing.T) {
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		rng := rand.New(rand.NewPCG(7, uint64(f)))
		node := &ruleset.Node{LocalTraffic: ruleset.LocalTraffic{InterfacePrefix: "veth"}}
		node.Info.Name = thisNode
		tab := newTable(f, node, 1, defaultLimits)
		w := newWriter("proxier")
		random := func(id int) *ruleset.Service {
			long := func(n int) string { return strings.Repeat("x", rng.IntN(n)) }
			s := svc(id, func(s *v1.Service) {
				s.Namespace, s.Name, s.Spec.Ports[0].Name = "ns"+long(60), "s"+long(200), "p"+long(30)
				s.Spec.Type = v1.ServiceTypeLoadBalancer
				s.Spec.Ports[0].NodePort = int32(30000 + id)
				s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8:1::1"}}
				for range rng.IntN(12) {
					s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
						fmt.Sprintf("172.16.0.0/%d", 1+rng.IntN(32)), fmt.Sprintf("2001:db8:2::/%d", 1+rng.IntN(128)))
				}
				if rng.IntN(2) == 0 {
					s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
				}
			})
			if rng.IntN(2) == 0 {
				sticky(1 + rng.Int32N(86400))(s)
			}
			ports, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: thisNode}, Families: []tracker.Family{f}})
			if err != nil {
				t.Fatal(err)
			}
			slice := epSlice(id, f, upTo(rng.IntN([]int{2, 20, 2000}[rng.IntN(3)]))...)
			slice.Namespace, slice.Labels[discovery.LabelServiceName] = s.Namespace, s.Name
			slice.Ports[0].Name = &s.Spec.Ports[0].Name
			e, err := ruleset.NewEngine(ruleset.Config{Tracker: ports})
			if err != nil {
				t.Fatal(err)
			}
			ports.SetService(s)
			ports.SetSlice(slice)
			ports.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
			var out *ruleset.Service
			c := e.Attach("x", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
				for _, ch := range d.Changes {
					out = ch.New
				}
				return nil
			}))
			if err := c.Sync(context.Background()); err != nil {
				t.Fatal(err)
			}
			return out
		}
		for i := range 400 {
			id := uint32(1 + rng.IntN(10))
			s := random(int(id))
			if rng.IntN(3) == 0 {
				s = nil
			}
			w.begin()
			before := w.size()
			expected := tab.bytes(s)
			if old := tab.service(id); old != nil {
				expected += tab.bytes(old.rule)
			}
			if err := tab.apply(id, s, w); err != nil {
				t.Fatal(err)
			}
			size := w.size()
			if size-before > expected+messageSize*len(w.touched)+messageSize {
				t.Fatalf("%s, change %d: %d bytes, at most %d expected", f, i, size-before, expected)
			}
			batch, err := w.finish()
			if err != nil {
				t.Fatal(err)
			}
			if batch.Len() > size {
				t.Fatalf("%s, change %d: a transaction of %d bytes, but size is %d", f, i, batch.Len(), size)
			}
		}
	}
}

// TestSmallSocketBufferSuffices has a process without privileges program many chains, many
// endpoints and a Service that is too large for any transaction.
func TestSmallSocketBufferSuffices(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.limit = unprivileged
	r.start()
	ctx := context.Background()
	for i := range 120 {
		r.tracker.SetService(svc(i, sticky(int32(1000+i))))
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			r.tracker.SetSlice(epSlice(i, f, upTo(10+i%7)...))
		}
	}
	for range 3 { // the first tables, a staging table, and the first name again
		r.cursor.Resync()
		r.sync()
		r.verify()
		r.start()
	}
	r.sync()
	for i := range 120 { // in one delta
		r.tracker.SetService(svc(i, sticky(int32(2000+i))))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(19)...))
	}
	r.sync()
	r.verify()
	if r.last.Full {
		t.Error("a large change was a full delta")
	}

	const huge = 10000
	r.tracker.SetService(svc(210))
	r.tracker.SetSlice(epSlice(210, tracker.IPv4, upTo(huge)...))
	r.tracker.SetService(svc(211))
	r.tracker.SetSlice(epSlice(211, tracker.IPv4, upTo(7)...))
	for _, full := range []bool{false, false, true, false} {
		if full {
			r.cursor.Resync()
		}
		err := r.cursor.Sync(ctx)
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, ErrTooLarge) {
			t.Fatalf("Sync returned %v", err)
		}
		if r.last.Full != full {
			t.Errorf("full: %t, want %t", r.last.Full, full)
		}
		if v := kernelView(t, r.backend, tracker.IPv4); v["service 10.96.0.212 6 80"] == "" || v["service 10.96.0.211 6 80"] != "" {
			t.Errorf("the other Service: %q, the large one: %q", v["service 10.96.0.212 6 80"], v["service 10.96.0.211 6 80"])
		}
	}
	// A Service that grows beyond the limit in small changes can be programmed. A large
	// change of it fails alone.
	r.tracker.SetSlice(epSlice(210, tracker.IPv4, upTo(6)...))
	r.sync()
	r.verify()
	r.tracker.SetSlice(epSlice(210, tracker.IPv4, upTo(huge)...))
	if err := r.cursor.Sync(ctx); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("Sync returned %v", err)
	}
	r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-210"})
	r.sync()
	r.verify()
}

// TestClusterIPsComeLast stops a cold start halfway. Packets to a cluster IP may be refused only
// once all of its ports are in the table.
func TestClusterIPsComeLast(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.limit = smallLimit
	r.start()
	for i := range 120 {
		r.tracker.SetService(svc(i))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(30)...))
	}
	// The context ends the cold start after the second step.
	ctx := &countedContext{Context: context.Background(), left: 4}
	if err := r.cursor.Sync(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("Sync returned %v", err)
	}
	count := func(s set) (n int) {
		if err := r.backend.elements(r.backend.name, tracker.IPv4, s, func(kernelElement) { n++ }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if services, refused := count(setServiceIPs), count(setClusterIPs); services == 0 || services == 120 || refused != 0 {
		t.Errorf("halfway, the table has %d services and %d addresses that refuse", services, refused)
	}
	r.sync()
	r.verify()
}

// countedContext is done after the given number of calls of Err.
type countedContext struct {
	context.Context
	left int
}

func (c *countedContext) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}
