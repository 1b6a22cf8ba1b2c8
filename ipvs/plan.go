package ipvs

import (
	"math"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

type plannedVirtual struct {
	key virtualKey
	virtual
	proto uint8
	pool  []*tracker.Endpoint
	// weights holds the real servers' weights, or nil for the endpoints' own weights.
	weights []int
	// rejected is set if rules refuse new connections. The virtual server is then only for those
	// that are open.
	rejected   bool
	forwarding Forwarding
}

func (p *plannedVirtual) weight(i int) uint16 {
	if p.weights == nil {
		return p.pool[i].Weight
	}
	return uint16(min(p.weights[i], math.MaxUint16))
}

// weightsOf returns reduced weights of endpoints, or nil if all are equal. The schedulers send a server as many
// connections in a row as its weight exceeds the others', so large weights delay connections to the others.
func weightsOf(pool []*tracker.Endpoint) []int {
	if !weighted(pool) {
		return nil
	}
	return ruleset.Shares(pool)
}

// plan holds everything that one Service port needs in the kernel.
type plan struct {
	virtuals []plannedVirtual
	// entries holds the elements of all sets except setShortCircuit.
	entries []entry
	// internal holds the elements of setShortCircuit, all with the value mark.
	internal []entry
	mark     uint32
	// bind lists the addresses that the dummy device needs.
	bind []netip.Addr
}

// local is the information about the node that a plan depends on.
type local struct {
	node string
	// nodePorts lists the node's own addresses at which NodePorts answer, of one family.
	nodePorts []netip.Addr
	// own reports whether an address is one of the node's own, which are not bound.
	own func(netip.Addr) bool
}

// makePlan returns the plan of a Service port. mark is the packet mark of its virtual server for internal traffic.
// With mark 0, the plan has no such virtual server, and has entries in internal if the Service port needs one.
// makePlan is a pure function.
func (c Config) makePlan(s *ruleset.Port, l local, mark uint32) plan {
	family, proto := s.Key.Family, inet.Protocol(s.Key.Protocol)
	p, props := plan{mark: mark}, c.properties(s)
	add := func(set setID, at netip.AddrPort, other netip.Prefix) {
		p.entries = append(p.entries, entry{set: set, family: family, addr: at.Addr(), proto: proto, port: at.Port(), other: other})
	}
	// Only endpoints that are on this node, or may be, can reach themselves through it.
	for _, ep := range s.Selection.Reachable {
		if ep.Node == "" || ep.IsLocal(l.node) {
			add(setLoopBack, ep.Addr, netip.PrefixFrom(ep.Addr.Addr(), ep.Addr.Addr().BitLen()))
		}
	}

	server := func(f *ruleset.Frontend, at netip.AddrPort) {
		pool := s.Pool(f.Target)
		p.virtuals = append(p.virtuals, plannedVirtual{
			key:     virtualKey{family: family, proto: proto, at: at},
			virtual: c.virtual(s, props, s.Spec.Affinity, pool), proto: proto, pool: pool, weights: weightsOf(pool),
			rejected: f.Target == ruleset.TargetReject, forwarding: props.of(f),
		})
		if props.OnePacket && proto == inet.UDP && props.of(f) != ForwardingTranslated {
			p.virtuals[len(p.virtuals)-1].flags |= flagOnePacket
		}
		switch f.Target {
		case ruleset.TargetDrop:
			add(setNoLocal, at, netip.Prefix{})
		case ruleset.TargetReject:
			add(setNoEndpoints, at, netip.Prefix{})
		}
		if props.separates(s, f) {
			p.internal = append(p.internal, entry{set: setShortCircuit, family: family, addr: at.Addr(), proto: proto, port: at.Port()})
		}
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Kind == ruleset.KindNodePort {
			c.planNodePort(&p, f, proto, family, l, server)
			continue
		}
		at := netip.AddrPortFrom(f.Addr, f.Port)
		// Packets of external clients keep their source.
		localPolicy := f.ShortCircuit() || props.of(f) != ForwardingTranslated
		switch f.Kind {
		case ruleset.KindClusterIP:
			add(setClusterIP, at, netip.Prefix{})
		case ruleset.KindExternalIP:
			if localPolicy {
				add(setExternalIPLocal, at, netip.Prefix{})
			} else {
				add(setExternalIP, at, netip.Prefix{})
			}
		case ruleset.KindLoadBalancerIP:
			add(setLoadBalancer, at, netip.Prefix{})
			if localPolicy {
				add(setLoadBalancerLocal, at, netip.Prefix{})
			}
			if len(f.Sources) != 0 {
				add(setLoadBalancerFW, at, netip.Prefix{})
			}
			for _, src := range f.Sources {
				if src.IsSingleIP() {
					add(setLoadBalancerSourceIP, at, src)
				} else {
					add(setLoadBalancerSourceCIDR, at, src)
				}
			}
		}
		server(f, at)
		if l.own(f.Addr) {
			continue
		}
		p.bind = append(p.bind, f.Addr)
		p.entries = append(p.entries, entry{set: setIPs, family: family, addr: f.Addr})
		if f.Kind != ruleset.KindClusterIP {
			p.entries = append(p.entries, entry{set: setBoundExternal, family: family, addr: f.Addr})
		}
	}
	if s.Spec.HealthCheckNodePort != 0 {
		p.entries = append(p.entries, entry{set: setHealthCheckNodePort, family: family, port: s.Spec.HealthCheckNodePort})
	}
	if len(p.internal) != 0 && mark != 0 && !c.internalDrops(s) {
		pool := s.Pool(internalFrontend(s, props).Internal)
		p.virtuals = append(p.virtuals, plannedVirtual{
			key:     virtualKey{family: family, mark: mark},
			virtual: c.internalVirtual(s, props, pool), proto: proto, pool: pool, weights: weightsOf(pool),
		})
	}
	return p
}

// planNodePort adds a NodePort: a virtual server at each of the node's addresses.
func (c Config) planNodePort(p *plan, f *ruleset.Frontend, proto uint8, family tracker.Family, l local, server func(*ruleset.Frontend, netip.AddrPort)) {
	localPolicies := []bool{false}
	if f.ShortCircuit() {
		localPolicies = append(localPolicies, true)
	}
	for _, local := range localPolicies {
		set := nodePortSet(proto, local)
		if sets[set].kind == bitmapPort {
			p.entries = append(p.entries, entry{set: set, family: family, port: f.Port})
			continue
		}
		for _, a := range l.nodePorts {
			p.entries = append(p.entries, entry{set: set, family: family, addr: a, proto: proto, port: f.Port})
		}
	}
	for _, a := range l.nodePorts {
		server(f, netip.AddrPortFrom(a, f.Port))
	}
}

// internalFrontend returns a frontend that treats internal traffic differently, or nil. All such frontends treat it
// alike: as the policy Cluster does.
func internalFrontend(s *ruleset.Port, p Properties) *ruleset.Frontend {
	for i := range s.Frontends {
		if f := &s.Frontends[i]; p.separates(s, f) {
			return f
		}
	}
	return nil
}

// internalDrops reports whether internal traffic is dropped. One mark is reserved for this.
func (c Config) internalDrops(s *ruleset.Port) bool {
	f := internalFrontend(s, c.properties(s))
	return f != nil && f.Internal == ruleset.TargetDrop
}

func (c Config) virtual(s *ruleset.Port, p Properties, affinity time.Duration, pool []*tracker.Endpoint) virtual {
	v := virtual{scheduler: c.Scheduler}
	hash := tracker.HashNone
	switch by := s.Hash(); {
	case p.Scheduler != "":
		v.scheduler = p.Scheduler
		hash = tracker.HashSource
		if p.HashPort {
			hash = tracker.HashSourcePort
		}
	case by != tracker.HashNone:
		v.scheduler = c.hashing()
		hash = by
	case v.scheduler == "" && weighted(pool):
		v.scheduler = WeightedRoundRobin
	case v.scheduler == "":
		v.scheduler = RoundRobin
	}
	v.flags = v.scheduler.flags(hash)
	if affinity > 0 {
		v.flags |= flagPersistent
		// The kernel converts seconds to jiffies, of at least a millisecond, in a long.
		v.timeout = uint32(max(affinity/time.Second, 1))
	}
	return v
}

// maxAffinity is the longest time for which the kernel can remember clients.
const maxAffinity = math.MaxInt32 / 1000 * time.Second

// elementsAtOnce is [ruleset.Limits].Delta. Each real server takes a request or two.
const elementsAtOnce = 100

// internalVirtual returns the properties of a virtual server with a mark. For clients that IPVS remembers by a mark
// it translates ports only if the packet has the virtual server's port (ip_vs_sched_persist of
// net/netfilter/ipvs/ip_vs_core.c), so a hash of the client's address replaces affinity.
func (c Config) internalVirtual(s *ruleset.Port, p Properties, pool []*tracker.Endpoint) virtual {
	v := c.virtual(s, p, 0, pool)
	if s.Spec.Affinity > 0 {
		v = virtual{scheduler: c.hashing(), flags: c.hashing().flags(tracker.HashSource)}
	}
	v.timeout = signature
	return v
}

// signature is the timeout of virtual servers with a mark, which the kernel uses only for persistence. It identifies
// them as a Backend's: other programs may use marks of the same range.
const signature = 1300437

func weighted(pool []*tracker.Endpoint) bool {
	var weight uint16
	for _, ep := range pool {
		if ep.Weight == 0 {
			continue
		}
		if weight != 0 && ep.Weight != weight {
			return true
		}
		weight = ep.Weight
	}
	return false
}
