//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// table is the model of one family's table: its state in the kernel after the transaction that
// is being written. It allocates the numbers of pools and handlers. It applies changes to the
// model and writes the elements by which a Service differs, without reading from the kernel.
type table struct {
	family tracker.Family
	node   *ruleset.Node
	// mark is the packet mark that requests masquerading.
	mark uint32
	// services is indexed by the Service's ID.
	services []*service
	plain    numbers
	sticky   numbers
	// handlers and stickyHandlers hold the handlers that have a chain. verdicts holds the
	// contents of the verdict maps, which lead to the chains.
	handlers       handlers
	stickyHandlers stickyHandlers
	verdicts       map[set]map[uint32]string
	// chains holds the number of rules of each handler's chain. garbage holds those of chains
	// that no rule or element leads to any more.
	chains  map[string]int
	garbage map[string]bool
	// unused holds the chains of an earlier table that could not be deleted.
	unused map[string]bool
	// prefixes holds the lengths of source prefixes that have a set.
	prefixes map[int]bool
	// lacking holds the IDs of Services that are programmed without client affinity that they ask
	// for. newlyLacking is one of those that were not before, and counts them.
	lacking      map[uint32]bool
	newlyLacking struct {
		count int
		key   tracker.Key
	}
	// clusterIPs counts the Services that need an address in the set of cluster IPs. While
	// deferClusterIPs is set, no element of the set is written.
	clusterIPs      uses
	deferClusterIPs bool
	hairpin         hairpin
	// lost holds the addresses and ports that Services lost since the last commit. Their
	// counters are deleted after the commit.
	lost nlbatch.Elements
	// count and size are each set's number of elements and largest number of elements.
	count, size [setCount]int
	// ranges holds the contents of the interval sets.
	ranges map[set][]addrRange
	// kept holds the sets that stay from an earlier table.
	kept map[set]bool
	// offload is Config.Offload. keptFlowtable is set if the flowtable stays from an earlier
	// table. interfaces holds the flowtable's interfaces by name, with their indices. It is nil
	// before the first syncInterfaces.
	offload       *Offload
	keptFlowtable bool
	interfaces    map[string]int
	// unhooked is set while no packet meets the table.
	unhooked bool
	// adopted holds the sticky pools of an earlier table that no Service has taken over.
	adopted map[stickyOwner]*adoptedPool

	// Buffers.
	before, after []element
	keys          []dispatchKeys
	change        poolChange
	// recalled holds clients of another data plane by endpoint, for the Service that is being
	// written. It is nil unless Apply creates the table and Config.Clients is set.
	recalled map[netip.AddrPort][]recalled
}

// service is a Service as programmed, with its pools and the dispatch keys of its frontends.
type service struct {
	rule  *ruleset.Service
	pools [ruleset.Drop + 1]*pool // by target
	keys  []dispatchKeys
	// lacksAffinity is set if the Service is programmed without client affinity that it asks
	// for.
	lacksAffinity bool
}

// sticky returns the targets whose pools are sticky.
func (s *service) sticky() (out stickyTargets) {
	for _, target := range targets {
		out[target] = s.pools[target] != nil && s.pools[target].sticky
	}
	return out
}

// Errors about one Service.
var (
	errTooManyPools  = fmt.Errorf("too many Services with endpoints (at most %d pools a family)", maxPool)
	errTooManySticky = fmt.Errorf("too many Services have client affinity (at most %d pools a family)", maxSticky)
	errProtocol      = errors.New("protocol is not TCP, UDP or SCTP")
	// errOverflow requires a full delta, which gives the sets more room.
	errOverflow = errors.New("a set has more elements than its size")
)

// limits are the largest numbers of pools of one family.
type limits struct{ plain, sticky uint32 }

// defaultLimits are the limits of the encoding. Tests set smaller ones.
var defaultLimits = limits{plain: maxPool, sticky: maxSticky}

func newTable(f tracker.Family, n *ruleset.Node, mark uint32, l limits) *table {
	return &table{
		family: f, node: n, mark: mark,
		plain: numbers{max: l.plain}, sticky: numbers{max: l.sticky},
		handlers: handlers{}, stickyHandlers: newStickyHandlers(),
		verdicts: map[set]map[uint32]string{setHandlers: {}, setInternalHandlers: {}, setOwnHandlers: {}, setStickyHandlers: {}},
		chains:   map[string]int{}, garbage: map[string]bool{}, lacking: map[uint32]bool{}, prefixes: map[int]bool{}, clusterIPs: uses{},
		hairpin: hairpin{refs: uses{}}, ranges: map[set][]addrRange{}, kept: map[set]bool{},
	}
}

// service returns the programmed Service with the ID, or nil.
func (t *table) service(id uint32) *service {
	if int(id) < len(t.services) {
		return t.services[id]
	}
	return nil
}

// number returns the number of the Service's pool for a target, or 0.
func (s *service) number(target ruleset.Target) uint32 {
	if p := s.pools[target]; p != nil {
		return p.number
	}
	return 0
}

// endpoints returns the endpoints of the pool for a target.
func (s *service) endpoints(target ruleset.Target) []*tracker.Endpoint {
	if s.rule == nil {
		return nil
	}
	return s.rule.Pool(target)
}

// apply replaces the Service with the ID by s, nil to delete it, and writes the difference to
// w. Callers must call check first and must not apply a Service that it rejects. After an error
// the table is unchanged.
func (t *table) apply(id uint32, s *ruleset.Service, w *writer) error {
	old := t.service(id)
	if old == nil {
		if s == nil {
			return nil
		}
		old = &service{}
	}
	now, err := t.allocate(old, s, w)
	if err != nil {
		return err
	}
	for _, target := range targets {
		t.applyPool(old, now, target, w)
	}
	t.applyHairpin(old, now, w)
	t.applyFrontends(old, now, w)
	for int(id) >= len(t.services) {
		t.services = append(t.services, nil)
	}
	t.services[id] = now
	if s == nil {
		t.services[id] = nil
	}
	t.noteLacking(id, now)
	return nil
}

// noteLacking updates t.lacking after the Service with the ID changed.
func (t *table) noteLacking(id uint32, now *service) {
	switch {
	case !now.lacksAffinity:
		delete(t.lacking, id)
	case !t.lacking[id]:
		t.lacking[id] = true
		t.newlyLacking.count++
		t.newlyLacking.key = now.rule.Key
	}
}

// check returns an error if no table can have the Service.
func (t *table) check(s *ruleset.Service) error {
	if inet.Protocol(s.Key.Protocol) == 0 {
		return fmt.Errorf("%w: %q", errProtocol, s.Key.Protocol)
	}
	return nil
}

// fitted returns s with the endpoints for which there are numbers: s itself except for very many
// endpoints. It keeps the first ones, so that all nodes keep the same.
func (t *table) fitted(s *ruleset.Service) *ruleset.Service {
	if s == nil {
		return nil
	}
	pool := func(list []*tracker.Endpoint, target ruleset.Target) []*tracker.Endpoint {
		most := maxPool
		if s.Port.Affinity != 0 {
			most = maxStickyEndpoints
		}
		if len(list) > maxNumberedEndpoints && distributionOf(s, target) != (distribution{}) {
			most = maxNumberedEndpoints
		}
		return list[:min(len(list), most)]
	}
	cluster, local := pool(s.Selection.Cluster, ruleset.ToCluster), pool(s.Selection.Local, ruleset.ToLocal)
	if len(cluster) == len(s.Selection.Cluster) && len(local) == len(s.Selection.Local) {
		return s
	}
	out := *s
	out.Selection.Cluster, out.Selection.Local = cluster, local
	return &out
}

// Limits returns the limits of one Service, which are the same in both families. Apply programs
// a Service that exceeds them with the first endpoints, as many as allowed.
func (b *Backend) Limits(tracker.Family) ruleset.Limits {
	return ruleset.Limits{AffinityEndpoints: maxStickyEndpoints, WeightedEndpoints: maxNumberedEndpoints}
}

// applyPool writes the buckets and the numbered endpoints by which a pool changes.
func (t *table) applyPool(old, now *service, target ruleset.Target, w *writer) {
	was, is := old.pools[target], now.pools[target]
	if was != nil && was != is {
		was.set(old.endpoints(target), nil, distribution{}, nil, &t.change)
		t.writePool(was, "", w)
		t.setStickyHandler(was, nil, w)
		t.freeNumber(was)
	}
	if is == nil {
		return
	}
	var before []*tracker.Endpoint
	after, how := now.endpoints(target), distributionOf(now.rule, target)
	if was == is {
		before = old.endpoints(target)
	}
	if was != is || how != is.distribution || !sameSlice(before, after) {
		hashed := func() *maglev.Table { return now.rule.Maglev(target, t.node.HashSeed) }
		is.set(before, after, how, hashed, &t.change)
		comment := ""
		if is.sticky {
			comment = string(ownerOf(now.rule.Key, target))
		}
		t.writePool(is, comment, w)
		if t.recalled != nil {
			t.writeClients(is, now.rule.Port.Affinity, w)
		}
	}
	if is.sticky {
		t.setStickyHandler(is, t.stickyHandlers.entries[stickyHandlerOf(now.rule, target)], w)
	}
}

// setStickyHandler writes the handler of a sticky pool, nil for none.
func (t *table) setStickyHandler(p *pool, h *stickyEntry, w *writer) {
	if p.handler == h {
		return
	}
	if p.handler != nil {
		e := stickyPoolElement(p)
		t.remove(&e, w)
		t.stickyHandlers.use(p.handler, -1)
	}
	if p.handler = h; h != nil {
		e := stickyPoolElement(p)
		t.add(&e, "", w)
		t.stickyHandlers.use(h, +1)
	}
}

func sameSlice(a, b []*tracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// writePool writes t.change, the pool's change. comment is for the endpoints of a sticky pool.
func (t *table) writePool(p *pool, comment string, w *writer) {
	c := &t.change
	addr := p.addresses()
	for _, bucket := range c.buckets {
		if bucket < c.before {
			e := emptyBucket(p, bucket)
			t.remove(&e, w)
		}
		if bucket < p.size() {
			e := bucketElement(p, bucket, addr(bucket))
			t.add(&e, "", w)
		}
	}
	if !p.sticky {
		return
	}
	for _, n := range c.gone {
		e := memberElement(p, n, netip.AddrPort{})
		t.remove(&e, w)
	}
	for _, m := range c.come {
		e := memberElement(p, m.number, m.addr)
		t.add(&e, comment, w)
	}
}

// applyFrontends writes the elements by which the frontends differ.
func (t *table) applyFrontends(old, now *service, w *writer) {
	t.before, t.after = t.before[:0], t.after[:0]
	if old.rule != nil {
		t.before = frontendElements(t.before, old.rule, old.keys)
	}
	if now.rule != nil {
		t.after = frontendElements(t.after, now.rule, now.keys)
	}
	t.noteLost(old.rule, now.rule)
	diff(t.before, t.after, func(e *element) { t.remove(e, w) }, func(e *element) {
		comment := ""
		if e.named {
			comment = now.rule.Key.ServicePortName.String()
		}
		t.add(e, comment, w)
	})
}

// add adds an element with a comment to its set. It creates a missing set of allowed sources.
func (t *table) add(e *element, comment string, w *writer) {
	switch {
	case e.set == setClusterIPs:
		if changed := t.clusterIPs.add(e.key.ip(), +1); !changed || t.deferClusterIPs {
			return
		}
	case e.set >= firstAllowed:
		t.prefix(int(e.set-firstAllowed), w)
	}
	t.write(e, comment, w)
}

func (t *table) write(e *element, comment string, w *writer) {
	t.count[e.set]++
	w.add(t.family, e, comment)
}

// remove deletes an element from its set.
func (t *table) remove(e *element, w *writer) {
	if e.set == setClusterIPs && !t.clusterIPs.add(e.key.ip(), -1) {
		return
	}
	t.count[e.set]--
	w.remove(t.family, e)
}

// uses counts the uses of addresses. Its keys have no pointers, so the garbage collector does not
// read them: there may be a hundred thousand.
type uses map[[16]byte]int32

// of returns the number of uses of an address.
func (u uses) of(a netip.Addr) int { return int(u[a.As16()]) }

// add adds by to an address's number of uses, and reports whether the set gains or loses the
// address. In one transaction a number may fall to 0 and rise again, because the transaction
// deletes elements before it adds others. A number cannot rise from 0 and fall to 0 again, because
// each Service changes once.
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

// prefix creates the set for sources of a prefix length, if it does not exist, and its rule at
// the beginning of chainFirewallCheck.
func (t *table) prefix(length int, w *writer) {
	if t.prefixes[length] {
		return
	}
	t.prefixes[length] = true
	w.newSet(t.family, allowed(length), t.size[allowed(length)])
	w.rule(t.family, chainFirewallCheck, length, 0, t.rules().allowedSource(length))
}

// rules returns the renderer of the table's rules.
func (t *table) rules() rules {
	return rules{family: t.family, mark: t.mark, seed: maglev.Seed32(t.node.HashSeed), offload: t.offload}
}

// skeleton writes all sets, chains and rules that do not depend on the Services. measure must
// have set the sizes of the sets.
func (t *table) skeleton(w *writer) {
	for s := setLayout; s < firstAllowed; s++ {
		if t.has(s) && !t.kept[s] {
			w.newSet(t.family, s, t.size[s])
		}
	}
	if t.offload != nil && !t.keptFlowtable {
		w.newFlowtable(t.family)
	}
	for _, c := range t.rules().fixedChains() {
		if c.base == nil || !t.unhooked {
			w.chain(t.family, c.name, c.base, c.rules)
		}
	}
	t.add(&element{set: setLayout, key: octets{}.word(layoutVersion)}, "version of the layout of this table", w)
	t.setRanges(setNodePortIPs, nodePortRanges(t.node.NodePorts(t.family), t.family), w)
}

// hook adds the base chains of an unhooked table.
func (t *table) hook(w *writer) {
	t.unhooked = false
	for _, c := range t.rules().fixedChains() {
		if c.base != nil {
			w.chain(t.family, c.name, c.base, c.rules)
		}
	}
}

// overflows reports whether a set has more elements than its size.
func (t *table) overflows() bool {
	for s, n := range t.count {
		if t.size[s] != 0 && n > t.size[s] {
			return true
		}
	}
	return false
}

// sizeFor returns the size of a set for n elements. The kernel accepts no more elements than
// the size, and finds elements faster in a set with a size.
func sizeFor(n int) int {
	return max(1<<12, 1<<bits.Len(uint(2*n)))
}
