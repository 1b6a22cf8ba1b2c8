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

// table is the model of one family's table: what is in the kernel, or will be once the
// transaction that is being written is committed. Changes are applied to the model alone
// and nothing is read back. It allocates the numbers of pools and handlers, and writes
// how the elements of a Service differ from those it had.
type table struct {
	family tracker.Family
	node   *ruleset.Node
	// mark is the packet mark that asks for masquerading.
	mark uint32
	// services is by the Service's ID.
	services []*service
	plain    numbers
	sticky   numbers
	// handlers are those that have a chain. verdicts are the contents of the maps that lead
	// to the chains.
	handlers handlers
	verdicts map[set]map[uint32]string
	// chains is the number of rules of each handler's chain.
	chains map[string]int
	// unused are chains of an earlier table that could not be deleted.
	unused map[string]bool
	// prefixes are the lengths of source prefixes that have a set.
	prefixes map[int]bool
	// clusterIPs counts the Services that need an address in the set of cluster IPs.
	// Elements are not written while deferClusterIPs is set.
	clusterIPs      map[netip.Addr]int
	deferClusterIPs bool
	hairpin         hairpin
	// lost are the addresses and ports that Services lost since the last commit, whose counters
	// are to be deleted.
	lost nlbatch.Elements
	// count and size are the number of elements of each set and its bound.
	count, size [setCount]int
	// ranges are the contents of the interval sets.
	ranges map[set][]addrRange
	// kept are the sets that an earlier table left.
	kept map[set]bool
	// offload is Config.Offload. keptFlowtable is set if an earlier table left the flowtable.
	// interfaces are those that the flowtable was given, by name, with their indices, nil if
	// it was given none yet.
	offload       *Offload
	keptFlowtable bool
	interfaces    map[string]int
	// unhooked is set as long as no packet meets the table.
	unhooked bool
	// handlerSize caches handlerBytes.
	handlerSize map[handler]int
	// adopted are the sticky pools of an earlier table that no Service has taken over.
	adopted map[stickyOwner]*adoptedPool

	// Buffers.
	before, after []element
	keys          []dispatchKeys
	change        poolChange
}

// service is a Service as programmed: its numbers are those of its pools and, in the
// dispatch keys of each frontend, those of its handlers.
type service struct {
	rule           *ruleset.Service
	cluster, local *pool
	keys           []dispatchKeys
}

// targets are the targets that have a pool.
var targets = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// Errors about one Service.
var (
	errTooManyPools     = errors.New("too many Services with endpoints (at most 1048575 pools a family)")
	errTooManySticky    = errors.New("too many Services with client affinity (at most 32767 pools a family)")
	errTooManyEndpoints = fmt.Errorf("too many endpoints for client affinity (at most %d)", maxStickyEndpoints)
	errTooManyNumbered  = fmt.Errorf("too many endpoints for weights or a hash (at most %d)", maxNumberedEndpoints)
	errTooManyHandlers  = fmt.Errorf("too many different combinations of endpoint counts and affinity timeouts (at most %d a family)", maxStickyHandlers)
	errProtocol         = errors.New("protocol is not TCP, UDP or SCTP")
)

func newTable(f tracker.Family, n *ruleset.Node, mark uint32) *table {
	return &table{
		family: f, node: n, mark: mark,
		plain: numbers{max: maxPool}, sticky: numbers{max: maxSticky},
		handlers: newHandlers(), verdicts: map[set]map[uint32]string{setHandlers: {}, setInternalHandlers: {}, setOwnHandlers: {}}, handlerSize: map[handler]int{},
		chains: map[string]int{}, prefixes: map[int]bool{}, clusterIPs: map[netip.Addr]int{},
		hairpin: hairpin{refs: map[netip.Addr]int{}}, ranges: map[set][]addrRange{}, kept: map[set]bool{},
	}
}

// service returns what is programmed for the ID, or nil.
func (t *table) service(id uint32) *service {
	if int(id) < len(t.services) {
		return t.services[id]
	}
	return nil
}

// pool returns the Service's pool for a target, or nil.
func (s *service) pool(target ruleset.Target) *pool {
	switch target {
	case ruleset.ToCluster:
		return s.cluster
	case ruleset.ToLocal:
		return s.local
	}
	return nil
}

// number returns the number of the pool for a target, or 0 if s has no such pool.
func (s *service) number(target ruleset.Target) uint32 {
	if p := s.pool(target); p != nil {
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

// apply replaces what the table has for the Service's ID by s, which is nil if the
// Service is gone, and writes the difference to w. Callers must call check first and must
// not apply a Service that it rejects. After an error nothing is changed.
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
	return nil
}

// check returns the error of a Service that cannot be programmed in any transaction. It
// does not find a lack of pools, which apply does.
func (t *table) check(s *ruleset.Service) error {
	if inet.Protocol(s.Key.Protocol) == 0 {
		return fmt.Errorf("%w: %q", errProtocol, s.Key.Protocol)
	}
	for _, target := range targets {
		n := len(s.Pool(target))
		switch {
		case s.Port.Affinity != 0 && n > maxStickyEndpoints:
			return fmt.Errorf("%d endpoints: %w", n, errTooManyEndpoints)
		case n > maxNumberedEndpoints && distributionOf(s, target) != (distribution{}):
			return fmt.Errorf("%d endpoints: %w", n, errTooManyNumbered)
		}
	}
	if !t.handlers.room(t.missingHandlers(s)) {
		return errTooManyHandlers
	}
	return nil
}

// Limits returns what the tables have room for in one Service, the same in both
// families. A Service that exceeds it is refused with a [*ruleset.PartialError].
func (b *Backend) Limits(tracker.Family) ruleset.Limits {
	return ruleset.Limits{AffinityEndpoints: maxStickyEndpoints, WeightedEndpoints: maxNumberedEndpoints}
}

// applyPool writes the buckets, and numbered endpoints, by which a pool changes.
func (t *table) applyPool(old, now *service, target ruleset.Target, w *writer) {
	was, is := old.pool(target), now.pool(target)
	if was != nil && was != is {
		was.set(old.endpoints(target), nil, distribution{}, nil, &t.change)
		t.writePool(was, "", w)
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
		if is.affinity != 0 {
			comment = string(ownerOf(now.rule.Key, target))
		}
		t.writePool(is, comment, w)
	}
	is.affinity = now.rule.Port.Affinity
}

func sameSlice(a, b []*tracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// writePool writes t.change, how the pool changed. The comment is that of endpoints of a
// sticky pool.
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
	if p.affinity == 0 {
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
	t.use(now.keys, +1)
	t.use(old.keys, -1)
}

// add adds an element with a comment to its set, and makes the set if it is one of allowed
// sources.
func (t *table) add(e *element, comment string, w *writer) {
	switch {
	case e.set == setClusterIPs:
		if changed := recount(t.clusterIPs, e.key.ip(), +1); !changed || t.deferClusterIPs {
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
	if e.set == setClusterIPs && !recount(t.clusterIPs, e.key.ip(), -1) {
		return
	}
	t.count[e.set]--
	w.remove(t.family, e)
}

// recount changes by how many an element is needed for an address, and reports whether the
// set gains or loses it. In one transaction a count may fall to 0 and rise again, because
// what is deleted comes before what is added. It cannot rise and fall again, since each
// Service changes once.
func recount(refs map[netip.Addr]int, a netip.Addr, by int) (changed bool) {
	before := refs[a]
	if now := before + by; now != 0 {
		refs[a] = now
		return before == 0
	}
	delete(refs, a)
	return true
}

// prefix creates the set for sources of a prefix length if needed, and the rule for it
// before the drop that ends chainFirewallCheck.
func (t *table) prefix(length int, w *writer) {
	if t.prefixes[length] {
		return
	}
	t.prefixes[length] = true
	w.newSet(t.family, allowed(length), t.size[allowed(length)])
	w.rule(t.family, chainFirewallCheck, length, 0, t.rules().allowedSource(length))
}

// rules returns what renders the table's rules.
func (t *table) rules() rules {
	return rules{family: t.family, mark: t.mark, seed: maglev.Seed32(t.node.HashSeed), offload: t.offload}
}

// skeleton writes everything that does not depend on the Services. The sets must have
// their sizes.
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

// hook has packets meet a table that they did not.
func (t *table) hook(w *writer) {
	t.unhooked = false
	for _, c := range t.rules().fixedChains() {
		if c.base != nil {
			w.chain(t.family, c.name, c.base, c.rules)
		}
	}
}

// overflows reports whether a set has more elements than it was made for.
func (t *table) overflows() bool {
	for s, n := range t.count {
		if t.size[s] != 0 && n > t.size[s] {
			return true
		}
	}
	return false
}

// sizeFor returns the size to make a set with for n elements: the kernel takes no more
// elements than that, and finds them faster for knowing it.
func sizeFor(n int) int {
	return max(1<<12, 1<<bits.Len(uint(2*n)))
}
