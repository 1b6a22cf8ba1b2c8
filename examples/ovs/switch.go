package ovs

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Match is the destination of a packet. Addr is the zero Addr for a NodePort.
type Match struct {
	Addr   netip.Addr
	Port   uint16
	Proto  v1.Protocol
	Family tracker.Family
}

// FlowKey identifies a flow. If several flows have one Match, the last written one counts.
type FlowKey struct {
	Match
	Owner tracker.Key
}

// Flow is the treatment of packets to a frontend.
type Flow struct {
	Frontend ruleset.Frontend
	// Group and Internal are the groups of the frontend's Target and Internal, or 0.
	Group, Internal uint32
	Affinity        time.Duration
}

// GroupName identifies the pool of a group. The switch stores it with the group.
type GroupName struct {
	Service tracker.Key
	Pool    ruleset.Target
}

// Group is a set of buckets.
type Group struct {
	Name    GroupName
	Buckets []Bucket
}

// Bucket sends packets to an endpoint through the endpoint's own flow.
type Bucket struct {
	Endpoint Endpoint
	Weight   uint16
}

// Endpoint is an endpoint with a flow.
type Endpoint struct {
	Addr  netip.AddrPort
	Proto v1.Protocol
}

// Switch is the switch. Each write returns Fail's error, if any, and calls Look afterwards.
// [NewSwitch] returns an empty Switch. It is not safe for concurrent use.
type Switch struct {
	Fail func() error
	Look func()
	// Writes counts the writes that succeeded.
	Writes int

	Node      Table[struct{}, *ruleset.Node]
	Flows     Table[FlowKey, Flow]
	Groups    Table[uint32, Group]
	Endpoints Table[Endpoint, bool]
	// VIPs holds the cluster IPs. Their ports without a flow refuse connections.
	VIPs Table[netip.Addr, bool]
	// owners holds the owners of the flows for a Match. The last written one is at the end.
	owners map[Match][]tracker.Key
}

// NewSwitch returns an empty switch.
func NewSwitch(fail func() error, look func()) *Switch {
	s := &Switch{Fail: fail, Look: look, owners: map[Match][]tracker.Key{}}
	s.Node, s.Groups = newTable[struct{}, *ruleset.Node](s), newTable[uint32, Group](s)
	s.Endpoints, s.VIPs = newTable[Endpoint, bool](s), newTable[netip.Addr, bool](s)
	s.Flows = newTable[FlowKey, Flow](s)
	s.Flows.wrote = func(k FlowKey, there bool) {
		s.owners[k.Match] = slices.DeleteFunc(s.owners[k.Match], func(o tracker.Key) bool { return o == k.Owner })
		if there {
			s.owners[k.Match] = append(s.owners[k.Match], k.Owner)
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
	m := Match{p.To.Addr(), p.To.Port(), p.Protocol, tracker.FamilyOf(p.To.Addr())}
	toNode, node := slices.Contains(p.NodeAddresses, m.Addr), s.Node.m[struct{}{}]
	flow, ok := s.lookup(m)
	if !ok && toNode && node != nil && node.NodePorts(m.Family).Allows(m.Addr) {
		flow, ok = s.lookup(Match{Port: m.Port, Proto: m.Proto, Family: m.Family})
	}
	switch {
	case ok:
	case toNode || node == nil:
		return Result{Action: ruleset.ActionPass}
	case s.VIPs.m[m.Addr]:
		return Result{Action: ruleset.ActionReject}
	case slices.ContainsFunc(node.ServiceCIDRs, func(c netip.Prefix) bool { return c.Contains(m.Addr) }):
		return Result{Action: ruleset.ActionDrop}
	default:
		return Result{Action: ruleset.ActionPass}
	}
	fe := &flow.Frontend
	fromPod, fromNode := node.LocalTraffic.Recognises(p.From, p.InInterface), p.InInterface == ""
	target, group := fe.Target, flow.Group
	if fromPod || fromNode {
		target, group = fe.Internal, flow.Internal
	}
	switch {
	case !fe.Admits(p.From) || target == ruleset.Drop:
		return Result{Action: ruleset.ActionDrop}
	case target == ruleset.Reject:
		return Result{Action: ruleset.ActionReject}
	}
	r := Result{
		Action:     ruleset.ActionForward,
		Affinity:   flow.Affinity,
		Masquerade: fe.Masquerade.Applies(fromPod, fromNode),
	}
	for _, b := range s.Groups.m[group].Buckets {
		if !s.Endpoints.m[b.Endpoint] {
			b.Endpoint = Endpoint{}
		}
		r.Buckets = append(r.Buckets, b)
	}
	return r
}

func (s *Switch) lookup(m Match) (Flow, bool) {
	owners := s.owners[m]
	if len(owners) == 0 {
		return Flow{}, false
	}
	return s.Flows.m[FlowKey{m, owners[len(owners)-1]}], true
}
