package conntrack

import (
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// addrs is a set of endpoint addresses.
type addrs map[netip.AddrPort]struct{}

// sized returns an empty set with room for the endpoints of s.
func sized(s *ruleset.Service) addrs {
	if s == nil {
		return addrs{}
	}
	return make(addrs, len(s.Endpoints))
}

// add adds the endpoints of s that flows may go to: those that still serve,
// chosen or not, and any that new flows are sent to (one that is not ready may be,
// if the Service publishes such).
func (a addrs) add(s *ruleset.Service) {
	if s == nil {
		return
	}
	for _, e := range s.Endpoints {
		if e.Ready || e.Serving {
			a[e.Addr] = struct{}{}
		}
	}
	for _, e := range s.Selection.Reachable {
		a[e.Addr] = struct{}{}
	}
}

func (a addrs) has(p netip.AddrPort) bool {
	_, ok := a[p]
	return ok
}

// plan knows the UDP Services of one family as the data plane has them and which
// of their flows have to be looked at. It does nothing but think: what it is told
// is in effect comes from record, and what a flow is comes from a dump.
type plan struct {
	family tracker.Family
	// node is the node as acknowledged, nil at first: at which addresses NodePorts
	// answer.
	node *ruleset.Node
	// owners is who has each frontend. A NodePort is found at the unspecified
	// address.
	owners map[netip.AddrPort]*ruleset.Service
	// unsettled is the Services whose last change failed and may be in effect in
	// part. Nothing can be said of their flows until they are acknowledged.
	unsettled map[tracker.Key]struct{}
	// work is what has to be looked at since it was last done.
	work work

	// From the Config; the zero values are the defaults.
	zones     []uint16
	nodePorts map[netip.Addr]struct{} // further addresses at which NodePorts answer
	filter    func(*ruleset.Service, Flow) bool
}

// work is what a change asks to be looked at.
type work struct {
	// all is every flow to any frontend.
	all bool
	// frontends is the flows to some frontends, which may be gone.
	frontends map[netip.AddrPort]*lost
}

// lost is what is no longer at a frontend.
type lost struct {
	// service is the Service that had the frontend when it last changed.
	service *ruleset.Service
	// endpoints is the endpoints that are no longer behind the frontend, each with the
	// Service whose it was.
	endpoints map[netip.AddrPort]*ruleset.Service
}

// of returns the Service that a flow belonged to that was sent to an endpoint, nil
// if the endpoint was not behind the frontend.
func (l *lost) of(endpoint netip.AddrPort) *ruleset.Service {
	if l == nil {
		return nil
	}
	return l.endpoints[endpoint]
}

func newPlan(f tracker.Family) *plan {
	return &plan{
		family:    f,
		owners:    map[netip.AddrPort]*ruleset.Service{},
		unsettled: map[tracker.Key]struct{}{},
		work:      work{frontends: map[netip.AddrPort]*lost{}},
	}
}

// configure takes over what c says about flows of the plan's family.
func (p *plan) configure(c Config) {
	p.zones, p.filter = slices.Clone(c.Zones), c.Filter
	p.nodePorts = map[netip.Addr]struct{}{}
	for _, a := range c.NodePortAddrs {
		if a = a.Unmap().WithZone(""); tracker.FamilyOf(a) == p.family {
			p.nodePorts[a] = struct{}{}
		}
	}
}

// pending reports whether there is anything to look at.
func (p *plan) pending() bool { return p.work.all || len(p.work.frontends) > 0 }

// done forgets the work.
func (p *plan) done() { p.work = work{frontends: map[netip.AddrPort]*lost{}} }

// nodePort is where owners has a NodePort.
func (p *plan) nodePort(port uint16) netip.AddrPort {
	if p.family == tracker.IPv6 {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), port)
	}
	return netip.AddrPortFrom(netip.IPv4Unspecified(), port)
}

// at is where owners has f.
func (p *plan) at(f *ruleset.Frontend) netip.AddrPort {
	if f.Kind == ruleset.NodePort {
		return p.nodePort(f.Port)
	}
	return netip.AddrPortFrom(f.Addr, f.Port)
}

// concerns reports whether the Service is one whose flows are cleaned up.
func (p *plan) concerns(k tracker.Key) bool {
	return k.Family == p.family && k.Protocol == v1.ProtocolUDP
}

// unsettle notes that c was tried and failed.
func (p *plan) unsettle(c *ruleset.Change) { p.unsettled[c.Key] = struct{}{} }

// record notes that c is in effect.
func (p *plan) record(c *ruleset.Change) {
	_, failed := p.unsettled[c.Key]
	delete(p.unsettled, c.Key)

	// What was there before, or may have been.
	was, had := map[netip.AddrPort]struct{}{}, sized(c.Old)
	last := c.New
	for i := -1; i < len(c.Attempted); i++ {
		s := c.Old
		if i >= 0 {
			s = c.Attempted[i]
		}
		if s == nil {
			continue
		}
		had.add(s)
		if c.New == nil {
			last = s
		}
		for j := range s.Frontends {
			was[p.at(&s.Frontends[j])] = struct{}{}
		}
	}
	has := sized(c.New)
	has.add(c.New)
	gone := addrs{}
	for a := range had {
		if !has.has(a) {
			gone[a] = struct{}{}
		}
	}

	for at := range was {
		if o := p.owners[at]; o != nil && o.Key == c.Key {
			delete(p.owners, at)
		}
	}
	if c.New != nil {
		for i := range c.New.Frontends {
			at := p.at(&c.New.Frontends[i])
			p.owners[at] = c.New
			_, old := was[at]
			delete(was, at)
			switch {
			case len(gone) > 0:
				p.look(at, last, gone)
			case failed,
				// Flows may have begun while nobody answered here.
				len(has) > 0 && (!old || len(had) == 0):
				p.look(at, last, nil)
			}
		}
	}
	if len(had) > 0 {
		for at := range was { // those that are no more
			p.look(at, last, had)
		}
	}
}

// look has the flows to a frontend of s looked at. gone is endpoints that are no
// longer behind it.
func (p *plan) look(at netip.AddrPort, s *ruleset.Service, gone addrs) {
	if len(p.work.frontends) >= maxWork {
		// Cleaning up has failed for long. Looking at everything finds nearly as
		// much, and needs no memory.
		p.done()
		p.work.all = true
	}
	have := p.work.frontends[at]
	if have == nil {
		have = &lost{endpoints: make(map[netip.AddrPort]*ruleset.Service, len(gone))}
		p.work.frontends[at] = have
	}
	have.service = s
	for a := range gone {
		have.endpoints[a] = s
	}
}

// maxWork is for how many frontends work is remembered one by one.
const maxWork = 1 << 16

// lookAtAll has every flow to any frontend looked at.
func (p *plan) lookAtAll() { p.work.all = p.work.all || len(p.owners) > 0 }

// setNode notes at which addresses NodePorts answer. If that changed, flows to
// all of them are looked at.
func (p *plan) setNode(n *ruleset.Node) {
	was := p.node
	if p.node = n; was == nil || n == nil || equalNodePorts(was.NodePorts(p.family), n.NodePorts(p.family)) {
		return
	}
	for at, s := range p.owners {
		if at.Addr().IsUnspecified() {
			behind := addrs{}
			behind.add(s)
			p.look(at, s, behind)
		}
	}
}

func equalNodePorts(a, b ruleset.NodePorts) bool {
	return a.All == b.All && slices.Equal(a.Prefixes, b.Prefixes)
}

// needsLocal reports whether the work can only be done by someone who knows the
// node's addresses.
func (p *plan) needsLocal() bool {
	if p.work.all {
		for at := range p.owners {
			if at.Addr().IsUnspecified() {
				return true
			}
		}
	}
	for at := range p.work.frontends {
		if at.Addr().IsUnspecified() || p.owners[p.nodePort(at.Port())] != nil {
			return true
		}
	}
	return false
}

// judge returns a function that tells whether a flow is stale. local is the
// node's own addresses. It may be used until the plan is told of anything else.
func (p *plan) judge(local []netip.Addr) func(*Flow) bool {
	j := &judge{
		plan:     p,
		nodePort: make(map[netip.Addr]struct{}, len(local)),
		valid:    map[*ruleset.Service]addrs{},
	}
	if p.node != nil {
		for _, a := range local {
			if answers(p.node.NodePorts(p.family), a) {
				j.nodePort[a] = struct{}{}
			}
		}
	}
	maps.Copy(j.nodePort, p.nodePorts)
	return j.stale
}

// answers reports whether NodePorts may answer at a, an address of the node. At IPv4
// loopback addresses they do so with some backends. With others the address is a
// local server's, and deleting an entry without a translation changes nothing.
func answers(n ruleset.NodePorts, a netip.Addr) bool {
	if a.IsLoopback() {
		return a.Is4()
	}
	if n.All {
		return true
	}
	for _, p := range n.Prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// judge judges flows.
type judge struct {
	*plan
	nodePort map[netip.Addr]struct{} // where NodePorts answer
	valid    map[*ruleset.Service]addrs
}

// stale reports whether f is to be deleted: it is stale and not spared.
func (j *judge) stale(f *Flow) bool {
	if f.Protocol != inet.UDP || !inZones(j.zones, f.Zone) {
		return false
	}
	s := j.staleOf(f)
	return s != nil && (j.filter == nil || j.filter(s, *f))
}

// staleOf is the whole question of this package: whether f keeps a client at a
// place where nobody answers, or that is not the Service's any more. It returns the
// Service whose flow it is, nil if it is not stale.
func (j *judge) staleOf(f *Flow) *ruleset.Service {
	translated := f.ReplySrc != f.Dst
	// handedOn: another address at which NodePorts answer has yet to choose the
	// endpoint.
	_, handedOn := j.plan.nodePorts[f.ReplySrc.Addr()]
	handedOn = handedOn && translated && f.ReplySrc.Port() == f.Dst.Port()
	atNodePort := j.plan.nodePort(f.Dst.Port())

	owner, looked := j.owners[f.Dst], j.work.all
	gone, ok := j.work.frontends[f.Dst]
	looked = looked || ok
	atNode := false
	if owner == nil {
		if _, ok := j.nodePort[f.Dst.Addr()]; ok {
			owner = j.owners[atNodePort]
			atNode = owner != nil
		}
		if goneNP, ok := j.work.frontends[atNodePort]; ok {
			looked = looked || owner != nil
			if owner == nil && translated {
				// The address is not (any more) one at which NodePorts answer, or
				// the NodePort is gone. That the flow went to one of the Service's
				// endpoints tells that it was not some other host's.
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
		// Whoever had this frontend has it no more. Only flows that were sent to its
		// endpoints were its own.
		if translated {
			return gone.of(f.ReplySrc)
		}
		return nil
	}
	if !looked {
		return nil
	}
	if _, ok := j.unsettled[owner.Key]; ok {
		return nil
	}
	valid, ok := j.valid[owner]
	if !ok {
		valid = sized(owner)
		valid.add(owner)
		j.valid[owner] = valid
	}
	if valid.has(f.ReplySrc) || atNode && handedOn {
		return nil
	}
	// A flow that was not translated began when nobody answered here. It is in the
	// way only if somebody does now.
	if !translated && len(valid) == 0 {
		return nil
	}
	return owner
}
