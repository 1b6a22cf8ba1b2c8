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

// Flow is the treatment of packets to a frontend.
type Flow struct {
	Frontend ruleset.Frontend
	// Group and Internal are the groups of the frontend's Target and Internal, or 0.
	Group, Internal uint32
	Affinity        time.Duration
}

// Group is a set of buckets, with the name of the pool that it is for.
type Group struct {
	Name    driver.Pool
	Buckets []Bucket
}

// Bucket sends packets to an endpoint through the endpoint's own flow.
type Bucket struct {
	Endpoint driver.Endpoint
	Weight   uint16
}

// Switch is the switch. Each write returns Fail's error, if any, and calls Look afterwards.
// [NewSwitch] returns an empty Switch. It is not safe for concurrent use.
type Switch struct {
	Fail func() error
	Look func()
	// Writes counts the writes that succeeded.
	Writes int

	Node Table[struct{}, *ruleset.Node]
	// Flows holds a flow for each frontend and Service. If several match a packet, the last
	// written one counts.
	Flows     Table[driver.Frontend, Flow]
	Groups    Table[uint32, Group]
	Endpoints Table[driver.Endpoint, struct{}]
	// VIPs holds the cluster IPs. Their ports without a flow refuse connections.
	VIPs Table[netip.Addr, struct{}]
	// owners holds the flows that match a packet, by their key without Service. The last
	// written one is at the end.
	owners map[any][]driver.Frontend
}

// NewSwitch returns an empty switch.
func NewSwitch(fail func() error, look func()) *Switch {
	s := &Switch{Fail: fail, Look: look, owners: map[any][]driver.Frontend{}}
	s.Node, s.Groups = newTable[struct{}, *ruleset.Node](s), newTable[uint32, Group](s)
	s.Endpoints, s.VIPs = newTable[driver.Endpoint, struct{}](s), newTable[netip.Addr, struct{}](s)
	s.Flows = newTable[driver.Frontend, Flow](s)
	s.Flows.wrote = func(k driver.Frontend, there bool) {
		m := k.Place()
		s.owners[m] = slices.DeleteFunc(s.owners[m], func(o driver.Frontend) bool { return o == k })
		if there {
			s.owners[m] = append(s.owners[m], k)
		}
	}
	return s
}

// Table is one of the switch's tables.
type Table[K comparable, V any] struct {
	s     *Switch
	m     map[K]V
	wrote func(k K, there bool)
}

func newTable[K comparable, V any](s *Switch) Table[K, V] {
	return Table[K, V]{s, map[K]V{}, func(K, bool) {}}
}

// Set adds or replaces an entry.
func (t *Table[K, V]) Set(k K, v V) error {
	return t.write(func() { t.m[k] = v; t.wrote(k, true) })
}

// Delete removes an entry. Deleting a missing entry is not an error.
func (t *Table[K, V]) Delete(k K) error {
	return t.write(func() { delete(t.m, k); t.wrote(k, false) })
}

// All returns a copy of the table.
func (t *Table[K, V]) All() map[K]V { return maps.Clone(t.m) }

func (t *Table[K, V]) has(k K) bool { _, ok := t.m[k]; return ok }

func (t *Table[K, V]) write(f func()) error {
	if err := t.s.Fail(); err != nil {
		return err
	}
	f()
	t.s.Writes++
	t.s.Look()
	return nil
}

// Result is the switch's treatment of a packet.
type Result struct {
	Action ruleset.Action
	// Buckets are the buckets among which the switch chooses, if Action is
	// [ruleset.ActionForward]. A bucket whose endpoint has no flow has the zero Endpoint.
	Buckets    []Bucket
	Masquerade bool
	Affinity   time.Duration
}

// Process returns the switch's treatment of a packet.
func (s *Switch) Process(p ruleset.Packet) Result {
	m := driver.Frontend{Addr: p.To.Addr(), Port: p.To.Port(), Protocol: p.Protocol, Family: tracker.FamilyOf(p.To.Addr())}
	toNode, node := slices.Contains(p.NodeAddresses, m.Addr), s.Node.m[struct{}{}]
	flow, ok := s.lookup(m)
	if !ok && toNode && node != nil && node.NodePorts(m.Family).Allows(m.Addr) {
		np := m
		np.Addr = netip.Addr{}
		flow, ok = s.lookup(np)
	}
	switch {
	case ok:
	case toNode || node == nil:
		return Result{Action: ruleset.ActionPass}
	case s.VIPs.has(m.Addr):
		return Result{Action: ruleset.ActionReject}
	case slices.ContainsFunc(node.ServiceCIDRs, func(c netip.Prefix) bool { return c.Contains(m.Addr) }):
		return Result{Action: ruleset.ActionDrop}
	default:
		return Result{Action: ruleset.ActionPass}
	}
	fe := &flow.Frontend
	fromPod, fromNode := node.LocalTraffic.Recognizes(p.From, p.InInterface), p.InInterface == ""
	target, group := fe.Target, flow.Group
	if fromPod || fromNode {
		target, group = fe.Internal, flow.Internal
	}
	switch {
	case !fe.Admits(p.From) || target == ruleset.TargetDrop:
		return Result{Action: ruleset.ActionDrop}
	case target == ruleset.TargetReject:
		return Result{Action: ruleset.ActionReject}
	}
	r := Result{
		Action:     ruleset.ActionForward,
		Affinity:   flow.Affinity,
		Masquerade: fe.Masquerade.Applies(fromPod, fromNode),
	}
	for _, b := range s.Groups.m[group].Buckets {
		if !s.Endpoints.has(b.Endpoint) {
			b.Endpoint = driver.Endpoint{}
		}
		r.Buckets = append(r.Buckets, b)
	}
	return r
}

func (s *Switch) lookup(m driver.Frontend) (Flow, bool) {
	owners := s.owners[m]
	if len(owners) == 0 {
		return Flow{}, false
	}
	return s.Flows.m[owners[len(owners)-1]], true
}
