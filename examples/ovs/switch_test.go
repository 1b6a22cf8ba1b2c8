package ovs

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// memory is a switch in memory. Each write returns fail's error, if any, and calls look afterwards.
// It is not safe for concurrent use.
type memory struct {
	Switch
	fail func() error
	look func()
	// writes counts the writes that succeeded.
	writes int
	// owners holds the flows that match a packet, by their key without Service. The last
	// written one is at the end.
	owners map[any][]driver.Frontend
}

// newMemory returns an empty switch.
func newMemory(fail func() error, look func()) *memory {
	s := &memory{fail: fail, look: look, owners: map[any][]driver.Frontend{}}
	s.Node, s.Groups = newTable[struct{}, *ruleset.Node](s), newTable[uint32, Group](s)
	s.Endpoints, s.VIPs = newTable[driver.Endpoint, struct{}](s), newTable[netip.Addr, struct{}](s)
	flows := newTable[driver.Frontend, Flow](s)
	flows.wrote = func(k driver.Frontend, there bool) {
		m := k.Place()
		s.owners[m] = slices.DeleteFunc(s.owners[m], func(o driver.Frontend) bool { return o == k })
		if there {
			s.owners[m] = append(s.owners[m], k)
		}
	}
	s.Flows = flows
	return s
}

// memoryTable is a [Table] in memory.
type memoryTable[K comparable, V any] struct {
	s     *memory
	m     map[K]V
	wrote func(k K, there bool)
}

func newTable[K comparable, V any](s *memory) *memoryTable[K, V] {
	return &memoryTable[K, V]{s, map[K]V{}, func(K, bool) {}}
}

func (t *memoryTable[K, V]) Set(k K, v V) error {
	return t.write(func() { t.m[k] = v; t.wrote(k, true) })
}

func (t *memoryTable[K, V]) Delete(k K) error {
	return t.write(func() { delete(t.m, k); t.wrote(k, false) })
}

func (t *memoryTable[K, V]) All() map[K]V { return maps.Clone(t.m) }

func (t *memoryTable[K, V]) write(f func()) error {
	if err := t.s.fail(); err != nil {
		return err
	}
	f()
	t.s.writes++
	t.s.look()
	return nil
}

func get[K comparable, V any](t Table[K, V], k K) (V, bool) {
	v, ok := t.(*memoryTable[K, V]).m[k]
	return v, ok
}

// result is the switch's treatment of a packet.
type result struct {
	Action ruleset.Action
	// Buckets are the buckets among which the switch chooses, if Action is
	// [ruleset.ActionForward]. A bucket whose endpoint has no flow has the zero Endpoint.
	Buckets    []Bucket
	Masquerade bool
	Affinity   time.Duration
}

// process returns the switch's treatment of a packet.
func (s *memory) process(p ruleset.Packet) result {
	m := driver.Frontend{Addr: p.To.Addr(), Port: p.To.Port(), Protocol: p.Protocol, Family: tracker.FamilyOf(p.To.Addr())}
	toNode := slices.Contains(p.NodeAddresses, m.Addr)
	node, _ := get(s.Node, struct{}{})
	_, vip := get(s.VIPs, m.Addr)
	flow, ok := s.lookup(m)
	if !ok && toNode && node != nil && node.NodePorts(m.Family).Allows(m.Addr) {
		np := m
		np.Addr = netip.Addr{}
		flow, ok = s.lookup(np)
	}
	switch {
	case ok:
	case toNode || node == nil:
		return result{Action: ruleset.ActionPass}
	case vip:
		return result{Action: ruleset.ActionReject}
	case slices.ContainsFunc(node.ServiceCIDRs, func(c netip.Prefix) bool { return c.Contains(m.Addr) }):
		return result{Action: ruleset.ActionDrop}
	default:
		return result{Action: ruleset.ActionPass}
	}
	fe := &flow.Frontend
	fromPod, fromNode := node.LocalTraffic.Recognizes(p.From, p.InInterface), p.InInterface == ""
	target, group := fe.Target, flow.Group
	if fromPod || fromNode {
		target, group = fe.Internal, flow.Internal
	}
	switch {
	case !fe.Admits(p.From) || target == ruleset.TargetDrop:
		return result{Action: ruleset.ActionDrop}
	case target == ruleset.TargetReject:
		return result{Action: ruleset.ActionReject}
	}
	r := result{
		Action:     ruleset.ActionForward,
		Affinity:   flow.Affinity,
		Masquerade: fe.Masquerade.Applies(fromPod, fromNode),
	}
	buckets, _ := get(s.Groups, group)
	for _, b := range buckets.Buckets {
		if _, ok := get(s.Endpoints, b.Endpoint); !ok {
			b.Endpoint = driver.Endpoint{}
		}
		r.Buckets = append(r.Buckets, b)
	}
	return r
}

func (s *memory) lookup(m driver.Frontend) (Flow, bool) {
	owners := s.owners[m]
	if len(owners) == 0 {
		return Flow{}, false
	}
	return get(s.Flows, owners[len(owners)-1])
}
