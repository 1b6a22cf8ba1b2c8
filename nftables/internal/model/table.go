package model

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Config configures tables.
type Config struct {
	// Plain and Sticky are the largest numbers of pools of one family, without and with client
	// affinity.
	Plain, Sticky uint32
	// Clients is the number of clients that a table remembers.
	Clients int
	// GracePeriod is how long an endpoint's connections to itself are still masqueraded after the
	// endpoint is gone.
	GracePeriod time.Duration
	// FastPath is set if the tables have a flowtable.
	FastPath bool
}

// DefaultConfig has the limits of the encoding.
var DefaultConfig = Config{Plain: layout.MaxPool, Sticky: layout.MaxSticky, Clients: 1 << 20, GracePeriod: time.Second}

// Table is the model of one family's table: its state in the kernel after the transactions that
// were built. It allocates the numbers of pools and handlers.
type Table struct {
	Family tracker.Family
	Node   *ruleset.Node
	config Config
	// services is indexed by the Service's ID.
	services []*service
	plain    numbers
	sticky   numbers
	// portRanges numbers the frontends with ranges of ports, and rangeCount counts them. hasRangeSets is set if the sets and
	// chains for them exist, and rangesUsed if packets meet these. rewritten is for Rewritten.
	portRanges                          numbers
	rangeCount                          int
	hasRangeSets, rangesUsed, rewritten bool
	kept                                keptRanges
	// handlers and stickyHandlers hold the handlers that have a chain. verdicts holds the
	// contents of the verdict maps, which lead to the chains.
	handlers       handlers
	stickyHandlers stickyHandlers
	verdicts       map[layout.Set]map[uint32]string
	// chains holds the objects that created the chains of handlers. garbage holds those of chains
	// that no rule or element leads to any more.
	chains  map[string]Object
	garbage map[string]bool
	// prefixes holds the lengths of source prefixes that have a set.
	prefixes map[int]bool
	// lacking holds the Services that are programmed without client affinity that they ask for, by
	// ID. newlyLacking is one of those that were not before, and counts them.
	lacking      map[uint32]*ruleset.Port
	newlyLacking struct {
		count int
		key   tracker.Key
	}
	// clusterIPs counts the Services that need an address in the set of cluster IPs.
	clusterIPs uses
	hairpin    hairpin
	// count holds each set's number of elements in the transactions that were sent, and size the
	// largest number. wanted is the number that the Services of the full delta may need.
	count, size, wanted [layout.SetCount]int
	// ranges holds the contents of the interval sets.
	ranges map[layout.Set][]Range
	// interfaces holds the interfaces of the fast path by name, with their indices. It is nil
	// before the first SetInterfaces.
	interfaces map[string]int
	// adopted holds the sticky pools of an earlier table that no Service has taken over.
	adopted map[StickyOwner]*AdoptedPool
	// longNames holds the Service ports whose names do not fit into a comment, by frontend.
	longNames map[layout.Octets]tracker.Key
	// recall, if not nil, returns the clients of an endpoint that another data plane remembers.
	recall Recall

	// Buffers.
	before, after []layout.Element
	change        poolChange
	undo          undo
}

// Recall returns the clients that another data plane remembers for an endpoint of a Service port
// with client affinity, each with the time since its last connection.
type Recall func(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration

// service is a Service as programmed: its version, its pools and the dispatch keys of its frontends.
type service struct {
	version *ruleset.Port
	pools   [ruleset.TargetLocal + 1]*pool // by target
	keys    []dispatchKeys
	// ranges holds the frontends with ranges of ports.
	ranges []portRange
	// shift holds the result of [layout.ShiftedBy] if the Service has a range that is shifted.
	shift   [2]uint16
	shifted bool
	// lacksAffinity is set if the Service is programmed without client affinity that it asks
	// for.
	lacksAffinity bool
}

// sticky returns the targets whose pools are sticky.
func (s *service) sticky() (out StickyTargets) {
	for _, target := range targets {
		out[target] = s.pools[target] != nil && s.pools[target].sticky
	}
	return out
}

// number returns the number of the Service's pool for a target, or 0.
func (s *service) number(target ruleset.Target) uint32 {
	if int(target) >= len(s.pools) || s.pools[target] == nil {
		return 0
	}
	return s.pools[target].number
}

// Errors about one Service.
var (
	ErrShift         = errors.New("no translation shifts all ports of the range")
	ErrTooManyPools  = fmt.Errorf("too many Services with endpoints (at most %d pools a family)", layout.MaxPool)
	errTooManySticky = fmt.Errorf("too many Services have client affinity (at most %d pools a family)", layout.MaxSticky)
	ErrProtocol      = errors.New("protocol is not TCP, UDP or SCTP")
	// ErrTooLarge is wrapped by the error of a transaction that is larger than the socket can send,
	// and by that of a Service that needs one. The kernel accepts a transaction only in one piece,
	// of at most the size of the socket's send buffer. A buffer larger than net.core.wmem_max needs
	// CAP_NET_ADMIN in the initial user namespace.
	ErrTooLarge = errors.New("transaction is larger than the socket's send buffer")
)

// ErrOverflow is returned if the sets need more room. It requires a full delta.
var ErrOverflow = errors.New("a set has more elements than its size")

// NewTable returns the model of an empty table for the Services in changes. endpoints is the number
// of endpoints in their grace period.
func NewTable(f tracker.Family, n *ruleset.Node, c Config, changes []ruleset.Change, endpoints int) *Table {
	t := &Table{
		Family: f, Node: n, config: c,
		plain: numbers{max: c.Plain}, sticky: numbers{max: c.Sticky}, portRanges: numbers{max: layout.MaxRange},
		handlers: handlers{}, stickyHandlers: newStickyHandlers(),
		verdicts: map[layout.Set]map[uint32]string{
			layout.Handlers: {}, layout.InternalHandlers: {}, layout.OwnHandlers: {}, layout.StickyHandlers: {},
			layout.RangeStickyHandlers: {},
		},
		chains: map[string]Object{}, garbage: map[string]bool{}, lacking: map[uint32]*ruleset.Port{}, prefixes: map[int]bool{},
		clusterIPs: uses{}, hairpin: hairpin{refs: uses{}}, ranges: map[layout.Set][]Range{},
		longNames: map[layout.Octets]tracker.Key{},
	}
	t.setSizes(changes, endpoints)
	return t
}

// nodePortAddresses is the number of node addresses for which the sets of counters have room, for
// each NodePort.
const nodePortAddresses = 16

// setSizes sets the sizes of the sets for the Services in changes. A full delta fails as a whole if
// a set needs more.
func (t *Table) setSizes(changes []ruleset.Change, endpoints int) {
	need := &t.wanted
	need[layout.Hairpin] = endpoints
	for i := range changes {
		c := &changes[i]
		if c.New == nil || c.Key.Family != t.Family {
			continue
		}
		if c.Old == nil || c.Old == c.New {
			t.demand(c.New, need)
			continue
		}
		// What remains of a Service that cannot be programmed needs no more than Old.
		var before, after [layout.SetCount]int
		t.demand(c.Old, &before)
		t.demand(c.New, &after)
		for s := range need {
			need[s] += max(before[s], after[s])
		}
	}
	if need[layout.StickyPools] > int(t.config.Sticky) {
		// Services without a number of a sticky pool get pools of the other kind.
		for _, p := range [...]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP} {
			need[layout.EndpointsOf(p)] += need[layout.StickyBuckets]
		}
	}
	// Sets of allowed sources have no size. Otherwise each prefix length that a Service may begin to
	// use would need room for very many sources.
	for s := layout.ServiceIPs; s < layout.FirstAllowed; s++ {
		t.size[s] = SizeFor(need[s])
	}
	t.size[layout.StickyClients] = t.config.Clients
	// Interval sets have no size, and the number of interfaces is not known.
	t.size[layout.NodePortIPs], t.size[layout.ServiceCIDRs], t.size[layout.FastPathInterfaces] = 0, 0, 0
	t.size[layout.ServiceRanges], t.size[layout.RangeSources] = 0, 0
	for _, s := range layout.TrafficSets() {
		t.size[s] = SizeFor(need[layout.ServiceIPs] + nodePortAddresses*need[layout.NodePorts])
	}
}

// keptRoom and keptHairpin are the largest sizes that sets keep. Without an element, a set of size
// keptRoom takes 6 MB of kernel memory (BenchmarkRoom of package nftables). A backend does not read a
// set of hairpin connections that is much larger than keptHairpin.
const (
	keptRoom    = 1 << 18
	keptHairpin = 1 << 15
)

// KeepRoom makes sets as large as those of the table that this one replaces, up to a bound. had
// returns the size of a set of that table, or 0. Without KeepRoom, a Service that needs many elements
// of different sets by turns would cause a full delta each time.
func (t *Table) KeepRoom(had func(layout.Set) int) {
	for s := layout.ServiceIPs; s < layout.FirstAllowed; s++ {
		most := keptRoom
		if s == layout.Hairpin {
			most = keptHairpin
		}
		if t.size[s] != 0 && s != layout.StickyClients {
			t.size[s] = max(t.size[s], min(had(s), most))
		}
	}
}

// demand adds the largest number of elements of each set that the Service needs to need.
func (t *Table) demand(s *ruleset.Port, need *[layout.SetCount]int) {
	buckets := bucketsOf(s, ruleset.TargetCluster) + bucketsOf(s, ruleset.TargetLocal)
	if s.Spec.Affinity != 0 {
		need[layout.StickyPools] += len(targets)
		need[layout.StickyHandlers] += len(targets)
		if hasRange(s) {
			need[layout.RangeStickyHandlers] += len(targets)
		}
		need[layout.StickyBuckets] += buckets
		need[layout.StickyEndpoints] += len(s.Selection.Cluster) + len(s.Selection.Local)
	} else {
		need[layout.EndpointsOf(s.Key.Protocol)] += buckets
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.IsRange() {
			need[layout.ServiceRanges]++
			need[layout.RangeKeys]++
			need[layout.InternalRangeKeys]++
			need[layout.RangeSources] += len(f.Sources)
		} else {
			all, internal, _ := keyOf(s, f)
			need[all]++
			need[internal]++
			for _, source := range f.Sources {
				need[layout.Allowed(source.Bits())]++
			}
		}
		if f.Kind == ruleset.KindClusterIP {
			need[layout.ClusterIPs]++
		}
	}
	if hasRange(s) {
		need[layout.ShiftFrom] += len(targets)
		need[layout.ShiftTo] += len(targets)
	}
	for _, ep := range s.Selection.Reachable {
		if t.mayBeHere(ep) {
			need[layout.Hairpin]++
		}
	}
}

// SizeFor returns the size of a set for n elements. The kernel accepts no more elements than
// the size, and finds elements faster in a set with a size.
func SizeFor(n int) int {
	return max(1<<12, 1<<bits.Len(uint(2*n)))
}

// Create adds all sets, chains and rules that do not depend on the Services, except base chains and
// the sets in kept. keptFlowtable tells that the flowtable stays.
func (t *Table) Create(kept map[layout.Set]bool, keptFlowtable bool, tx *Tx) {
	for s := layout.VersionSet; s < layout.FirstAllowed; s++ {
		if t.Has(s) && !kept[s] {
			tx.Object(Object{Kind: NewSet, Family: t.Family, Set: s, Size: t.size[s]})
		}
	}
	if t.config.FastPath && !keptFlowtable {
		tx.Object(Object{Kind: NewFlowtable, Family: t.Family})
	}
	tx.Object(Object{Kind: FixedChains, Family: t.Family})
	t.add(&layout.Element{Set: layout.VersionSet, Key: word(layout.Version)}, "version of the layout of this table", tx)
	t.SetRanges(layout.NodePortIPs, nodePortRanges(t.Node.NodePorts(t.Family), t.Family), tx)
	if t.wanted[layout.ServiceRanges] != 0 {
		t.useRanges(tx)
	}
}

// Recall makes each Service that Change adds from now on start with the clients that another data
// plane remembers. nil ends that.
func (t *Table) Recall(r Recall) { t.recall = r }

// Hook adds the base chains, by which packets meet the table.
func (t *Table) Hook(tx *Tx) { tx.Object(Object{Kind: BaseChains, Family: t.Family}) }

// CreateAll adds an object of every kind, for probing the kernel.
func (t *Table) CreateAll(tx *Tx) {
	t.Create(nil, false, tx)
	t.Hook(tx)
	const buckets = layout.ExactBuckets + 4
	for h := layout.HandleNotPods; h <= layout.HandleDrop; h++ {
		c := layout.Handler{Handling: h, Firewall: true}
		if h < layout.HandleInternalOrDrop {
			c.Buckets = buckets
		}
		t.handler(c, tx)
	}
	t.internalHandler(layout.Handler{Sticky: true}, tx)
	t.useRanges(tx)
	for h := layout.HandleNotPods; h <= layout.HandleDrop; h++ {
		c := layout.Handler{Handling: h, Firewall: true, Range: true}
		if h < layout.HandleInternalOrDrop {
			c.Buckets = 1
		}
		t.handler(c, tx)
	}
	t.stickyHandler(layout.StickyHandler{Buckets: buckets, Seconds: 10800}, true, tx)
	t.handler(layout.Handler{Buckets: 251, Hash: tracker.HashSourcePort}, tx)
	t.prefix(t.Family.Bits()/2, tx)
}

// Has reports whether the table has the set. Some exist only if they are needed.
func (t *Table) Has(s layout.Set) bool {
	switch {
	case s >= layout.FirstAllowed:
		return t.prefixes[int(s-layout.FirstAllowed)]
	case s.OfRanges():
		return t.hasRangeSets
	case s == layout.FastPathInterfaces:
		return t.config.FastPath
	}
	return true
}

// service returns the programmed Service with the ID, or nil.
func (t *Table) service(id uint32) *service {
	if int(id) < len(t.services) {
		return t.services[id]
	}
	return nil
}

// add adds an element with a comment to its set. It creates a missing set of allowed sources.
func (t *Table) add(e *layout.Element, comment string, tx *Tx) {
	switch {
	case e.Set == layout.ClusterIPs:
		if !t.use(t.clusterIPs, e.Key.IP(), +1) {
			return
		}
	case e.Set.Concat():
		if t.takeKept(e, comment) {
			return
		}
	case e.Set >= layout.FirstAllowed:
		t.prefix(int(e.Set-layout.FirstAllowed), tx)
	}
	tx.add(t.Family, e, comment)
}

// remove deletes an element from its set.
func (t *Table) remove(e *layout.Element, tx *Tx) {
	if e.Set == layout.ClusterIPs && !t.use(t.clusterIPs, e.Key.IP(), -1) {
		return
	}
	tx.remove(t.Family, e)
}

// counted counts an element that is sent. It reports whether its set now has more elements than its
// size. The model does not count the elements of interval sets and remembered clients.
func (t *Table) counted(e *Edit) bool {
	switch {
	case e.Set.Interval() || e.Set == layout.StickyClients:
	case e.Deletion:
		t.count[e.Set]--
	default:
		t.count[e.Set]++
	}
	return t.full(e.Set)
}

func (t *Table) full(s layout.Set) bool { return t.size[s] != 0 && t.count[s] > t.size[s] }

// overflows reports whether a set has more elements than its size.
func (t *Table) overflows() bool {
	for s := range layout.SetCount {
		if t.full(s) {
			return true
		}
	}
	return false
}

// uses counts the uses of addresses. Its keys have no pointers, so the garbage collector does not
// read them: there may be a hundred thousand.
type uses map[[16]byte]int32

// of returns the number of uses of an address.
func (u uses) of(a netip.Addr) int { return int(u[a.As16()]) }

// add adds by to an address's number of uses, and reports whether the set gains or loses the
// address. Within a transaction a count may drop to 0 and come back, because deletions precede
// additions. The reverse cannot happen: each Service changes at most once.
func (u uses) add(a netip.Addr, by int32) (changed bool) {
	key := a.As16()
	before := u[key]
	if now := before + by; now != 0 {
		u[key] = now
		return before == 0
	}
	delete(u, key)
	return true
}

// prefix creates the set for sources of a prefix length, if it does not exist, and its rule.
func (t *Table) prefix(length int, tx *Tx) {
	if t.prefixes[length] {
		return
	}
	t.prefixes[length] = true
	t.undo.later(func() { delete(t.prefixes, length) })
	s := layout.Allowed(length)
	tx.Object(Object{Kind: NewSet, Family: t.Family, Set: s, Size: t.size[s]})
	tx.Object(Object{Kind: SourceRule, Family: t.Family, Size: length})
}

// Size returns a set's largest number of elements, 0 for any number.
func (t *Table) Size(s layout.Set) int { return t.size[s] }

// Wanted returns the largest number of elements of a set that the Services of [NewTable] need.
func (t *Table) Wanted(s layout.Set) int { return t.wanted[s] }

// Count returns a set's number of elements.
func (t *Table) Count(s layout.Set) int { return t.count[s] }

// Verdicts returns the contents of the verdict maps.
func (t *Table) Verdicts() map[layout.Set]map[uint32]string { return t.verdicts }

// Ranges returns the contents of an interval set.
func (t *Table) Ranges(s layout.Set) []Range { return t.ranges[s] }

// Chains returns the objects that created the chains of handlers, by name.
func (t *Table) Chains() map[string]Object { return t.chains }

// Sources returns the number of prefix lengths of allowed sources that have a rule.
func (t *Table) Sources() int { return len(t.prefixes) }

// LongNames returns the Service ports whose names do not fit into a comment, by the key of their
// frontends.
func (t *Table) LongNames() map[layout.Octets]tracker.Key { return t.longNames }

// Garbage returns the chains that no rule or element leads to any more. They can be deleted after
// the commit: kernels before 6.2 cannot delete a chain in the transaction that deletes the element
// that refers to it.
func (t *Table) Garbage() map[string]bool { return t.garbage }

// DropGarbage forgets the chains in Garbage, which were deleted or else stay like chains in use.
func (t *Table) DropGarbage(deleted bool) {
	if deleted {
		for name := range t.garbage {
			delete(t.chains, name)
		}
	}
	clear(t.garbage)
}
