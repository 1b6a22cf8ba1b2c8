//go:build linux

package ipvs

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/usage"
)

// testChangesLeakNothing creates and removes Services and backends twice. The second time must
// not use more resources of the process and of the kernel than the first.
func testChangesLeakNothing(t *testing.T) {
	cycles, services := 2, 8
	if *thousands {
		cycles, services = 20, 50
	}
	r := newRig(t, newHost(t), Config{})
	r.set(svc(200), 200, -1, 2)
	r.sync()
	protocols := []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}
	work := func(first int) {
		for n := range cycles {
			name := func(i int) types.NamespacedName {
				return types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("job-%d-%d", first+n, i)} // never used again
			}
			for i := range services {
				s := svc(i, over(protocols[(n+i)%3]), nodePort(30000+int32(i)))
				if i%2 == 0 {
					externalLocal(s)
				}
				if i%3 == 0 {
					affinity(100)(s)
					externalIPs(fmt.Sprintf("198.18.%d.%d", n, i))(s)
				}
				s.Name = name(i).Name
				es := slice(i, s.Spec.Ports[0].Protocol, 1+(first+n+i)%99, -1-(first+n+i)%999, -1000)
				es.Name, es.Labels["kubernetes.io/service-name"] = s.Name, s.Name
				r.tracker.SetService(s)
				r.tracker.SetSlice(es)
			}
			r.sync()
			for i := range services {
				r.tracker.DeleteService(name(i))
				r.tracker.DeleteSlice(name(i))
			}
			r.sync()
			// Restart without rig.restart, which keeps the backends until the test ends.
			r.cursor.Detach()
			r.backend.Close()
			b := must.Get(New(t.Context(), r.config))(t)
			r.backend, r.cursor = b, r.engine.Attach("ipvs", b)
			r.sync()
		}
	}
	defer func() { r.backend.Close() }()
	kernel := func() string {
		// SCTP and UDP servers drain for a second.
		must.Do(t, r.backend.tend(context.Background(), time.Now().Add(time.Minute)))
		return strings.Join(slices.Concat(r.run("ipvsadm -Sn"), r.run("ipset save"), withoutComments(r.run("iptables-save")),
			withoutComments(r.run("ip6tables-save")), r.run("ip -o addr show dev "+deviceName)), "\n")
	}
	work(0)
	before := kernel()
	had := usage.Now()
	work(cycles)
	had.Keep(t, 200<<10)
	if after := kernel(); after != before {
		t.Errorf("the kernel's state is\n%s\nwant\n%s", after, before)
	}
	r.agree()
	for _, s := range r.backend.states {
		marks := 0
		for n := range uint32(lastMark) {
			if _, used := s.marks.Key(n + 1); used {
				marks++
			}
		}
		if len(s.services) != 1 || len(s.moved)+marks+len(s.retired)+len(s.drainingReals)+len(s.notLocalYet) != 0 {
			t.Errorf("%s: the backend holds %d Services, want the one that stays, %d addresses that moved, %d marks, %d retired, %d draining", s.family, len(s.services), len(s.moved), marks, len(s.retired), len(s.drainingReals))
		}
		for e := range s.entries.Unused() {
			t.Errorf("%s: the unused element %v is left", s.family, e)
		}
	}
}
