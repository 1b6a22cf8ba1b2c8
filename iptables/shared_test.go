package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// sharing returns a Service port with a cluster IP and a health-check node port that other
// Service ports may have, too.
func sharing(service, port, clusterIP int, health uint16) *ruleset.Port {
	name := types.NamespacedName{Namespace: "ns", Name: fmt.Sprint("svc-", service)}
	key := tracker.Key{
		ServicePortName: tracker.ServicePortName{NamespacedName: name, Port: fmt.Sprint("p", port), Protocol: v1.ProtocolTCP},
		Family:          tracker.IPv4,
	}
	addr := netip.AddrFrom4([4]byte{10, 96, 0, byte(clusterIP)})
	return &ruleset.Port{
		Key:  key,
		Spec: &tracker.ServicePort{HealthCheckNodePort: health},
		Frontends: []ruleset.Frontend{{
			Kind: ruleset.KindClusterIP, Addr: addr, Port: uint16(1000 + 100*service + port), Target: ruleset.TargetReject,
		}},
	}
}

// TestSharedRulesDependOnServicesAlone changes Services that share cluster IPs and health-check
// node ports at random. After each change the dispatchers must have the rules of a model that
// was made from the remaining Services, in another order.
func TestSharedRulesDependOnServicesAlone(t *testing.T) {
	t.Parallel()
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		node := &ruleset.Node{}
		s := &settings{family: tracker.IPv4, mark: 0x4000}
		m := must.Get(newModel(s, node))(t)
		have := map[uint32]*ruleset.Port{}
		// Few values make Services share; many make trees with several chains.
		few := 1 + rng.IntN(250)
		for step := range 60 {
			for range 1 + rng.IntN(8) {
				id := uint32(rng.IntN(40))
				var svc *ruleset.Port
				if rng.IntN(3) != 0 {
					health := uint16(0)
					if rng.IntN(3) != 0 {
						health = 31000 + uint16(rng.IntN(few))
					}
					svc = sharing(int(id)/3, int(id)%3, rng.IntN(few), health)
				}
				m.change(tracker.Key{ServicePortName: tracker.ServicePortName{Port: fmt.Sprint(id)}}, svc, nil)
				if svc == nil {
					delete(have, id)
				} else {
					have[id] = svc
				}
			}
			fresh := must.Get(newModel(s, node))(t)
			ids := slices.Collect(maps.Keys(have))
			rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
			for _, id := range ids {
				fresh.change(have[id].Key, have[id], nil)
			}
			for i := range m.trees {
				got, want := m.trees[i].chains(), fresh.trees[i].chains()
				if !maps.EqualFunc(got, want, slices.Equal) {
					t.Fatalf("seed %d, step %d: %s has\n%v\nwant\n%v", seed, step, dispatchers[i].root, got, want)
				}
			}
			if m.size() != fresh.size() || len(m.shared) != len(fresh.shared) {
				t.Fatalf("seed %d, step %d: %v rules and %d shared keys, want %v and %d",
					seed, step, m.size(), len(m.shared), fresh.size(), len(fresh.shared))
			}
		}
	}
}
