//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// table is one family's table as it is in the kernel, or will be once the
// transaction that is being written is committed. It is the only memory of what
// was programmed: nothing is read back to apply a change.
type table struct {
	family tracker.Family
	node   *ruleset.Node
	// services is by the Service's ID.
	services []*service
	plain    numbers
	sticky   numbers
	// handlers is those that have a chain; near is those of them that internal traffic
	// can be sent to.
	handlers handlers
	internal map[handler]bool
	// chains is the chains made for handlers, with the number of their rules.
	chains map[string]int
	// unused is chains of an earlier table that could not be deleted.
	unused map[string]bool
	// prefixes is the lengths of source prefixes that have a set.
	prefixes map[int]bool
	// clusterIPs and hairpin count who needs an element.
	clusterIPs, hairpin map[netip.Addr]int
	// count and size are the number of elements of each set and its bound.
	count, size [setCount]int
	// grace is what hairpin still counts though it is not needed, oldest first.
	grace []graceEntry
	// ranges is what the interval sets hold.
	ranges map[set][]addrRange
	// kept is the sets that are an earlier table's.
	kept map[set]bool
	// unhooked means that no packet meets the table yet.
	unhooked bool
	// later, if not nil, collects cluster IPs in place of the set of them.
	later *[]netip.Addr
	// elementSize is how many bytes an element of each set takes without its
	// comment; handlerSize is what handlerBytes knows.
	elementSize [setCount]int
	handlerSize map[handler]int
	// adopted is the sticky pools of an earlier table that none took over yet.
	adopted map[stickyOwner]*adoptedPool
}

// service is one Service as programmed.
type service struct {
	rule           *ruleset.Service
	cluster, local *pool
	// dispatch keys is, for each of rule.Frontends, what its elements hold.
	dispatchKeys []dispatchKeys
}

// dispatch keys is the dispatch keys of one frontend: of any connection, and under
// externalTrafficPolicy Local of one from near, else 0.
type dispatchKeys struct{ any, internal uint32 }

// Errors about one Service.
var (
	errTooManyPools     = errors.New("too many Services with endpoints (at most 1048575 pools a family)")
	errTooManySticky    = errors.New("too many Services with client affinity (at most 32767 pools a family)")
	errTooManyEndpoints = fmt.Errorf("too many endpoints for client affinity (at most %d)", maxStickyEndpoints)
	errTooManyNumbered  = fmt.Errorf("too many endpoints for weights or a hash (at most %d)", maxNumberedEndpoints)
	errTooManyHandlers  = fmt.Errorf("too many different combinations of endpoint counts and affinity timeouts (at most %d a family)", maxStickyHandlers)
	errProtocol         = errors.New("protocol is not TCP, UDP or SCTP")
)

func newTable(f tracker.Family, n *ruleset.Node) *table {
	t := &table{
		family:      f,
		node:        n,
		plain:       numbers{max: maxPool},
		sticky:      numbers{max: maxSticky},
		handlers:    newHandlers(),
		internal:    map[handler]bool{},
		chains:      map[string]int{},
		prefixes:    map[int]bool{},
		clusterIPs:  map[netip.Addr]int{},
		hairpin:     map[netip.Addr]int{},
		ranges:      map[set][]addrRange{},
		kept:        map[set]bool{},
		handlerSize: map[handler]int{},
	}
	for s := range setCount {
		sp := s.spec(f)
		data := int(sp.dataLen)
		if sp.dataType == unix.NFT_DATA_VERDICT {
			data = verdictSize
		}
		t.elementSize[s] = nlbatch.ElementSize(int(sp.keyLen), data)
	}
	return t
}

// verdictSize is about the most bytes that a verdict and the name of its chain
// take.
const verdictSize = 96

// service returns what is programmed for the ID, or nil.
func (t *table) service(id uint32) *service {
	if int(id) < len(t.services) {
		return t.services[id]
	}
	return nil
}

// apply changes the table from what it has for the Service to s, which is nil
// for a Service that is gone, and writes the difference to w. What check says no to
// must not be applied. On an error nothing was changed.
func (t *table) apply(id uint32, s *ruleset.Service, w *writer) error {
	old := t.service(id)
	if old == nil && s == nil {
		return nil
	}
	now := &service{rule: s}
	if s != nil {
		if err := t.prepare(old, now); err != nil {
			return err
		}
	}
	if old == nil {
		old = &service{}
	}
	t.replacePool(old, now, ruleset.ToCluster, w)
	t.replacePool(old, now, ruleset.ToLocal, w)
	t.replaceHairpin(old, now, w)
	t.replaceFrontends(old, now, w)
	if s == nil {
		t.services[id] = nil
		return nil
	}
	for int(id) >= len(t.services) {
		t.services = append(t.services, nil)
	}
	t.services[id] = now
	return nil
}

// check returns the error of a Service that cannot be programmed whatever
// transaction there is for it, but for a lack of pools, which apply finds.
func (t *table) check(s *ruleset.Service) error {
	if inet.Protocol(s.Key.Protocol) == 0 {
		return fmt.Errorf("%w: %q", errProtocol, s.Key.Protocol)
	}
	if n := max(len(s.Selection.Cluster), len(s.Selection.Local)); s.Port.Affinity != 0 && n > maxStickyEndpoints {
		return fmt.Errorf("%d endpoints: %w", n, errTooManyEndpoints)
	}
	for _, target := range []ruleset.Target{ruleset.ToCluster, ruleset.ToLocal} {
		if n := len(s.Pool(target)); n > maxNumberedEndpoints && distributionOf(s, target) != (distribution{}) {
			return fmt.Errorf("%d endpoints: %w", n, errTooManyNumbered)
		}
	}
	if missing := t.missingHandlers(s); !t.handlers.room(missing) {
		return errTooManyHandlers
	}
	return nil
}

// prepare gives now the pools it needs, taking over old's where they are of the
// right kind.
func (t *table) prepare(old, now *service) error {
	s := now.rule
	var taken []*pool
	for _, target := range []ruleset.Target{ruleset.ToCluster, ruleset.ToLocal} {
		if !uses(s, target) {
			continue
		}
		if p := old.pool(target); p != nil && (p.affinity != 0) == (s.Port.Affinity != 0) {
			*now.poolField(target) = p
			continue
		}
		p, err := t.newPool(s, target)
		if err != nil {
			t.release(taken)
			return err
		}
		taken = append(taken, p)
		*now.poolField(target) = p
	}
	return nil
}

// missingHandlers returns the handlers that the Service needs and that have no
// number yet.
func (t *table) missingHandlers(s *ruleset.Service) (missing []handler) {
	need := func(c handler) {
		if _, ok := t.handlers.number[c]; !ok && !slices.Contains(missing, c) {
			missing = append(missing, c)
		}
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		need(handlerOf(s, f))
		if c, ok := internalHandlerOf(s, f); ok {
			need(c)
		}
	}
	return missing
}

func (t *table) newPool(s *ruleset.Service, target ruleset.Target) (*pool, error) {
	if s.Port.Affinity == 0 {
		n, ok := t.plain.take()
		if !ok {
			return nil, errTooManyPools
		}
		return &pool{number: n}, nil
	}
	p := &pool{affinity: s.Port.Affinity}
	owner := ownerOf(s.Key, target)
	if a := t.adopted[owner]; a != nil {
		delete(t.adopted, owner)
		p.number, p.adopted = a.number, a.members
		return p, nil
	}
	n, ok := t.sticky.take()
	if !ok {
		return nil, errTooManySticky
	}
	p.number = stickyMark | n
	return p, nil
}

// release gives back pools that were never programmed.
func (t *table) release(pools []*pool) {
	for _, p := range pools {
		t.freeNumber(p)
	}
}

func (t *table) freeNumber(p *pool) {
	if p.affinity != 0 {
		t.sticky.give(p.number &^ stickyMark)
	} else {
		t.plain.give(p.number)
	}
}

// uses reports whether some traffic of the Service goes to the target.
func uses(s *ruleset.Service, target ruleset.Target) bool {
	return slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool {
		return f.Target == target || f.Near == target
	})
}

func (s *service) pool(target ruleset.Target) *pool {
	if s == nil {
		return nil
	}
	if p := s.poolField(target); p != nil {
		return *p
	}
	return nil
}

func (s *service) poolField(target ruleset.Target) **pool {
	switch target {
	case ruleset.ToCluster:
		return &s.cluster
	case ruleset.ToLocal:
		return &s.local
	}
	return nil
}

// endpoints returns what the pool for the target was given.
func (s *service) endpoints(target ruleset.Target) []*tracker.Endpoint {
	if s.rule == nil {
		return nil
	}
	return s.rule.Pool(target)
}

func (t *table) replacePool(old, now *service, target ruleset.Target, w *writer) {
	was, is := old.pool(target), now.pool(target)
	if was != nil && was != is {
		was.set(old.endpoints(target), nil, distribution{}, nil, &w.pool)
		t.writePool(was, "", w)
		t.freeNumber(was)
	}
	if is == nil {
		return
	}
	var before []*tracker.Endpoint
	how := distributionOf(now.rule, target)
	if was == is {
		before = old.endpoints(target)
		if how == is.distribution && sameSlice(before, now.endpoints(target)) {
			is.affinity = now.rule.Port.Affinity
			return
		}
	}
	hashed := func() *maglev.Table { return now.rule.Maglev(target, t.node.HashSeed) }
	is.set(before, now.endpoints(target), how, hashed, &w.pool)
	is.affinity = now.rule.Port.Affinity
	comment := ""
	if is.affinity != 0 {
		comment = string(ownerOf(now.rule.Key, target))
	}
	t.writePool(is, comment, w)
}

func sameSlice(a, b []*tracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// writePool writes what w.pool says changed.
func (t *table) writePool(p *pool, comment string, w *writer) {
	c := &w.pool
	addr := p.addresses()
	for _, bucket := range c.buckets {
		if bucket < c.before {
			w.deleteBucket(t, p, bucket)
		}
		if bucket < p.size() {
			w.addBucket(t, p, bucket, addr(bucket))
		}
	}
	if p.affinity == 0 {
		return
	}
	for _, n := range c.gone {
		w.deleteMember(t, p, n)
	}
	for _, m := range c.come {
		w.addMember(t, p, m, comment)
	}
}

// mayBeHere reports whether connections from the endpoint may pass this node
// before they are translated: a pod reaches its Services through its own node.
func (t *table) mayBeHere(ep *tracker.Endpoint) bool {
	return ep.Node == "" || ep.Node == t.node.Info.Name
}

func (t *table) replaceHairpin(old, now *service, w *writer) {
	var before, after []*tracker.Endpoint
	if old.rule != nil {
		before = old.rule.Selection.Reachable
	}
	if now.rule != nil {
		after = now.rule.Selection.Reachable
	}
	if sameSlice(before, after) {
		return
	}
	before, after = differing(before, after)
	for _, ep := range after {
		if t.mayBeHere(ep) {
			w.count(t, setHairpin, t.hairpin, ep.Addr.Addr(), +1)
		}
	}
	for _, ep := range before {
		if t.mayBeHere(ep) {
			t.grace = append(t.grace, graceEntry{ep.Addr.Addr(), w.now})
		}
	}
}

// graceEntry is the address of an endpoint that is gone, and since when. A
// connection on its way to it may yet have to be masqueraded: the decision falls
// later than the choice of the endpoint.
type graceEntry struct {
	addr  netip.Addr
	since time.Time
}

// addGrace has an endpoint of the table before linger.
func (t *table) addGrace(l graceEntry, w *writer) {
	w.count(t, setHairpin, t.hairpin, l.addr, +1)
	t.grace = append(t.grace, l)
}

// inGrace returns the endpoints that hairpin counts only because they linger, and
// since when, but for those that linger only since the given time.
func (t *table) inGrace(from time.Time) map[netip.Addr]time.Time {
	graceEntries := map[netip.Addr]int{}
	last := map[netip.Addr]time.Time{}
	for _, l := range t.grace {
		graceEntries[l.addr]++
		if l.since.After(last[l.addr]) {
			last[l.addr] = l.since
		}
	}
	maps.DeleteFunc(last, func(a netip.Addr, since time.Time) bool {
		return graceEntries[a] != t.hairpin[a] || !since.Before(from)
	})
	return last
}

// expireGrace stops counting the endpoint that has lingered longest, and reports
// whether there was one that has for at least the given time.
func (t *table) expireGrace(after time.Duration, w *writer) bool {
	if len(t.grace) == 0 {
		t.grace = nil
		return false
	}
	oldest := t.grace[0]
	if w.now.Sub(oldest.since) < after {
		return false
	}
	w.count(t, setHairpin, t.hairpin, oldest.addr, -1)
	t.grace = t.grace[1:]
	return true
}

func (t *table) replaceFrontends(old, now *service, w *writer) {
	var before, after []ruleset.Frontend
	if old.rule != nil {
		before = old.rule.Frontends
	}
	if now.rule != nil {
		after = now.rule.Frontends
		now.dispatchKeys = make([]dispatchKeys, len(after))
	}
	for i := range after {
		f := &after[i]
		now.dispatchKeys[i] = t.dispatchKeys(f, now, w)
		j := indexOf(before, f, i)
		if j < 0 {
			w.addFrontend(t, now.rule, f, now.dispatchKeys[i])
			continue
		}
		if old.dispatchKeys[j] != now.dispatchKeys[i] {
			w.replaceDispatchKeys(t, now.rule, f, old.dispatchKeys[j], now.dispatchKeys[i])
		}
		if !slices.Equal(before[j].Sources, f.Sources) {
			w.deleteSources(t, now.rule, &before[j])
			w.addSources(t, now.rule, f)
		}
	}
	for j := range before {
		if indexOf(after, &before[j], j) < 0 {
			w.deleteFrontend(t, old.rule, &before[j], old.dispatchKeys[j])
		}
	}
	t.use(now.dispatchKeys, +1)
	t.use(old.dispatchKeys, -1)
}

// indexOf finds the frontend with f's kind, address and port, which is most
// often at the place that hint names, or returns -1.
func indexOf(list []ruleset.Frontend, f *ruleset.Frontend, hint int) int {
	same := func(o *ruleset.Frontend) bool {
		return o.Kind == f.Kind && o.Addr == f.Addr && o.Port == f.Port
	}
	if hint < len(list) && same(&list[hint]) {
		return hint
	}
	for i := range list {
		if same(&list[i]) {
			return i
		}
	}
	return -1
}

// dispatch keys returns the frontend's dispatch keys and makes sure that their handlers
// exist.
func (t *table) dispatchKeys(f *ruleset.Frontend, s *service, w *writer) dispatchKeys {
	out := dispatchKeys{any: dispatchKey(t.handler(handlerOf(s.rule, f), w), number(s.pool(f.Target)))}
	if c, ok := internalHandlerOf(s.rule, f); ok {
		out.internal = dispatchKey(t.internalHandler(c, w), number(s.cluster))
	}
	return out
}

// use counts a Service's dispatch keys in or out.
func (t *table) use(list []dispatchKeys, by int) {
	for _, k := range list {
		t.handlers.use(k.any, by)
		t.handlers.use(k.internal, by)
	}
}

func number(p *pool) uint32 {
	if p == nil {
		return 0
	}
	return p.number
}

// handler returns the handler's number, after making its chain if there is none.
func (t *table) handler(c handler, w *writer) uint32 {
	n, ok := t.handlers.number[c]
	if !ok {
		n = t.handlers.add(c)
		t.makeChain(c, w)
		w.addHandler(t, setHandlers, n, c)
	}
	return n
}

func (t *table) internalHandler(c handler, w *writer) uint32 {
	n := t.handler(c, w)
	if !t.internal[c] {
		t.internal[c] = true
		w.addHandler(t, setInternalHandlers, n, c)
	}
	return n
}

// makeChain makes the handler's chain and those it goes to.
func (t *table) makeChain(c handler, w *writer) {
	name := c.chain()
	if _, ok := t.chains[name]; ok {
		return
	}
	rules := c.chainRules(w.rules(t), t.node.LocalTraffic)
	t.chains[name] = len(rules)
	if c.firewall {
		t.makeChain(c.unguarded(), w)
	}
	if c.buckets != 0 && c != c.direct() {
		t.makeChain(c.direct(), w)
	}
	w.chain(t, name, rules)
}

// prefix makes the set for sources of the prefix length, if there is none.
func (t *table) prefix(length int, w *writer) {
	if t.prefixes[length] {
		return
	}
	t.prefixes[length] = true
	w.newSet(t, allowed(length))
	w.firewallRule(t, length)
}

// overflows reports whether some set was given more elements than it was made
// for.
func (t *table) overflows() bool {
	for s, n := range t.count {
		if t.size[s] != 0 && n > t.size[s] {
			return true
		}
	}
	return false
}

// sizeFor returns the size to make a set with for n elements: the kernel takes
// no more than the size, and finds elements faster for knowing it.
func sizeFor(n int) int {
	return max(1<<12, 1<<bits.Len(uint(2*n)))
}
