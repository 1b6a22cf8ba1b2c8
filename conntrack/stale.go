package conntrack

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

type addrs map[netip.AddrPort]struct{}

// usable returns the endpoints of a Service that flows may go to: those that are ready or serving, and reachable
// ones, which may be neither if the Service publishes endpoints that are not ready.
func usable(endpoints, reachable []*tracker.Endpoint) addrs {
	a := make(addrs, len(endpoints))
	for _, e := range endpoints {
		if e.Ready || e.Serving {
			a[e.Addr] = struct{}{}
		}
	}
	for _, e := range reachable {
		a[e.Addr] = struct{}{}
	}
	return a
}

func usableOf(s *ruleset.Port) addrs { return usable(s.Endpoints, s.Selection.Reachable) }

func hasUsable(s *ruleset.Port) bool {
	return len(s.Selection.Reachable) > 0 || slices.ContainsFunc(s.Endpoints, func(e *tracker.Endpoint) bool { return e.Ready || e.Serving })
}

// usableBefore returns the endpoints that were usable before c, including tried, those of attempts that failed.
func usableBefore(c *ruleset.Change, tried addrs) addrs {
	out := maps.Clone(tried)
	if out == nil {
		out = addrs{}
	}
	if c.Old != nil {
		maps.Copy(out, usableOf(c.Old))
	}
	return out
}

// removed returns the endpoints that were usable before c and no longer are.
func removed(c *ruleset.Change, tried addrs) (gone addrs) {
	if c.Old != nil && c.New != nil && tried == nil {
		endpoints, _ := listdiff.Trim(c.Old.Endpoints, c.New.Endpoints)
		reachable, _ := listdiff.Trim(c.Old.Selection.Reachable, c.New.Selection.Reachable)
		gone = usable(endpoints, reachable)
	} else {
		gone = usableBefore(c, tried)
	}
	if c.New == nil || len(gone) == 0 {
		return gone
	}
	for _, e := range c.New.Endpoints {
		if e.Ready || e.Serving {
			delete(gone, e.Addr)
		}
	}
	for _, e := range c.New.Selection.Reachable {
		delete(gone, e.Addr)
	}
	return gone
}

func (a addrs) has(p netip.AddrPort) bool {
	_, ok := a[p]
	return ok
}

// staleFlows decides which flows of one family are stale. It holds the UDP Services as acknowledged, and a queue of
// flows to examine. It does no I/O: the caller passes it changes in effect, and flows from a dump.
type staleFlows struct {
	family tracker.Family
	// node is the node as acknowledged, nil at first. It selects the addresses at which
	// NodePorts answer.
	node *ruleset.Node
	// owners holds the Service of each frontend. The key of a NodePort has the unspecified address.
	owners map[netip.AddrPort]*ruleset.Port
	// unacknowledged holds the Services whose last change failed and may be partly in effect. Their flows are left
	// alone until a later change succeeds.
	unacknowledged map[tracker.Key]*attempts
	queue          queue
	// ownerless holds destinations without a Service that translated flows had when all flows were last examined: an
	// earlier process left them. A Service that gets such a frontend makes them stale.
	ownerless map[netip.AddrPort]struct{}

	// From the Config; the zero values are the defaults.
	zones     []uint16
	nodePorts map[netip.Addr]struct{} // further addresses at which NodePorts answer
	filter    func(*ruleset.Port, Flow) bool
}

// queue selects the flows that the next clean-up examines.
type queue struct {
	// all selects every flow to any frontend.
	all bool
	// frontends selects the flows to these frontends. Some frontends may no longer exist.
	frontends map[netip.AddrPort]*lost
}

// lost holds the Service and the endpoints that a frontend has lost.
type lost struct {
	// service is the Service that had the frontend when the frontend last changed.
	service *ruleset.Port
	// endpoints holds the endpoints that the frontend no longer has, each with the Service
	// that it belonged to.
	endpoints map[netip.AddrPort]*ruleset.Port
}

// of returns the Service of a flow that was sent to an endpoint, or nil if the frontend did
// not have the endpoint.
func (l *lost) of(endpoint netip.AddrPort) *ruleset.Port {
	if l == nil {
		return nil
	}
	return l.endpoints[endpoint]
}

func newStaleFlows(f tracker.Family) *staleFlows {
	return &staleFlows{
		family:         f,
		owners:         map[netip.AddrPort]*ruleset.Port{},
		unacknowledged: map[tracker.Key]*attempts{},
		queue:          newQueue(),
	}
}

func (p *staleFlows) configure(c Config) {
	p.zones, p.filter = slices.Clone(c.Zones), c.Filter
	p.nodePorts = map[netip.Addr]struct{}{}
	for _, a := range c.NodePortAddrs {
		if a = a.Unmap().WithZone(""); tracker.FamilyOf(a) == p.family {
			p.nodePorts[a] = struct{}{}
		}
	}
}

func (p *staleFlows) pending() bool {
	return p.queue.all || len(p.queue.frontends) > 0
}

func newQueue() queue { return queue{frontends: map[netip.AddrPort]*lost{}} }

func (p *staleFlows) clear() { p.queue = newQueue() }

func (p *staleFlows) take() *queue {
	q := p.queue
	p.clear()
	if q.all {
		p.ownerless = nil
	}
	return &q
}

// giveBack adds a queue whose flows were not all examined.
func (p *staleFlows) giveBack(old *queue) {
	p.queue.all = p.queue.all || old.all
	for at, l := range old.frontends {
		p.queue.add(at, l)
	}
	p.bound()
}

// add selects the flows to a frontend. The queue may have it from a later change.
func (q *queue) add(at netip.AddrPort, old *lost) {
	have := q.get(at)
	if have.service == nil {
		have.service = old.service
	}
	for a, s := range old.endpoints {
		if _, ok := have.endpoints[a]; !ok {
			have.endpoints[a] = s
		}
	}
}

// get returns the entry of a frontend, which it adds if it is missing.
func (q *queue) get(at netip.AddrPort) *lost {
	if q.frontends[at] == nil {
		q.frontends[at] = &lost{endpoints: map[netip.AddrPort]*ruleset.Port{}}
	}
	return q.frontends[at]
}

// bound replaces a queue that has reached its limits, after many failed clean-ups, by one that selects every flow.
func (p *staleFlows) bound() {
	if len(p.queue.frontends) >= maxQueue {
		p.clear()
		p.queue.all = true
	}
}

func (p *staleFlows) nodePort(port uint16) netip.AddrPort {
	if p.family == tracker.IPv6 {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), port)
	}
	return netip.AddrPortFrom(netip.IPv4Unspecified(), port)
}

func (p *staleFlows) at(f *ruleset.Frontend) netip.AddrPort {
	if f.Kind == ruleset.KindNodePort {
		return p.nodePort(f.Port)
	}
	return netip.AddrPortFrom(f.Addr, f.Port)
}

// covers reports whether a frontend takes packets from a NodePort at an address of the node. Flows of the one may
// then be those of the other.
func (p *staleFlows) covers(at netip.AddrPort) bool {
	return !at.Addr().IsUnspecified() && p.owners[p.nodePort(at.Port())] != nil
}

// wasOwnerless reports whether a frontend has flows from before its Service, and removes that record.
func (p *staleFlows) wasOwnerless(at netip.AddrPort) bool {
	_, was := p.ownerless[at]
	delete(p.ownerless, at)
	return was
}

func (p *staleFlows) concerns(k tracker.Key) bool {
	return k.Family == p.family && k.Protocol == v1.ProtocolUDP
}

// attempts holds what changes of a Service that failed since the last one that succeeded may have left.
type attempts struct {
	// queue selects the flows that a clean-up left alone.
	queue queue
	// last is the last version, nil for none. frontends and endpoints are of all.
	last      *ruleset.Port
	frontends map[netip.AddrPort]struct{}
	endpoints addrs
}

func (p *staleFlows) recordFailure(c *ruleset.Change) {
	a := p.unacknowledged[c.Key]
	if a == nil {
		a = &attempts{queue: newQueue(), frontends: map[netip.AddrPort]struct{}{}, endpoints: addrs{}}
		p.unacknowledged[c.Key] = a
	}
	if c.New == nil {
		return
	}
	a.last = c.New
	maps.Copy(a.endpoints, usableOf(c.New))
	for i := range c.New.Frontends {
		a.frontends[p.at(&c.New.Frontends[i])] = struct{}{}
	}
	if len(a.endpoints)+len(a.frontends) > maxQueue {
		clear(a.endpoints)
		clear(a.frontends)
		a.queue.all = true
	}
}

// record records that c is in effect, and queues the flows that it may have made stale.
func (p *staleFlows) record(c *ruleset.Change) {
	// The frontends before c, including those of failed attempts, and whether they let
	// packets pass.
	was, had := map[netip.AddrPort]bool{}, false
	var tried addrs
	last := cmp.Or(c.New, c.Old)
	a, failed := p.unacknowledged[c.Key]
	if failed {
		delete(p.unacknowledged, c.Key)
		p.giveBack(&a.queue)
		tried, had, last = a.endpoints, len(a.endpoints) != 0, cmp.Or(last, a.last)
		for at := range a.frontends {
			was[at] = true
		}
	}
	if c.Old != nil {
		had = had || hasUsable(c.Old)
		for i := range c.Old.Frontends {
			was[p.at(&c.Old.Frontends[i])] = true
		}
	}
	gone := removed(c, tried)

	for at := range was {
		if o := p.owners[at]; o != nil && o.Key == c.Key {
			delete(p.owners, at)
		}
	}
	if c.New != nil {
		has := hasUsable(c.New)
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			at := p.at(f)
			p.owners[at] = c.New
			old := was[at]
			delete(was, at)
			switch {
			case len(gone) > 0:
				p.examine(at, last, gone)
			case failed, !old && (p.covers(at) || p.wasOwnerless(at)),
				// Flows may have begun while the frontend had no endpoint, or none for
				// their client.
				has && (!old || !had):
				p.examine(at, last, nil)
			}
		}
	}
	if len(was) > 0 { // c removed frontends
		var all addrs
		if had {
			all = usableBefore(c, tried)
		}
		for at := range was {
			if had || p.covers(at) {
				p.examine(at, last, all)
			}
		}
	}
}

// examine queues the flows to a frontend of s. gone holds the endpoints that the frontend no
// longer has.
func (p *staleFlows) examine(at netip.AddrPort, s *ruleset.Port, gone addrs) {
	p.bound()
	have := p.queue.get(at)
	have.service = s
	for a := range gone {
		have.endpoints[a] = s
	}
}

// maxQueue is the largest number of frontends in the queue.
const maxQueue = 1 << 16

func (p *staleFlows) examineAll() { p.queue.all = true }

// setNode sets the node, and queues the flows to all NodePorts if these answer at other addresses than before.
func (p *staleFlows) setNode(n *ruleset.Node) {
	was := p.node
	if p.node = n; was == nil || n == nil || equalNodePorts(was.NodePorts(p.family), n.NodePorts(p.family)) {
		return
	}
	for at, s := range p.owners {
		if at.Addr().IsUnspecified() {
			p.examine(at, s, usableOf(s))
		}
	}
}

func equalNodePorts(a, b ruleset.NodePorts) bool {
	return a.All == b.All && slices.Equal(a.Prefixes, b.Prefixes)
}

// inZones reports whether zone is one of zones. Empty zones means zone 0.
func inZones(zones []uint16, zone uint16) bool {
	if len(zones) == 0 {
		return zone == 0
	}
	return slices.Contains(zones, zone)
}

// judge returns a function that reports whether a flow that q selects is stale, by what is in
// effect when it is called. local holds the node's own addresses.
func (p *staleFlows) judge(q *queue, local []netip.Addr) func(*Flow) bool {
	j := &judge{
		staleFlows: p,
		queue:      q,
		local:      local,
		valid:      map[*ruleset.Port]addrs{},
	}
	return j.stale
}

// setNode stores the addresses at which NodePorts answer.
func (j *judge) setNode() {
	j.node = j.staleFlows.node
	j.nodePort = make(map[netip.Addr]struct{}, len(j.local))
	if j.node != nil {
		for _, a := range j.local {
			if answers(j.node.NodePorts(j.family), a) {
				j.nodePort[a] = struct{}{}
			}
		}
	}
	maps.Copy(j.nodePort, j.nodePorts)
}

// answers reports whether NodePorts may answer at a, an address of the node. With some backends they answer at IPv4
// loopback addresses; with others the entries of a local server there have no translation, so deleting them does no
// harm.
func answers(n ruleset.NodePorts, a netip.Addr) bool {
	if a.IsLoopback() {
		return a.Is4()
	}
	return n.Allows(a)
}

// judge decides for each flow of a dump whether it is stale.
type judge struct {
	*staleFlows
	queue *queue
	local []netip.Addr // the node's own addresses
	// nodePort holds the addresses at which NodePorts answer, with the node when it was computed.
	nodePort map[netip.Addr]struct{}
	node     *ruleset.Node
	// valid holds the usable endpoints of Services.
	valid map[*ruleset.Port]addrs
}

// stale reports whether f is stale and the filter does not spare it.
func (j *judge) stale(f *Flow) bool {
	if f.Protocol != inet.UDP || !inZones(j.zones, f.Zone) {
		return false
	}
	if j.nodePort == nil || j.node != j.staleFlows.node {
		j.setNode()
	}
	s := j.staleOf(f)
	return s != nil && (j.filter == nil || j.filter(s, *f))
}

// staleOf returns the Service of a stale flow, or nil. A flow is stale if it sends a client to an address that does
// not answer or no longer belongs to the Service.
func (j *judge) staleOf(f *Flow) *ruleset.Port {
	translated := f.ReplySrc != f.Dst
	// handedOn reports that the flow was only translated to another address at which
	// NodePorts answer. Another entry has the endpoint.
	_, handedOn := j.nodePorts[f.ReplySrc.Addr()]
	handedOn = handedOn && translated && f.ReplySrc.Port() == f.Dst.Port()
	atNodePort := j.staleFlows.nodePort(f.Dst.Port())

	owner, examined := j.owners[f.Dst], j.queue.all
	gone, ok := j.queue.frontends[f.Dst]
	examined = examined || ok
	atNode := false
	if owner == nil {
		if _, ok := j.nodePort[f.Dst.Addr()]; ok {
			owner = j.owners[atNodePort]
			atNode = owner != nil
		}
		if goneNP, ok := j.queue.frontends[atNodePort]; ok {
			examined = examined || owner != nil
			if owner == nil && translated {
				// NodePorts no longer answer at the address, or the NodePort is gone. Flows that were not sent to one
				// of the Service's endpoints may be to another host.
				if s := goneNP.of(f.ReplySrc); s != nil {
					return s
				}
				if handedOn && j.owners[atNodePort] == nil {
					return goneNP.service
				}
			}
		}
	}
	if owner == nil {
		// Without a Service, only flows that were sent to the last Service's endpoints belonged to it.
		if !translated {
			return nil
		}
		if s := gone.of(f.ReplySrc); s != nil {
			return s
		}
		if j.queue.all {
			j.noteOwnerless(f.Dst)
		}
		return nil
	}
	if !examined {
		// The flow may be from a NodePort that the owner's frontend covers.
		if _, ok := j.queue.frontends[atNodePort]; !ok {
			return nil
		}
	}
	if left, ok := j.unacknowledged[owner.Key]; ok {
		j.leave(&left.queue, f)
		return nil
	}
	valid, ok := j.valid[owner]
	if !ok {
		valid = usableOf(owner)
		j.valid[owner] = valid
	}
	if valid.has(f.ReplySrc) || atNode && handedOn {
		return nil
	}
	// A flow that was not translated began while the frontend had no endpoint. It is
	// stale only if the frontend has one now.
	if !translated && len(valid) == 0 {
		return nil
	}
	return owner
}

// noteOwnerless notes the destination of a flow that belongs to no Service.
func (j *judge) noteOwnerless(to netip.AddrPort) {
	if len(j.ownerless) >= maxQueue {
		return
	}
	if j.ownerless == nil {
		j.ownerless = map[netip.AddrPort]struct{}{}
	}
	j.ownerless[to] = struct{}{}
	if _, ok := j.nodePort[to.Addr()]; ok {
		j.ownerless[j.staleFlows.nodePort(to.Port())] = struct{}{}
	}
}

// leave selects f in left if the frontend lost the endpoint that f was sent to: nothing else may record that once the
// Service changes.
func (j *judge) leave(left *queue, f *Flow) {
	for _, at := range []netip.AddrPort{f.Dst, j.staleFlows.nodePort(f.Dst.Port())} {
		if s := j.queue.frontends[at].of(f.ReplySrc); s != nil {
			left.add(at, &lost{s, map[netip.AddrPort]*ruleset.Port{f.ReplySrc: s}})
		}
	}
}
