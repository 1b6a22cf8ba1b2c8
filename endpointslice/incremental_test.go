package endpointslice_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/endpointslice"
)

// TestIncrementalMergeMatchesFullMerge changes one of many slices of a Service. The
// result must equal a full merge and keep the pointers of unchanged endpoints. It
// must count as a change exactly if the endpoints differ.
func TestIncrementalMergeMatchesFullMerge(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(1, seed))
		const count = 6
		spare := int(seed % 3) // addresses that any slice may have
		random := func(i int) *discovery.EndpointSlice {
			s := slice(fmt.Sprint("s", i), "svc")
			for j := range 8 {
				at := fmt.Sprintf("10.0.%d.%d", j, i)
				if j < spare {
					at = fmt.Sprintf("10.1.0.%d", j)
				}
				if r.IntN(4) > 0 {
					s.Endpoints = append(s.Endpoints, conditions(ep(at), ptr(r.IntN(3) > 0), nil, ptr(r.IntN(5) == 0)))
				}
			}
			s.Ports = append(s.Ports, port("metrics", 81))
			if r.IntN(20) == 0 {
				s.Ports = s.Ports[:1]
			}
			if r.IntN(20) == 0 {
				s.Ports[0].Protocol = ptr(v1.ProtocolUDP)
			}
			return s
		}
		c := endpointslice.New(endpointslice.Plain(nil))
		objects := make([]*discovery.EndpointSlice, count)
		for i := range objects {
			objects[i] = random(i)
			c.Set(objects[i])
		}
		c.Take()
		for step := range 60 {
			i := r.IntN(count)
			was := objects[i]
			for range 1 + r.IntN(2) {
				objects[i] = random(i)
				if r.IntN(2) == 0 { // a small change
					objects[i] = was.DeepCopy()
					if n := len(was.Endpoints); n > 0 {
						k := r.IntN(n)
						objects[i].Endpoints[k].Conditions.Ready = ptr(r.IntN(2) == 0)
						if r.IntN(3) == 0 {
							objects[i].Endpoints = slices.Delete(objects[i].Endpoints, k, k+1)
						}
					}
				}
				c.Set(objects[i])
			}
			switch r.IntN(8) {
			case 0:
				objects[i] = was
				c.Set(was)
			case 1:
				i = r.IntN(count)
				objects[i] = random(i)
				c.Set(objects[i])
			case 2:
				i = r.IntN(count)
				c.Delete(named(objects[i].Name))
				objects[i] = random(i)
				c.Set(objects[i])
			}
			before := c.Ports(named("svc"))
			changes := c.Take()
			after := c.Ports(named("svc"))

			full := endpointslice.New(endpointslice.Plain(nil))
			for _, s := range objects {
				full.Set(s)
			}
			full.Take()
			equal := func(a, b endpointslice.Port[endpointslice.Endpoint]) bool {
				return a.Name == b.Name && a.Protocol == b.Protocol && a.Type == b.Type &&
					slices.EqualFunc(a.Endpoints, b.Endpoints, (*endpointslice.Endpoint).Equal)
			}
			if want := full.Ports(named("svc")); !slices.EqualFunc(after, want, equal) {
				t.Fatalf("seed %d step %d: the result differs from a full merge", seed, step)
			}
			if same := slices.EqualFunc(before, after, equal); same != (len(changes) == 0) {
				t.Fatalf("seed %d step %d: %d changes, same %v", seed, step, len(changes), same)
			}
			for _, p := range after {
				j := slices.IndexFunc(before, func(o endpointslice.Port[endpointslice.Endpoint]) bool {
					return o.Name == p.Name && o.Protocol == p.Protocol
				})
				if j < 0 {
					continue
				}
				old := before[j]
				if equal(old, p) && &old.Endpoints[0] != &p.Endpoints[0] {
					t.Fatalf("seed %d step %d: an unchanged list got new memory", seed, step)
				}
				for _, e := range p.Endpoints {
					k := slices.IndexFunc(old.Endpoints, func(o *endpointslice.Endpoint) bool { return o.Equal(e) })
					if k >= 0 && old.Endpoints[k] != e {
						t.Fatalf("seed %d step %d: %v is unchanged and got a new pointer", seed, step, e.Addr)
					}
				}
			}
		}
	}
}
