package model

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// Change replaces the Service of c and adds the difference to tx. After an error, the table and tx
// are unchanged. An error that does not wrap [ErrOverflow] is about this Service alone.
func (t *Table) Change(c *ruleset.Change, tx *Tx) error {
	p, err := t.plan(c, tx)
	if err == nil {
		t.done(p, tx)
	}
	return err
}

// planned is a change of a Service that is in a transaction, and that the table can still take back.
type planned struct {
	id       uint32
	fields   ruleset.Field // that may change
	after    *ruleset.Port
	old, now *service
	mark     Mark // where it begins in the transaction
}

// plan does the part of Change that undo takes back.
func (t *Table) plan(c *ruleset.Change, tx *Tx) (planned, error) {
	p := planned{id: c.ID(), fields: c.Fields, after: c.New, old: t.service(c.ID()), now: &service{}, mark: tx.Mark()}
	if p.old == nil {
		p.old = &service{}
	}
	if p.old.version != c.Old {
		p.fields = ruleset.FieldAll
	}
	t.undo.begin(t)
	if p.old.version == nil && c.New == nil {
		return p, nil
	}
	if c.New != nil && inet.Protocol(c.New.Key.Protocol) == 0 {
		return p, fmt.Errorf("%w: %q", ErrProtocol, c.New.Key.Protocol)
	}
	now, err := t.write(p.old, fitted(p.old.version), fitted(c.New), p.fields, tx)
	if err == nil && tx.Limit != 0 && tx.Size() > tx.Limit {
		if size := tx.sizeFrom(p.mark); size > tx.Limit {
			err = fmt.Errorf("service does not fit into one transaction: %w: %d bytes, at most %d", ErrTooLarge, size, tx.Limit)
		}
	}
	if err != nil {
		t.undo.run(t, tx, p.mark)
		return p, err
	}
	p.now = now
	return p, nil
}

// write adds the difference between two versions of a Service to tx and returns the Service as
// programmed.
func (t *Table) write(old *service, before, after *ruleset.Port, fields ruleset.Field, tx *Tx) (*service, error) {
	now := old
	onlyEndpoints := before != nil && after != nil && !old.lacksAffinity &&
		fields&(ruleset.FieldFrontends|ruleset.FieldAffinity|ruleset.FieldHash) == 0 && sameHandlers(old, before, after)
	if !onlyEndpoints {
		var err error
		if now, err = t.allocate(old, after, tx); err != nil {
			return nil, err
		}
	}
	for _, target := range targets {
		if err := t.writePool(old.pools[target], now.pools[target], before, after, target, tx); err != nil {
			return nil, err
		}
	}
	t.writeHairpin(before, after, tx)
	if !onlyEndpoints {
		t.writeFrontends(old, now, before, after, tx)
		t.noteLost(before, after, tx)
	}
	return now, nil
}

// sameHandlers reports whether two versions of a Service with the same frontends have the same
// handlers.
func sameHandlers(old *service, before, after *ruleset.Port) bool {
	for _, target := range targets {
		if p := old.pools[target]; p != nil && !p.sticky && handlerBuckets(before, target) != handlerBuckets(after, target) {
			return false
		}
	}
	return true
}

// done records that the change of a Service is complete.
func (t *Table) done(p planned, tx *Tx) {
	id, old, now, before, after := p.id, p.old, p.now, p.old.version, p.after
	if t.recall != nil && after != nil {
		t.recallClients(now, after, p.mark, tx)
	}
	for _, target := range targets {
		if p := old.pools[target]; p != nil && p != now.pools[target] {
			t.freeNumber(p)
		}
	}
	t.freeRanges(old, now)
	for int(id) >= len(t.services) {
		t.services = append(t.services, nil)
	}
	t.services[id] = now
	if after == nil {
		t.services[id] = nil
	}
	switch {
	case !now.lacksAffinity:
		if old.lacksAffinity {
			delete(t.lacking, id)
		}
	default:
		if t.lacking[id] == nil {
			t.newlyLacking.count++
			t.newlyLacking.key = after.Key
		}
		t.lacking[id] = after
	}
	now.version = after
	if p.fields&ruleset.FieldFrontends != 0 && (before != nil || after != nil) {
		t.noteLongNames(before, after)
	}
}

// fitted returns s with the endpoints for which there are numbers: s itself except for very many
// endpoints. It keeps the first ones, so that all nodes keep the same.
func fitted(s *ruleset.Port) *ruleset.Port {
	if s == nil || len(s.Selection.Cluster) <= maxNumberedEndpoints && len(s.Selection.Local) <= maxNumberedEndpoints {
		return s
	}
	pool := func(list []*tracker.Endpoint, target ruleset.Target) []*tracker.Endpoint {
		most := layout.MaxPool
		if s.Spec.Affinity != 0 {
			most = layout.MaxStickyEndpoints
		}
		if len(list) > maxNumberedEndpoints && distributionOf(s, target) != (distribution{}) {
			most = maxNumberedEndpoints
		}
		return list[:min(len(list), most)]
	}
	cluster, local := pool(s.Selection.Cluster, ruleset.TargetCluster), pool(s.Selection.Local, ruleset.TargetLocal)
	if len(cluster) == len(s.Selection.Cluster) && len(local) == len(s.Selection.Local) {
		return s
	}
	out := *s
	out.Selection.Cluster, out.Selection.Local = cluster, local
	return &out
}

// Limits returns the limits of one Service.
func Limits() ruleset.Limits {
	return ruleset.Limits{
		AffinityEndpoints: layout.MaxStickyEndpoints, WeightedEndpoints: maxNumberedEndpoints,
		PortRanges: ruleset.PortRangesShifted,
		RangeCost:  250, // the kernel takes 3 ms to remove one of 800 ranges
	}
}

// writePool adds the buckets and the numbered endpoints by which a Service's pool changes. was and
// is are the same pool unless its kind changes.
func (t *Table) writePool(was, is *pool, before, after *ruleset.Port, target ruleset.Target, tx *Tx) error {
	var list []*tracker.Endpoint
	if was != nil {
		list = before.Pool(target)
	}
	if was != nil && was != is {
		t.undo.save(was)
		was.set(list, nil, distribution{}, nil, &t.change)
		t.addPoolChange(was, "", tx)
		t.setStickyHandler(was, nil, tx)
		list = nil
	}
	if is == nil {
		return nil
	}
	wanted, how := after.Pool(target), distributionOf(after, target)
	if was != is || how != is.distribution || !sameSlice(list, wanted) {
		if was == is {
			t.undo.save(is)
		}
		hashed := func() *maglev.Table { return after.Maglev(target, t.Node.HashSeed) }
		is.set(list, wanted, how, hashed, &t.change)
		comment := ""
		if is.sticky && len(t.change.come) != 0 {
			comment = string(ownerOf(after.Key, target))
		}
		t.addPoolChange(is, comment, tx)
	}
	if is.sticky {
		h := t.stickyHandler(StickyHandlerOf(after, target), hasRange(after), tx)
		if h == nil {
			return ErrOverflow
		}
		t.setStickyHandler(is, h, tx)
	}
	return nil
}

// setStickyHandler adds the new handler of a sticky pool, nil for none.
func (t *Table) setStickyHandler(p *pool, h *stickyEntry, tx *Tx) {
	had := p.handler
	if had == h {
		return
	}
	t.undo.later(func() {
		t.stickyHandlers.move(h, had)
		p.handler = had
	})
	if had != nil {
		e := stickyPoolElement(p)
		t.remove(&e, tx)
	}
	t.stickyHandlers.move(had, h)
	if p.handler = h; h != nil {
		e := stickyPoolElement(p)
		t.add(&e, "", tx)
	}
}

func sameSlice(a, b []*tracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// addPoolChange adds t.change, the pool's change. comment is for the endpoints of a sticky pool.
func (t *Table) addPoolChange(p *pool, comment string, tx *Tx) {
	c := &t.change
	of := p.addresses()
	for _, bucket := range c.buckets {
		if bucket < c.before {
			e := emptyBucket(p, bucket)
			t.remove(&e, tx)
		}
		if bucket < p.size() {
			e := bucketElement(p, bucket, p.address(bucket, of))
			t.add(&e, "", tx)
		}
	}
	if !p.sticky {
		return
	}
	for _, n := range c.gone {
		e := memberElement(p, n, netip.AddrPort{})
		t.remove(&e, tx)
	}
	for _, m := range c.come {
		e := memberElement(p, m.number, m.addr)
		t.add(&e, comment, tx)
	}
}

// writeFrontends adds the elements by which the frontends differ.
func (t *Table) writeFrontends(old, now *service, before, after *ruleset.Port, tx *Tx) {
	t.before, t.after = t.before[:0], t.after[:0]
	if before != nil {
		t.before = frontendElements(t.before, before, old)
	}
	name := ""
	if after != nil {
		t.after = frontendElements(t.after, after, now)
	}
	diff(t.before, t.after, func(e *layout.Element) { t.remove(e, tx) }, func(e *layout.Element) {
		if !e.Named {
			t.add(e, "", tx)
			return
		}
		if name == "" {
			name = layout.ServiceComment(after.Key.ServicePortName)
		}
		t.add(e, name, tx)
	})
}

// noteLongNames updates t.longNames after the frontends of a Service changed.
func (t *Table) noteLongNames(before, after *ruleset.Port) {
	s := after
	if s == nil {
		s = before
	}
	if n := s.Key; len(n.Namespace)+len(n.Name)+len(n.Port)+len("/:") <= layout.MaxComment {
		return
	}
	set := func(s *ruleset.Port, set func(layout.Octets)) {
		for i := 0; s != nil && i < len(s.Frontends); i++ {
			if s.Frontends[i].IsRange() {
				continue // its packets are not counted
			}
			_, _, key := keyOf(s, &s.Frontends[i])
			set(key)
		}
	}
	set(before, func(key layout.Octets) {
		if t.longNames[key] == before.Key {
			delete(t.longNames, key)
		}
	})
	set(after, func(key layout.Octets) { t.longNames[key] = after.Key })
}

// noteLost adds the addresses and ports that a Service loses to tx.Lost. It leaves out ranges, whose
// packets are not counted, and NodePorts:
// the keys of their counters contain an address of the node, which the model does not have.
func (t *Table) noteLost(before, after *ruleset.Port, tx *Tx) {
	if before == nil {
		return
	}
	for i := range before.Frontends {
		f := &before.Frontends[i]
		if f.Kind == ruleset.KindNodePort || f.IsRange() || after != nil && slices.ContainsFunc(after.Frontends, func(g ruleset.Frontend) bool {
			return g.Addr == f.Addr && g.Port == f.Port && !g.IsRange() && g.Kind != ruleset.KindNodePort
		}) {
			continue
		}
		_, _, key := keyOf(before, f)
		tx.Lost = append(tx.Lost, Destination{t.Family, key})
	}
}

// recallClients adds the clients of a new Service that another data plane remembers, as many as
// have room in the transaction beside the Service, which begins at mark.
func (t *Table) recallClients(now *service, s *ruleset.Port, mark Mark, tx *Tx) {
	if s.Spec.Affinity == 0 {
		return
	}
	type client struct {
		addr netip.Addr
		left time.Duration
	}
	room := tx.Limit - tx.sizeFrom(mark)
	clients := map[netip.AddrPort][]client{}
	for _, target := range targets {
		p := now.pools[target]
		if p == nil || !p.sticky {
			continue
		}
		for i, ep := range p.buckets {
			list, known := clients[ep.Addr]
			if !known {
				for addr, age := range t.recall(s.Key, ep.Addr) {
					if left := s.Spec.Affinity - max(age, 0); addr.Is4() == (t.Family == tracker.IPv4) && left >= time.Millisecond {
						list = append(list, client{addr, left})
					}
				}
				clients[ep.Addr] = list
			}
			for _, c := range list {
				e := Edit{Family: t.Family, Timeout: s.Spec.Affinity, Left: c.left, Element: layout.Element{
					Set: layout.StickyClients, Key: word(p.number << layout.StickyShift).Addr(c.addr),
					Data: word(p.number<<layout.StickyShift | uint32(p.members[i])),
				}}
				if room -= e.bytes(); tx.Limit != 0 && room < MessageSize {
					return
				}
				tx.edit(&e)
			}
		}
	}
}
