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

// Match is where a packet is addressed to. Addr is the zero Addr for a NodePort.
type Match struct {
	Addr   netip.Addr
	Port   uint16
	Proto  v1.Protocol
	Family tracker.Family
}

// FlowKey identifies a flow. Of several for one Match the one written last counts.
type FlowKey struct {
	Match
	Owner tracker.Key
}

// Flow is what becomes of packets to a frontend.
type Flow struct {
	Frontend ruleset.Frontend
	// Group and Near are the groups that the frontend's Target and Near send to, 0 if
	// they send to none.
	Group, Near uint32
	Affinity    time.Duration
}

// GroupName is the pool that a group stands for. The switch keeps it with the group.
type GroupName struct {
	Service tracker.Key
	Pool    ruleset.Target
}

// Group is a set of buckets.
type Group struct {
	Name    GroupName
	Buckets []Bucket
}

// Bucket sends to an endpoint, by the endpoint's own flow.
type Bucket struct {
	Endpoint Endpoint
	Weight   uint16
}

// Endpoint is an endpoint that has a flow.
type Endpoint struct {
	Addr  netip.AddrPort
	Proto v1.Protocol
}

// Switch is the switch. Each of its methods that write returns an error if Fail does,
// and calls Look afterwards. [NewSwitch] returns an empty one.
type Switch struct {
	Fail func() error
	Look func()
	// Writes counts the writes that succeeded.
	Writes int

	node      *ruleset.Node
	flows     map[Match]map[tracker.Key]written
	groups    map[uint32]Group
	endpoints map[Endpoint]bool
	// vips is the cluster IPs, of which ports without a flow refuse connections.
	vips map[netip.Addr]bool
}

type written struct {
	flow Flow
	at   int
}

// NewSwitch returns an empty switch.
func NewSwitch(fail func() error, look func()) *Switch {
	return &Switch{
		Fail: fail, Look: look, flows: map[Match]map[tracker.Key]written{},
		groups: map[uint32]Group{}, endpoints: map[Endpoint]bool{}, vips: map[netip.Addr]bool{},
	}
}

func (s *Switch) write(f func()) error {
	if err := s.Fail(); err != nil {
		return err
	}
	s.Writes++
	f()
	s.Look()
	return nil
}

// SetNode replaces what holds for the node as a whole.
func (s *Switch) SetNode(n *ruleset.Node) error { return s.write(func() { s.node = n }) }

// SetFlow adds or replaces a flow.
func (s *Switch) SetFlow(k FlowKey, f Flow) error {
	return s.write(func() {
		if s.flows[k.Match] == nil {
			s.flows[k.Match] = map[tracker.Key]written{}
		}
		s.flows[k.Match][k.Owner] = written{f, s.Writes}
	})
}

// RemoveFlow removes a flow, if there is one.
func (s *Switch) RemoveFlow(k FlowKey) error {
	return s.write(func() {
		if delete(s.flows[k.Match], k.Owner); len(s.flows[k.Match]) == 0 {
			delete(s.flows, k.Match)
		}
	})
}

// SetGroup adds or replaces a group.
func (s *Switch) SetGroup(id uint32, g Group) error { return s.write(func() { s.groups[id] = g }) }

// RemoveGroup removes a group, if there is one.
func (s *Switch) RemoveGroup(id uint32) error { return s.write(func() { delete(s.groups, id) }) }

// SetEndpoint installs an endpoint's flow or removes it.
func (s *Switch) SetEndpoint(e Endpoint, there bool) error {
	return s.write(func() { set(s.endpoints, e, there) })
}

// SetVIP adds or removes a cluster IP.
func (s *Switch) SetVIP(a netip.Addr, there bool) error {
	return s.write(func() { set(s.vips, a, there) })
}

func set[K comparable](m map[K]bool, k K, there bool) {
	if there {
		m[k] = true
	} else {
		delete(m, k)
	}
}

// Tables returns what is installed, as another process finds it.
func (s *Switch) Tables() (*ruleset.Node, map[FlowKey]Flow, map[uint32]Group, []Endpoint, []netip.Addr) {
	flows := map[FlowKey]Flow{}
	for m, owners := range s.flows {
		for k, w := range owners {
			flows[FlowKey{m, k}] = w.flow
		}
	}
	return s.node, flows, maps.Clone(s.groups), slices.Collect(maps.Keys(s.endpoints)), slices.Collect(maps.Keys(s.vips))
}

// Result is what the switch does with a packet.
type Result struct {
	Action ruleset.Action
	// Buckets are those among which it chooses, under [ruleset.ActionForward]. A bucket
	// whose endpoint has no flow leads nowhere and has the zero Endpoint.
	Buckets    []Bucket
	Masquerade bool
	Affinity   time.Duration
}

// Process returns what the switch does with a packet.
func (s *Switch) Process(p ruleset.Packet) Result {
	m := Match{p.To.Addr(), p.To.Port(), p.Protocol, tracker.FamilyOf(p.To.Addr())}
	toNode := slices.Contains(p.NodeAddresses, m.Addr)
	flow, ok := s.lookup(m)
	if !ok && toNode && s.node != nil && s.node.NodePorts(m.Family).Allows(m.Addr) {
		flow, ok = s.lookup(Match{Port: m.Port, Proto: m.Proto, Family: m.Family})
	}
	switch {
	case ok:
	case toNode || s.node == nil:
		return Result{Action: ruleset.ActionPass}
	case s.vips[m.Addr]:
		return Result{Action: ruleset.ActionReject}
	case slices.ContainsFunc(s.node.ServiceCIDRs, func(c netip.Prefix) bool { return c.Contains(m.Addr) }):
		return Result{Action: ruleset.ActionDrop}
	default:
		return Result{Action: ruleset.ActionPass}
	}
	fe := &flow.Frontend
	fromPod, fromNode := s.node.LocalTraffic.Recognises(p.From, p.InInterface), p.InInterface == ""
	target, group := fe.Target, flow.Group
	if fromPod || fromNode {
		target, group = fe.Near, flow.Near
	}
	switch {
	case !fe.Admits(p.From) || target == ruleset.Drop:
		return Result{Action: ruleset.ActionDrop}
	case target == ruleset.Reject:
		return Result{Action: ruleset.ActionReject}
	}
	r := Result{Action: ruleset.ActionForward, Affinity: flow.Affinity}
	switch fe.Masquerade {
	case ruleset.MasqueradeAlways:
		r.Masquerade = true
	case ruleset.MasqueradeNotPods:
		r.Masquerade = !fromPod
	case ruleset.MasqueradeNode:
		r.Masquerade = fromNode && !fromPod
	}
	for _, b := range s.groups[group].Buckets {
		if !s.endpoints[b.Endpoint] {
			b.Endpoint = Endpoint{}
		}
		r.Buckets = append(r.Buckets, b)
	}
	return r
}

func (s *Switch) lookup(m Match) (f Flow, ok bool) {
	last := 0
	for _, w := range s.flows[m] {
		if !ok || w.at > last {
			f, last, ok = w.flow, w.at, true
		}
	}
	return f, ok
}
