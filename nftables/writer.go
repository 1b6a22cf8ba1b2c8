//go:build linux

package nftables

import (
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// writer writes one transaction: chains and rules as they come, and the elements
// of sets collected by set, those to delete before those to add. It keeps its
// memory from one transaction to the next.
type writer struct {
	table string
	mark  uint32
	batch nlbatch.Batch
	// elements is by family.
	elements [2]familyElements
	pool     poolChange
	// now is when the transaction was begun.
	now time.Time
	// structural is set when more than elements of large sets is written, and stays
	// set.
	structural bool
	// written counts the elements written so far, and pending those since begin;
	// touched is the lists that these are in.
	written, pending int
	touched          []*nlbatch.Elements
	err              error
}

type familyElements struct {
	add, remove [setCount]nlbatch.Elements
}

func newWriter(table string, mark uint32) *writer {
	w := &writer{table: table, mark: mark}
	w.begin()
	return w
}

// begin empties the writer and starts a transaction.
func (w *writer) begin() {
	w.batch.Reset()
	w.err = nil
	w.pending, w.touched = 0, w.touched[:0]
	w.now = time.Now()
	for i := range w.elements {
		e := &w.elements[i]
		for s := range e.add {
			e.add[s].Reset()
			e.remove[s].Reset()
		}
	}
}

// size returns how many bytes the transaction takes so far, or a few more.
func (w *writer) size() int {
	size := 0
	for _, e := range w.touched {
		size += e.Size() + messageSize
	}
	// A message has some 60 kB of elements at the most.
	return w.batch.Len() + size + size/(50<<10)*messageSize + 2*messageSize
}

// empty reports whether nothing was written.
func (w *writer) empty() bool { return w.pending == 0 && w.batch.Empty() }

// messageSize is about the most bytes that go around the elements in a message.
const messageSize = 160

// finish writes what was collected. Nothing may be added after it.
func (w *writer) finish(tables []*table) (*nlbatch.Batch, error) {
	w.batch.Grow(w.size() - w.batch.Len())
	for _, t := range tables {
		e := &w.elements[index(t.family)]
		for s := range set(len(e.remove)) {
			l := &e.remove[s]
			if l.Count() == 0 {
				continue
			}
			w.batch.Note("delete elements of " + s.name())
			w.batch.Elements(unix.NFT_MSG_DELSETELEM, 0, inet.AF(t.family), w.table, s.name(), l)
		}
	}
	for _, t := range tables {
		e := &w.elements[index(t.family)]
		for s := range set(len(e.add)) {
			l := &e.add[s]
			if l.Count() == 0 {
				continue
			}
			w.batch.Note("add elements to " + s.name())
			w.batch.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|unix.NLM_F_EXCL, inet.AF(t.family), w.table, s.name(), l)
		}
	}
	return &w.batch, w.err
}

// expect makes room for n elements of a set.
func (w *writer) expect(t *table, s set, n int) {
	size := t.elementSize[s]
	if s == setServiceIPs {
		size += nlbatch.CommentSize(24)
	}
	w.elements[index(t.family)].add[s].Grow(n * size)
}

// index is the place of a family in an array.
func index(f tracker.Family) int {
	if f == tracker.IPv6 {
		return 1
	}
	return 0
}

func (w *writer) rules(t *table) rules {
	return rules{family: t.family, mark: w.mark, seed: maglev.Seed32(t.node.HashSeed)}
}

func (w *writer) adds(t *table, s set) *nlbatch.Elements {
	t.count[s]++
	return w.touch(&w.elements[index(t.family)].add[s])
}

func (w *writer) removes(t *table, s set) *nlbatch.Elements {
	t.count[s]--
	return w.touch(&w.elements[index(t.family)].remove[s])
}

func (w *writer) touch(e *nlbatch.Elements) *nlbatch.Elements {
	if e.Count() == 0 {
		w.touched = append(w.touched, e)
	}
	w.written++
	w.pending++
	return e
}

// count changes by how many an element of a counted set is needed: the set has it
// as long as that is not none. In one transaction a count may fall to none and
// rise again, and what is deleted comes before what is added; it cannot rise and
// fall again, since each Service changes once.
func (w *writer) count(t *table, s set, counts map[netip.Addr]int, a netip.Addr, by int) {
	before := counts[a]
	now := before + by
	if now == 0 {
		delete(counts, a)
	} else {
		counts[a] = now
	}
	if before != 0 && now != 0 {
		return
	}
	if s == setClusterIPs && t.later != nil {
		*t.later = append(*t.later, a)
		return
	}
	if now != 0 {
		w.addCounted(t, s, a)
		return
	}
	key, n := countedKey(s, a)
	w.removes(t, s).Add(key[:n], nil, "")
}

// addCounted adds an element to a counted set.
func (w *writer) addCounted(t *table, s set, a netip.Addr) {
	key, n := countedKey(s, a)
	w.adds(t, s).Add(key[:n], nil, "")
}

func countedKey(s set, a netip.Addr) (key buffer, n int) {
	n = key.addr(0, a)
	if s == setHairpin {
		n = key.addr(n, a)
	}
	return key, n
}

// bucketKey is the key of a bucket in endpoints or sticky-buckets.
func bucketKey(p *pool, bucket int) (key buffer, n int) {
	number := p.number
	if p.affinity != 0 {
		number <<= stickyShift
	}
	n = key.word(0, number)
	return key, key.word(n, uint32(bucket))
}

// addBucket adds the bucket, which is of the endpoint at ep.
func (w *writer) addBucket(t *table, p *pool, bucket int, ep netip.AddrPort) {
	key, n := bucketKey(p, bucket)
	var data buffer
	if p.affinity != 0 {
		m := data.word(0, p.number<<stickyShift|uint32(p.member(bucket)))
		w.adds(t, setStickyBuckets).Add(key[:n], data[:m], "")
		return
	}
	m := data.port(data.addr(0, ep.Addr()), ep.Port())
	w.adds(t, setEndpoints).Add(key[:n], data[:m], "")
}

func (w *writer) deleteBucket(t *table, p *pool, bucket int) {
	key, n := bucketKey(p, bucket)
	s := setEndpoints
	if p.affinity != 0 {
		s = setStickyBuckets
	}
	w.removes(t, s).Add(key[:n], nil, "")
}

func (w *writer) addMember(t *table, p *pool, m memberChange, comment string) {
	var key, data buffer
	n := key.word(0, p.number<<stickyShift|uint32(m.number))
	l := data.port(data.addr(0, m.addr.Addr()), m.addr.Port())
	w.adds(t, setStickyEndpoints).Add(key[:n], data[:l], comment)
}

func (w *writer) deleteMember(t *table, p *pool, number uint16) {
	var key buffer
	n := key.word(0, p.number<<stickyShift|uint32(number))
	w.removes(t, setStickyEndpoints).Add(key[:n], nil, "")
}

// frontendSets returns the maps that hold the frontend's dispatch keys and its key in
// them.
func frontendSets(s *ruleset.Service, f *ruleset.Frontend) (all, internal set, key buffer, n int) {
	all, internal = setNodePorts, setInternalNodePorts
	if f.Kind != ruleset.NodePort {
		all, internal = setServiceIPs, setInternalIPs
		n = key.addr(0, f.Addr)
	}
	n = key.port(key.proto(n, inet.Protocol(s.Key.Protocol)), f.Port)
	return all, internal, key, n
}

func (w *writer) addDispatchKey(t *table, s set, key []byte, dispatchKey uint32, comment string) {
	var data buffer
	n := data.word(0, dispatchKey)
	w.adds(t, s).Add(key, data[:n], comment)
}

func (w *writer) addFrontend(t *table, s *ruleset.Service, f *ruleset.Frontend, k dispatchKeys) {
	w.replaceDispatchKeys(t, s, f, dispatchKeys{}, k)
	w.addSources(t, s, f)
	if f.Kind == ruleset.ClusterIP {
		w.count(t, setClusterIPs, t.clusterIPs, f.Addr, +1)
	}
}

func (w *writer) deleteFrontend(t *table, s *ruleset.Service, f *ruleset.Frontend, k dispatchKeys) {
	w.replaceDispatchKeys(t, s, f, k, dispatchKeys{})
	w.deleteSources(t, s, f)
	if f.Kind == ruleset.ClusterIP {
		w.count(t, setClusterIPs, t.clusterIPs, f.Addr, -1)
	}
}

// replaceDispatchKeys changes what the frontend's elements hold; a dispatch key of 0 is no
// element.
func (w *writer) replaceDispatchKeys(t *table, s *ruleset.Service, f *ruleset.Frontend, had, has dispatchKeys) {
	all, internal, key, n := frontendSets(s, f)
	if had.any != has.any {
		if had.any != 0 {
			w.removes(t, all).Add(key[:n], nil, "")
		}
		if has.any != 0 {
			w.addDispatchKey(t, all, key[:n], has.any, s.Key.ServicePortName.String())
		}
	}
	if had.internal != has.internal {
		if had.internal != 0 {
			w.removes(t, internal).Add(key[:n], nil, "")
		}
		if has.internal != 0 {
			w.addDispatchKey(t, internal, key[:n], has.internal, s.Key.ServicePortName.String())
		}
	}
}

// sourceKey is the key of one source range of the frontend in its set.
func sourceKey(s *ruleset.Service, f *ruleset.Frontend, source netip.Prefix) (key buffer, n int) {
	n = key.addr(0, source.Masked().Addr())
	n = key.addr(n, f.Addr)
	return key, key.port(key.proto(n, inet.Protocol(s.Key.Protocol)), f.Port)
}

func (w *writer) addSources(t *table, s *ruleset.Service, f *ruleset.Frontend) {
	for _, source := range f.Sources {
		t.prefix(source.Bits(), w)
		key, n := sourceKey(s, f, source)
		w.adds(t, allowed(source.Bits())).Add(key[:n], nil, s.Key.ServicePortName.String())
	}
}

func (w *writer) deleteSources(t *table, s *ruleset.Service, f *ruleset.Frontend) {
	for _, source := range f.Sources {
		key, n := sourceKey(s, f, source)
		w.removes(t, allowed(source.Bits())).Add(key[:n], nil, "")
	}
}

// addClients adds what clients are remembered by.
func (w *writer) addClients(t *table, clients *nlbatch.Elements) {
	w.batch.Note("add elements to " + setStickyClients.name())
	w.batch.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, inet.AF(t.family), w.table, setStickyClients.name(), clients)
}

// addHandler maps a handler to its chain.
func (w *writer) addHandler(t *table, s set, number uint32, c handler) {
	var key buffer
	n := key.word(0, dispatchKey(number, 0))
	w.adds(t, s).AddVerdict(key[:n], c.chain())
}

// newTable makes the family's table, if there is none.
func (w *writer) newTable(t *table) { w.makeTable(t, unix.NLM_F_CREATE) }

// newTableOnly makes the family's table, and fails if there is one.
func (w *writer) newTableOnly(t *table) { w.makeTable(t, unix.NLM_F_CREATE|unix.NLM_F_EXCL) }

func (w *writer) makeTable(t *table, flags uint16) {
	w.batch.Note("create table " + w.table)
	w.batch.Begin(unix.NFT_MSG_NEWTABLE, flags, inet.AF(t.family))
	w.batch.String(unix.NFTA_TABLE_NAME, w.table)
	w.batch.End()
}

func (w *writer) deleteTable(f tracker.Family) { deleteTable(&w.batch, f, w.table) }

// newSet makes a set. Its ID is only unique in the transaction, for the kernel's
// own bookkeeping; rules name sets by name.
func (w *writer) newSet(t *table, s set) {
	w.structural = true
	w.batch.Note("create set " + s.name())
	sp := s.spec(t.family)
	w.batch.Begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, inet.AF(t.family))
	w.batch.String(unix.NFTA_SET_TABLE, w.table)
	w.batch.String(unix.NFTA_SET_NAME, s.name())
	w.batch.Uint32(unix.NFTA_SET_ID, uint32(s)+1)
	w.batch.Uint32(unix.NFTA_SET_FLAGS, sp.flags)
	w.batch.Uint32(unix.NFTA_SET_KEY_TYPE, sp.keyType)
	w.batch.Uint32(unix.NFTA_SET_KEY_LEN, sp.keyLen)
	if sp.flags&unix.NFT_SET_MAP != 0 {
		w.batch.Uint32(unix.NFTA_SET_DATA_TYPE, sp.dataType)
		w.batch.Uint32(unix.NFTA_SET_DATA_LEN, sp.dataLen)
	}
	if orders := sp.byteOrders(); orders != nil {
		w.batch.Bytes(unix.NFTA_SET_USERDATA, orders)
	}
	if size := t.size[s]; size != 0 {
		w.batch.Nest(unix.NFTA_SET_DESC)
		w.batch.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(size))
		w.batch.Unnest()
	}
	w.batch.End()
}

func (w *writer) deleteSet(f tracker.Family, name string) {
	w.batch.Note("delete set " + name)
	w.batch.Begin(unix.NFT_MSG_DELSET, 0, inet.AF(f))
	w.batch.String(unix.NFTA_SET_TABLE, w.table)
	w.batch.String(unix.NFTA_SET_NAME, name)
	w.batch.End()
}

// baseChain says where a chain is hooked in.
type baseChain struct {
	typ      string
	hook     uint32
	priority int32
}

// chain makes a chain with rules.
func (w *writer) chain(t *table, name string, rules []rule) { w.hookedChain(t, name, nil, rules) }

func (w *writer) hookedChain(t *table, name string, base *baseChain, rules []rule) {
	w.structural = true
	w.batch.Note("create chain " + name)
	w.batch.Begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, inet.AF(t.family))
	w.batch.String(unix.NFTA_CHAIN_TABLE, w.table)
	w.batch.String(unix.NFTA_CHAIN_NAME, name)
	if base != nil {
		w.batch.Nest(unix.NFTA_CHAIN_HOOK)
		w.batch.Uint32(unix.NFTA_HOOK_HOOKNUM, base.hook)
		w.batch.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(base.priority))
		w.batch.Unnest()
		w.batch.String(unix.NFTA_CHAIN_TYPE, base.typ)
	}
	w.batch.End()
	for i, r := range rules {
		w.rule(t, name, i, unix.NLM_F_CREATE|unix.NLM_F_APPEND, r)
	}
}

func (w *writer) deleteChain(f tracker.Family, name string) {
	w.batch.Note("delete chain " + name)
	w.batch.Begin(unix.NFT_MSG_DELCHAIN, 0, inet.AF(f))
	w.batch.String(unix.NFTA_CHAIN_TABLE, w.table)
	w.batch.String(unix.NFTA_CHAIN_NAME, name)
	w.batch.End()
}

// firewallRule puts the rule for sources of a prefix length before the drop that
// ends chainFirewallCheck.
func (w *writer) firewallRule(t *table, length int) {
	w.rule(t, chainFirewallCheck, length, unix.NLM_F_CREATE, w.rules(t).allowedSource(length))
}

func (w *writer) rule(t *table, chain string, number int, flags uint16, r rule) {
	w.batch.Note("add rule " + strconv.Itoa(number+1) + " of chain " + chain)
	w.batch.Begin(unix.NFT_MSG_NEWRULE, flags, inet.AF(t.family))
	w.batch.String(unix.NFTA_RULE_TABLE, w.table)
	w.batch.String(unix.NFTA_RULE_CHAIN, chain)
	w.batch.Nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, p := range r {
		data, err := p(inet.AF(t.family))
		if err != nil && w.err == nil {
			w.err = err
		}
		w.batch.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, data)
	}
	w.batch.Unnest()
	w.batch.End()
}

// deleteRules deletes the rules of all of the table's chains.
func (w *writer) deleteRules(f tracker.Family) {
	w.batch.Note("delete rules")
	w.batch.Begin(unix.NFT_MSG_DELRULE, 0, inet.AF(f))
	w.batch.String(unix.NFTA_RULE_TABLE, w.table)
	w.batch.End()
}
