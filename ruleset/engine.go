package ruleset

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/cidr"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// Config configures an [Engine].
type Config struct {
	// Source is the source of Services and endpoints, usually a [tracker.Tracker]; required. The Engine must be its
	// only consumer.
	Source Source
	// MasqueradeAll becomes [Node.MasqueradeAll].
	MasqueradeAll bool
	// LocalTraffic becomes [Node.LocalTraffic]. At most one of its fields may be
	// set; the zero value recognizes no internal traffic.
	LocalTraffic LocalTraffic
	// NodePortAddresses becomes [Node.NodePorts4] and [Node.NodePorts6]. The zero
	// value is all addresses.
	NodePortAddresses NodePortAddresses
	// ServiceCIDRs holds the initial ranges of cluster IPs; see
	// [Engine.SetServiceCIDRs]. Empty means unknown.
	ServiceCIDRs []netip.Prefix
	// HashSeed becomes [Node].HashSeed. Nodes choose the same endpoints only with the same HashSeed. 0 is a seed,
	// too.
	HashSeed uint64
	// Budget bounds the cost of Services. The zero value bounds nothing.
	Budget Budget
	// OverBudget, if not nil, is called with each Service port that exceeds the Budget, each time it is compiled, for
	// metrics. It must not call the Engine or a Cursor, which would wait forever.
	OverBudget func(tracker.Key)
	// Log receives conflicts over frontends, and Services that exceed the [Limits] of a backend. Messages are bounded
	// as for [tracker.Config].Log. Nil discards them. Both are also events of [tracker.Config].Events.
	Log *slog.Logger
}

// Source is what an [Engine] needs of a [tracker.Tracker]. Its methods must be safe for concurrent use.
type Source interface {
	// Missing returns the sources that are not complete yet, or nil.
	Missing() []tracker.Kind
	// Take returns the changes since the previous Take, or none while Missing returns a source. The Ports of an
	// update are sorted by key without duplicates and belong to the Service of the update. The values must not change
	// afterwards. The Engine leaves out a port without Port or with a nil endpoint, and reports it.
	Take() tracker.Changes
	// Node returns the current node.
	Node() tracker.NodeInfo
	// Notify registers a function that is called after each change that Take may return,
	// without a lock that Take needs. end removes the function.
	Notify(f func()) (end func())
	// Event sends a message about a Service to its owner, as [tracker.Tracker.Event] does.
	Event(service types.NamespacedName, warning bool, reason tracker.Reason, message string)
}

// maxInterfaceName is the longest name of a network interface (IFNAMSIZ less the
// terminating zero, linux/if.h).
const maxInterfaceName = 15

// Engine keeps the ruleset, every [Port] compiled, in step with a [tracker.Tracker], and offers each attached
// [Backend] the difference to what that backend last acknowledged. It works only when a [Cursor] is synced or a
// [Snapshot] is taken. Its methods are safe for concurrent use. [NewEngine] makes one; the zero value must not be
// used.
type Engine struct {
	tracker  Source
	nodePort NodePortAddresses
	log      *slog.Logger
	budget   Budget
	// complaints receives what objects cause, at a bounded rate.
	complaints *complaint.Log

	mu     sync.Mutex
	gen    uint64
	node   *Node
	notify []*func()

	// slots holds the Services by ID. slots[0] is unused.
	slots []slot
	// names holds the IDs of each Service that has any, in the order of their keys.
	names map[types.NamespacedName][]uint32
	// room is memory for the slices in names.
	room []uint32
	// gone holds the IDs of keys that are not live but that some backend may still have.
	gone map[tracker.Key]uint32
	// free holds the unused IDs, the longest unused first.
	free []uint32
	// restricted holds the IDs of the Services with source ranges. Only these depend
	// on the node's addresses.
	restricted map[uint32]struct{}
	ownership  ownership
	// uses holds the contenders for ports of the node other than NodePorts, see [Node.uses].
	uses         ownership
	admission    admission
	onOverBudget func(tracker.Key)
	// jobs holds the Services to compile before the lock is released.
	jobs []job
	// ports and endpoints count the live slots and their reachable endpoints.
	ports, endpoints int

	cursors []*Cursor
}

type slot struct {
	// svc is the compiled Service, or the last one if the ID is not live.
	svc *Port
	// port is the port whose frontends are in Engine.ownership, or nil.
	port *tracker.ServicePort
	// holders is the number of cursors whose backend may have parts of svc.
	holders int32
	// job is 1 + the index of the slot's job in Engine.jobs, or 0 for none.
	job int32
	// want is the cost of the Service, 0 if the Budget has neither Namespace nor Total.
	want int32
	// live reports whether svc is part of the ruleset.
	live bool
}

type job struct {
	id    uint32
	state *tracker.PortState
	full  *Port // within the bounds on one Service; nil before Engine.compile
}

// NewEngine returns an Engine. The error wraps [ErrConfig].
func NewEngine(c Config) (*Engine, error) {
	if c.Source == nil {
		return nil, fmt.Errorf("ruleset: %w: Tracker is required", ErrConfig)
	}
	if err := c.LocalTraffic.validate(); err != nil {
		return nil, fmt.Errorf("ruleset: %w: LocalTraffic: %w", ErrConfig, err)
	}
	if err := c.Budget.validate(); err != nil {
		return nil, fmt.Errorf("ruleset: %w: Budget: %w", ErrConfig, err)
	}
	for _, p := range c.ServiceCIDRs {
		if !p.IsValid() {
			return nil, fmt.Errorf("ruleset: %w: ServiceCIDRs: invalid prefix", ErrConfig)
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.LocalTraffic.CIDRs = cidr.Reduce(c.LocalTraffic.CIDRs)
	e := &Engine{
		tracker:      c.Source,
		nodePort:     c.NodePortAddresses,
		log:          c.Log,
		budget:       c.Budget,
		onOverBudget: c.OverBudget,
		admission:    admission{namespaces: map[string]*account{}, refused: map[uint32]*Port{}, level: cmp.Or(c.Budget.Namespace, math.MaxInt)},
		complaints:   complaint.NewLog(c.Log),
		slots:        make([]slot, 1),
		names:        map[types.NamespacedName][]uint32{},
		gone:         map[tracker.Key]uint32{},
		restricted:   map[uint32]struct{}{},
	}
	port := func(id uint32) *tracker.ServicePort { return e.slots[id].port }
	e.ownership, e.uses = newOwnership(port), newOwnership(port)
	e.node = e.newNode(Node{
		Info:          c.Source.Node(),
		ServiceCIDRs:  cidr.Subtract(c.ServiceCIDRs, c.LocalTraffic.CIDRs),
		LocalTraffic:  c.LocalTraffic,
		MasqueradeAll: c.MasqueradeAll,
		HashSeed:      c.HashSeed,
	})
	return e, nil
}

func (l LocalTraffic) validate() error {
	set := 0
	if len(l.CIDRs) != 0 {
		set++
	}
	for _, name := range []string{l.Bridge, l.InterfacePrefix} {
		if name != "" {
			set++
		}
		if len(name) > maxInterfaceName {
			return fmt.Errorf("%q is longer than the %d bytes of an interface name", name, maxInterfaceName)
		}
	}
	if set > 1 {
		return errors.New("CIDRs, Bridge and InterfacePrefix exclude each other")
	}
	for _, p := range l.CIDRs {
		if !p.IsValid() {
			return errors.New("CIDRs: invalid prefix")
		}
	}
	return nil
}

// newNode returns n with its derived fields.
func (e *Engine) newNode(n Node) *Node {
	n.NodePorts4 = e.nodePort.Resolve(n.Info, tracker.IPv4)
	n.NodePorts6 = e.nodePort.Resolve(n.Info, tracker.IPv6)
	return &n
}

// SetServiceCIDRs sets the ranges of cluster IPs (the ServiceCIDR API, KEP-1880). It ignores invalid prefixes; none
// means that the ranges are not known. inUse holds ranges of addresses that hosts and pods have, such as the networks
// of the node's interfaces. [Node].ServiceCIDRs becomes cidrs without inUse and without LocalTraffic.CIDRs, because a
// data plane drops packets to unknown addresses in it. Each range in use adds up to a prefix per bit. SetServiceCIDRs
// calls the functions that [Engine.Notify] registered if the result changed.
func (e *Engine) SetServiceCIDRs(cidrs, inUse []netip.Prefix) {
	e.mu.Lock()
	cidrs = cidr.Subtract(cidrs, slices.Concat(inUse, e.node.LocalTraffic.CIDRs))
	if slices.Equal(cidrs, e.node.ServiceCIDRs) {
		e.mu.Unlock()
		return
	}
	n := *e.node
	n.ServiceCIDRs = cidrs
	e.node = &n
	e.gen++
	e.mu.Unlock()
	e.callNotify()
}

// Notify registers f, which is called without a lock after each change in the tracker or in the Engine that a Sync
// may have to apply. f must return quickly. It must not call [Cursor.Sync], but may trigger it. Notify ignores a nil
// f. end removes f, and may be called several times; a call of f that has begun may still be running when end
// returns.
func (e *Engine) Notify(f func()) (end func()) {
	if f == nil {
		return func() {}
	}
	own := &f
	e.mu.Lock()
	e.notify = append(e.notify, own)
	e.mu.Unlock()
	endTracker := e.tracker.Notify(f)
	return func() {
		endTracker()
		e.mu.Lock()
		defer e.mu.Unlock()
		e.notify = slices.DeleteFunc(e.notify, func(o *func()) bool { return o == own })
	}
}

// pull brings the ruleset up to date with the tracker. The caller holds e.mu.
func (e *Engine) pull() {
	taken := e.tracker.Take()
	changed := false
	if info := taken.Node; !info.Equal(e.node.Info) {
		changed = true
		moved := !slices.Equal(info.Addresses, e.node.Info.Addresses)
		n := *e.node
		n.Info = info
		before := e.node
		if e.node = e.newNode(n); moved {
			e.moved(before)
		}
	}
	if len(e.slots) == 1 && len(taken.Updates) != 0 {
		e.reserve(taken.Updates)
	}
	for _, u := range taken.Updates {
		u.Ports = e.complete(u)
		if e.update(u) {
			changed = true
		}
	}
	// Compile last: only now does each frontend have its final owner.
	for i := range e.jobs {
		e.compile(&e.jobs[i])
	}
	e.distribute()
	for i := range e.jobs {
		if e.publish(&e.jobs[i]) {
			changed = true
		}
	}
	for _, u := range taken.Updates {
		for _, c := range e.cursors {
			if len(u.Triggers) != 0 && c.concerns(u.Name) {
				c.trigger(Trigger{Service: u.Name, Times: u.Triggers})
			}
		}
	}
	if cap(e.jobs) > 1024 {
		e.jobs = nil
	}
	clear(e.jobs)
	e.jobs = e.jobs[:0]
	if changed {
		e.gen++
	}
}

// reserve makes room for the first updates, which have all Services: a quarter fewer allocations in a first Sync
// (BenchmarkFullSync/first).
func (e *Engine) reserve(updates []tracker.Update) {
	ports := 0
	for i := range updates {
		ports += len(updates[i].Ports)
	}
	e.slots = append(make([]slot, 0, ports+1), e.slots...)
	e.jobs = make([]job, 0, ports)
	e.room = make([]uint32, ports)
	e.names = make(map[types.NamespacedName][]uint32, len(updates))
	e.ownership.owner = make(map[l4Key]contender, ports)
	for _, c := range e.cursors {
		c.grow(ports + 1)
	}
}

// complete returns the ports of an update that can be compiled, and reports the others.
func (e *Engine) complete(u tracker.Update) []tracker.PortState {
	incomplete := func(p tracker.PortState) bool { return p.Port == nil || slices.Contains(p.Endpoints, nil) }
	if !slices.ContainsFunc(u.Ports, incomplete) {
		return u.Ports
	}
	return slices.DeleteFunc(slices.Clone(u.Ports), func(p tracker.PortState) bool {
		if !incomplete(p) {
			return false
		}
		what := "port without a ServicePort"
		if p.Port != nil {
			what = fmt.Sprintf("port %q (%s): nil endpoint", complaint.Value(p.Port.Key.Port), p.Port.Key.Family)
		}
		o := complaint.Object{Kind: "service", Namespace: u.Name.Namespace, Name: u.Name.Name}
		if e.complaints.Write(slog.LevelError, o, "cannot use an incomplete port of a service", "reason", string(tracker.ReasonInvalid), "port", what) {
			e.tracker.Event(u.Name, true, tracker.ReasonInvalid, what)
		}
		return true
	})
}

// update applies the tracker's update of one Service. It queues a job for each port that may differ, and reports
// whether a port was removed.
func (e *Engine) update(u tracker.Update) (removed bool) {
	ports := u.Ports
	before := e.names[u.Name]
	ids := before
	if !slices.EqualFunc(before, ports, func(id uint32, p tracker.PortState) bool {
		return e.slots[id].port.Key == p.Port.Key
	}) {
		if len(e.room) < len(ports) {
			e.room = make([]uint32, len(ports))
		}
		ids, e.room = e.room[:0:len(ports)], e.room[len(ports):]
		i := 0
		for _, p := range ports {
			for i < len(before) && e.slots[before[i]].port.Key.Compare(p.Port.Key) < 0 {
				e.remove(before[i])
				removed = true
				i++
			}
			if i < len(before) && e.slots[before[i]].port.Key == p.Port.Key {
				ids = append(ids, before[i])
				i++
			} else {
				ids = append(ids, e.add(p.Port.Key))
			}
		}
		for _, id := range before[i:] {
			e.remove(id)
			removed = true
		}
		if len(ids) == 0 {
			delete(e.names, u.Name)
		} else {
			e.names[u.Name] = ids
		}
	}
	for i, p := range ports {
		e.own(ids[i], p.Port)
		e.queue(ids[i], &ports[i])
	}
	return removed
}

// add returns an ID for a key that is not live: the key's previous one if a backend may still have the Service.
func (e *Engine) add(k tracker.Key) uint32 {
	if id, ok := e.gone[k]; ok {
		delete(e.gone, k)
		return id
	}
	if len(e.free) != 0 {
		id := e.free[0]
		e.free = e.free[1:]
		return id
	}
	e.slots = append(e.slots, slot{})
	return uint32(len(e.slots) - 1)
}

func (e *Engine) remove(id uint32) {
	s := &e.slots[id]
	port := s.port
	e.own(id, nil)
	e.want(id, port, 0)
	e.retire(id)
	switch {
	case s.svc == nil: // never compiled
		e.free = append(e.free, id)
	case s.holders == 0:
		e.release(id)
	default:
		e.gone[s.svc.Key] = id
		e.markDirty(id)
	}
}

// retire takes a Service out of the ruleset, if it is live, and reports whether it was.
func (e *Engine) retire(id uint32) bool {
	s := &e.slots[id]
	if !s.live {
		return false
	}
	s.live = false
	e.count(s.svc, -1)
	e.assign(id, nil)
	return true
}

// release frees the ID of a Service that no backend has any more.
func (e *Engine) release(id uint32) {
	s := &e.slots[id]
	delete(e.gone, s.svc.Key)
	s.svc = nil
	e.free = append(e.free, id)
}

// own replaces the frontends that id asks for by those of p, which may be nil.
func (e *Engine) own(id uint32, p *tracker.ServicePort) {
	s := &e.slots[id]
	before := s.port
	if sameFrontends(before, p) && (p == nil || before.Created.Equal(p.Created)) {
		s.port = p
	} else {
		if before != nil {
			for at, kind := range frontendKeys(before) {
				e.recompile(e.ownership.remove(at, id))
				if kind == KindNodePort {
					e.contest(at)
				}
			}
			for at := range e.node.uses(before) {
				e.uses.remove(at, id)
				e.contest(at)
			}
		}
		if before != nil && p != nil && !before.Created.Equal(p.Created) {
			e.reaged(p.Key)
		}
		s.port = p
		if p != nil {
			for at, kind := range frontendKeys(p) {
				e.recompile(e.ownership.add(at, contender{id, kind}))
				if kind == KindNodePort {
					e.contest(at)
				}
			}
			for at, kind := range e.node.uses(p) {
				e.uses.add(at, contender{id, kind})
				e.contest(at)
			}
		}
	}
	if p != nil && len(p.SourceRanges) != 0 && len(p.LoadBalancerIPs) != 0 {
		e.restricted[id] = struct{}{}
	} else {
		delete(e.restricted, id)
	}
}

// moved follows a change of the node's addresses.
func (e *Engine) moved(before *Node) {
	for id := range e.slots {
		p := e.slots[id].port
		if p == nil || len(p.ExternalIPs)+len(p.LoadBalancerIPs) == 0 {
			continue
		}
		for at := range before.uses(p) {
			e.uses.remove(at, uint32(id))
			e.contest(at)
			e.recompile(uint32(id))
		}
		for at, kind := range e.node.uses(p) {
			e.uses.add(at, contender{uint32(id), kind})
			e.contest(at)
		}
	}
	for id := range e.restricted {
		e.recompile(id)
	}
}

func (e *Engine) queue(id uint32, state *tracker.PortState) {
	s := &e.slots[id]
	if s.job == 0 {
		e.jobs = append(e.jobs, job{id: id})
		s.job = int32(len(e.jobs))
	}
	e.jobs[s.job-1].state = state
}

// recompile queues the compilation of id from its previous input, unless newer input is queued.
func (e *Engine) recompile(id uint32) {
	s := &e.slots[id]
	if s.job != 0 || s.port == nil {
		return
	}
	if s.live {
		e.queue(id, &tracker.PortState{Port: s.port, Endpoints: s.svc.Endpoints})
	} else if refused := e.admission.refused[id]; refused != nil {
		e.queue(id, &tracker.PortState{Port: s.port, Endpoints: refused.Endpoints})
	}
}

func (e *Engine) compile(j *job) {
	s := &e.slots[j.id]
	if s.port == nil {
		return // the port was removed after it was queued
	}
	now := Compile(*j.state, e.node)
	now.ID = j.id
	e.strip(now, s)
	j.full = e.budget.limit(now)
	if e.budget.bounded() {
		e.want(j.id, s.port, min(e.budget.cost(j.full), math.MaxInt32))
	}
}

// publish adds the result of a job to the ruleset and reports whether that changed.
func (e *Engine) publish(j *job) bool {
	s := &e.slots[j.id]
	s.job = 0
	if s.port == nil {
		return false
	}
	if j.full == nil {
		e.compile(j)
	}
	now := e.admitted(j.full)
	if now == nil {
		if !e.retire(j.id) {
			return false
		}
		e.markDirty(j.id)
		return true
	}
	differs := FieldAll
	if s.live {
		if differs = diff(s.svc, now); differs == 0 {
			if now.LeftOut != nil || s.svc.LeftOut != nil {
				s.svc = now
			}
			return false
		}
		e.count(s.svc, -1)
	}
	e.assign(j.id, now)
	s.svc, s.live = now, true
	e.count(now, 1)
	e.markDirty(j.id)
	return true
}

func (e *Engine) count(s *Port, sign int) {
	e.ports += sign
	e.endpoints += sign * len(s.Selection.Reachable)
}

// strip removes frontends and the health-check node port that another Service owns.
func (e *Engine) strip(now *Port, s *slot) {
	if len(e.ownership.conflicts)+len(e.uses.owner) == 0 {
		return
	}
	if check := now.Spec.HealthCheckNodePort; check != 0 {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			owner, hidden := e.holder(nodePortKey(f, check, v1.ProtocolTCP), now.Spec, kindHealthCheck)
			if owner == 0 {
				continue
			}
			e.reportConflict(now, owner, hidden, fmt.Sprintf("health-check node port %d", check))
			if !hidden {
				spec := *now.Spec
				spec.HealthCheckNodePort = 0
				now.Spec = &spec
			}
		}
	}
	now.Frontends = slices.DeleteFunc(now.Frontends, func(f Frontend) bool {
		at := l4KeyOf(now, &f)
		owner, hidden := e.ownership.owner[at].id, false
		switch {
		case owner != now.ID:
		case f.Kind == KindNodePort:
			owner, hidden = e.holder(at, now.Spec, f.Kind)
		case e.node.servesNodePorts(f.Kind, f.Addr):
			owner, _ = e.holder(nodePortKey(now.Key.Family, f.Port, now.Key.Protocol), now.Spec, KindExternalIP)
		default:
			return false
		}
		if owner == 0 {
			return false
		}
		had := s.live && slices.ContainsFunc(s.svc.Frontends, func(o Frontend) bool {
			return l4KeyOf(s.svc, &o) == at
		})
		if !s.live || had || !sameFrontends(s.svc.Spec, now.Spec) {
			text := fmt.Sprintf("%s %s port %d (%s)", f.Kind, f.Addr, f.Port, now.Key.Protocol)
			if f.Kind == KindNodePort {
				text = fmt.Sprintf("%s %d (%s)", f.Kind, f.Port, now.Key.Protocol)
			}
			e.reportConflict(now, owner, hidden, text)
		}
		return !hidden
	})
}

// reportConflict reports a frontend that another Service owns, perhaps at an address of the node.
func (e *Engine) reportConflict(now *Port, owner uint32, atNode bool, text string) {
	if atNode {
		text += " at an address of the node"
	}
	owned := complaint.Name(e.slots[owner].port.Key.String())
	if e.complaints.Write(slog.LevelWarn, complaint.Port(now.Key.Namespace, now.Key.Name, now.Key.String()), "cannot use a frontend that another service owns",
		"reason", string(tracker.ReasonFrontendConflict), "frontend", text, "winner", owned) {
		e.tracker.Event(now.Key.NamespacedName, true, tracker.ReasonFrontendConflict,
			fmt.Sprintf("port %q (%s): %s belongs to %s", complaint.Value(now.Key.Port), now.Key.Family, text, owned))
	}
}

func (e *Engine) markDirty(id uint32) {
	for _, c := range e.cursors {
		c.markDirty(id)
	}
}

func (e *Engine) desired(id uint32) *Port {
	if s := &e.slots[id]; s.live {
		return s.svc
	}
	return nil
}
