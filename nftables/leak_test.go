//go:build linux

package nftables

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/usage"
	"github.com/go-proxier/proxier/tracker"
)

// TestServicesAndBackendsDoNotLeak adds and removes thousands of Services, and opens and closes
// hundreds of backends. A second round must not use more resources, in the process and in the
// kernel, than the first.
func TestServicesAndBackendsDoNotLeak(t *testing.T) {
	// Not parallel, because other tests have goroutines and files.
	cycles := 100
	if !testtime.Thorough() {
		cycles = 20
	}
	const services = 40
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	r.tracker.SetService(svc(200))
	r.tracker.SetSlice(epSlice(200, tracker.IPv4, upTo(3)...))
	r.sync()
	ids := map[uint32]tracker.Key{}
	cycle := func(n int) {
		for i := range services {
			edits := []func(*v1.Service){func(s *v1.Service) {}, sticky(100), func(s *v1.Service) {
				s.Spec.Type = v1.ServiceTypeNodePort
				s.Spec.Ports[0].NodePort = int32(30000 + i)
			}}
			s := svc(i, edits[(n+i)%len(edits)])
			// Each name is used once, as for a cluster's jobs.
			s.Name = fmt.Sprintf("svc-%d-%d", n, i)
			es := epSlice(i, tracker.IPv4, (n+i)%1000, (n+i)%1000+1, (n+7*i)%1000+2000)
			es.Name, es.Labels["kubernetes.io/service-name"] = s.Name+"-x", s.Name
			r.tracker.SetService(s)
			r.tracker.SetSlice(es)
		}
		r.sync()
		clear(ids)
		for _, s := range r.engine.Snapshot().Ports {
			if other, taken := ids[s.ID]; taken {
				t.Fatalf("%v and %v have the same ID", other, s.Key)
			}
			ids[s.ID] = s.Key
		}
		for i := range services {
			name := fmt.Sprintf("svc-%d-%d", n, i)
			r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: name})
			r.tracker.DeleteSlice(types.NamespacedName{Namespace: "ns", Name: name + "-x"})
		}
		r.sync()
	}
	renew := func(n int) {
		for range n {
			b := must.Get(New(t.Context(), Config{NetNS: r.host.File()}))(t)
			c := r.engine.Attach("another", b)
			must.Do(t, c.Sync(context.Background()))
			c.Detach()
			must.Do(t, b.Close())
		}
		r.cursor.Resync()
		r.sync()
	}
	kernel := func() string {
		r.cursor.Resync()
		r.sync()
		r.verify()
		return normal(r.nft("list ruleset"))
	}
	for n := range cycles {
		cycle(n)
	}
	renew(30)
	tables, before := kernel(), usage.Now()
	for n := range cycles {
		cycle(cycles + n)
	}
	renew(30)
	// Less than 50 bytes for each Service. Noise has the order of some ten kB.
	before.Keep(t, 200<<10)
	if now := kernel(); now != tables {
		t.Errorf("the kernel's tables have changed: %s", backendtest.FirstDifference(now, tables))
	}
	t.Logf("%d Services added and removed, %d elements in the kernel", services*cycles, strings.Count(tables, ","))
}
