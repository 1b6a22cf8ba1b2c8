//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// work is bringing one family into agreement with a delta.
type work struct {
	b *Backend
	s *state
	// failed says why, for each Service port that failed.
	failed map[tracker.Key]error
	items  []*item
	now    time.Time
}

// item is one Service port to be worked on.
type item struct {
	key     tracker.Key
	service *ruleset.Service // nil if it is gone
	state   *serviceState
	plan    plan
	// refused says which parts of it the kernel does not take. The others are in place.
	refused []error
}

func newWork(b *Backend, s *state, failed map[tracker.Key]error) *work {
	return &work{b: b, s: s, failed: failed, now: time.Now()}
}

// apply does all of a delta's changes that are of the family.
func (w *work) apply(ctx context.Context, d *ruleset.Delta) error {
	if d.Node != w.s.node {
		if err := w.b.writeRules(ctx, w.s, d.Node, false); err != nil {
			return err
		}
	}
	if err := w.b.followAddresses(); err != nil {
		return err
	}
	if old := d.OldNode; old != nil && old != d.Node {
		was, is := old.NodePorts(w.s.family), d.Node.NodePorts(w.s.family)
		w.s.stale = w.s.stale || was.All != is.All || !slices.Equal(was.Prefixes, is.Prefixes)
	}
	// Without a Watch, those that only wait for time to pass go now.
	if err := w.b.drain(w.s, w.now, true); err != nil {
		return err
	}
	for i := range d.Changes {
		if c := &d.Changes[i]; c.Key.Family == w.s.family {
			w.add(c.Key, c.New)
		}
	}
	if w.s.stale && !d.Full {
		w.addExternal()
	}
	return w.run(ctx, d.Full)
}

// add has a Service port worked on, once.
func (w *work) add(k tracker.Key, svc *ruleset.Service) {
	st := w.s.services[k]
	if st == nil {
		if svc == nil {
			return
		}
		st = &serviceState{}
		w.s.services[k] = st
	}
	st.service = svc
	w.items = append(w.items, &item{key: k, service: svc, state: st})
}

// addExternal has all Service ports worked on, beside those that are, that depend
// on the node's addresses.
func (w *work) addExternal() {
	already := make(map[tracker.Key]bool, len(w.items))
	for _, it := range w.items {
		already[it.key] = true
	}
	for k, st := range w.s.services {
		if !already[k] && st.service != nil && st.service.Port.ExternallyAccessible() {
			w.add(k, st.service)
		}
	}
}

// run works on the items. Each step is done for all of them before the next. An
// item that fails is left as it is, with all that it had before.
func (w *work) run(ctx context.Context, full bool) error {
	w.makePlans(full)
	steps := []func() error{
		w.addEntries,
		func() error { return w.each(ctx, w.upsertVirtuals) },
		w.addNear,
		func() error { return w.each(ctx, w.bind) },
		func() error { return w.settle(ctx) },
		func() error { return w.dropEntries(true) },
		w.releaseTaken,
		func() error { return w.each(ctx, w.giveUp) },
		func() error { return w.each(ctx, w.dropVirtuals) },
	}
	if full {
		steps = append(steps, w.prune)
	}
	steps = append(steps, w.unbind, func() error { return w.dropEntries(false) })
	for _, step := range steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
	}
	w.finish()
	return nil
}

// each does a step for each item that has not failed.
func (w *work) each(ctx context.Context, step func(*item) error) error {
	for i, it := range w.items {
		if w.failed[it.key] != nil {
			continue
		}
		if i%256 == 255 {
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		if err := step(it); errors.Is(err, ruleset.ErrNeedFull) {
			return err
		} else if err != nil {
			w.failed[it.key] = err
		}
	}
	return nil
}

// makePlans says what each item is to have.
func (w *work) makePlans(full bool) {
	l := w.local()
	plan := func(it *item) {
		if it.service == nil {
			return
		}
		if inet.Protocol(it.key.Protocol) == 0 {
			w.failed[it.key] = fmt.Errorf("no protocol of IPVS: %q", it.key.Protocol)
		} else {
			it.plan = w.b.config.makePlan(it.service, l, it.state.mark)
		}
	}
	for _, it := range w.items {
		plan(it)
		if full && len(it.plan.near) != 0 {
			// The mark that an earlier process gave out.
			m := w.s.entries[it.plan.near[0]].mark
			if _, used := w.s.marks[m]; w.b.config.Marks.contains(m) && !used {
				w.s.marks[m], it.state.mark = it.key, m
			}
		}
	}
	for _, it := range w.items {
		switch {
		case len(it.plan.near) == 0 || w.failed[it.key] != nil:
			continue
		case w.b.config.nearDrops(it.service):
			it.plan.mark = w.b.config.Marks.Value
			continue
		}
		m := w.s.allocate(w.b.config.Marks, it.key, it.state.mark)
		if m == 0 {
			// Near is then treated as far.
			w.b.config.Log.Warn("ipvs: no packet mark left", "service", it.key.String())
			it.plan.near = nil
			continue
		}
		it.state.mark = m
		plan(it)
	}
}

// local returns what plans depend on of the node.
func (w *work) local() local {
	l := local{node: w.s.node.Info.Name, own: func(a netip.Addr) bool { return w.s.own[a] }}
	np := w.s.node.NodePorts(w.s.family)
	for a := range w.s.own {
		// Of IPv6 link-local addresses each pod's interface may have one.
		if np.Allows(a) && !a.IsLinkLocalUnicast() {
			l.nodePorts = append(l.nodePorts, a)
		}
	}
	slices.SortFunc(l.nodePorts, netip.Addr.Compare)
	return l
}

// addEntries adds the elements that items are to have, many at a time.
func (w *work) addEntries() error {
	return w.insert(func(it *item) ([]entry, uint32) { return it.plan.entries, 0 })
}

// addNear adds those that lead connections from near to where they are to go.
func (w *work) addNear() error {
	return w.insert(func(it *item) ([]entry, uint32) { return it.plan.near, it.plan.mark })
}

func (w *work) insert(of func(*item) (entries []entry, mark uint32)) error {
	var lists [setCount][]entry
	owners := map[entry]*item{}
	marks := map[entry]uint32{}
	for _, it := range w.items {
		if w.failed[it.key] != nil {
			continue
		}
		entries, mark := of(it)
		for _, e := range missing(entries, it.state.entries) {
			it.state.entries = append(it.state.entries, e)
			es, there := w.s.entries[e]
			es.refs++
			w.s.entries[e] = es
			if !there {
				lists[e.set] = append(lists[e.set], e)
				owners[e] = it
			}
		}
		if mark == 0 {
			continue
		}
		for _, e := range entries {
			if es := w.s.entries[e]; es.mark != mark {
				if owners[e] == nil {
					lists[e.set] = append(lists[e.set], e)
				}
				owners[e], marks[e] = it, mark
			}
		}
	}
	for id, list := range lists {
		if len(list) == 0 {
			continue
		}
		if err := w.b.sets.change(nl.IPSET_CMD_ADD, setID(id), w.s.family, list, marks); err == nil {
			for _, e := range list {
				w.s.note(e, marks[e])
			}
			continue
		}
		// One by one, to see which it is.
		for _, e := range list {
			err := w.b.sets.change(nl.IPSET_CMD_ADD, setID(id), w.s.family, []entry{e}, marks)
			switch {
			case err == nil:
				w.s.note(e, marks[e])
			case errors.Is(err, ruleset.ErrNeedFull):
				return err
			default:
				w.failed[owners[e].key] = err
				w.forget(e)
			}
		}
	}
	return nil
}

// forget takes an element that could not be added from all that count on it: they
// add it when they are tried again.
func (w *work) forget(e entry) {
	delete(w.s.entries, e)
	for _, it := range w.items {
		it.state.entries = slices.DeleteFunc(it.state.entries, func(x entry) bool { return x == e })
	}
}

func (s *state) note(e entry, mark uint32) {
	es := s.entries[e]
	es.mark = mark
	s.entries[e] = es
}

// upsertVirtuals brings in an item's virtual servers with their real servers.
func (w *work) upsertVirtuals(it *item) error {
	for i := range it.plan.virtuals {
		p := &it.plan.virtuals[i]
		v := w.s.virtuals[p.key]
		switch {
		case v == nil:
			if err := w.b.kernel.addVirtual(p.key, p.virtual); err != nil {
				return err
			}
			v = &virtualState{virtual: p.virtual, reals: make(map[netip.AddrPort]realState, len(p.pool))}
			w.s.virtuals[p.key] = v
		case v.virtual != p.virtual:
			if err := w.b.kernel.setVirtual(p.key, p.virtual); err != nil {
				return err
			}
			v.virtual = p.virtual
		}
		v.owner, v.proto = it.key, p.proto
		if !slices.Contains(it.state.virtuals, p.key) {
			it.state.virtuals = append(it.state.virtuals, p.key)
		}
		if err := w.upsertReals(it, p, v); err != nil {
			return err
		}
	}
	return nil
}

// upsertReals makes the real servers of a virtual server what they are to be: those
// that are wanted first. One that the kernel does not take is passed over.
func (w *work) upsertReals(it *item, p *plannedVirtual, v *virtualState) error {
	before := len(it.refused)
	for i, ep := range p.pool {
		if err := w.step(p.key, v, ep.Addr, wanted, p.weight(i)); !it.refuses(err) {
			return err
		}
	}
	if len(v.reals) == len(p.pool) && len(it.refused) == before {
		return nil
	}
	keep := make(map[netip.AddrPort]struct{}, len(p.pool))
	for _, ep := range p.pool {
		keep[ep.Addr] = struct{}{}
	}
	for at := range v.reals {
		if _, ok := keep[at]; ok {
			continue
		}
		if err := w.step(p.key, v, at, unwanted, 0); err != nil {
			return err
		}
	}
	return nil
}

// refuses reports whether an item can be gone on with after err: it is nil, or what
// the kernel says of an address that it does not take, which is noted.
func (it *item) refuses(err error) bool {
	if err == nil {
		return true
	}
	if !errors.Is(err, unix.EINVAL) {
		return false
	}
	it.refused = append(it.refused, err)
	return true
}

// step takes a real server one step through its phases.
func (w *work) step(k virtualKey, v *virtualState, at netip.AddrPort, e event, weight uint16) error {
	r := v.reals[at]
	next, do := r.phase.next(e)
	var err error
	switch do {
	case create:
		err = w.b.kernel.addReal(k, at, weight)
	case restore, quiesce:
		if weight != r.weight {
			err = w.b.kernel.setReal(k, at, weight)
		}
	case remove:
		err = w.b.kernel.delReal(k, at)
	case nothing:
		return nil
	}
	if err != nil {
		return err
	}
	if next == draining {
		w.s.drain(k, at, w.now)
	} else if r.phase == draining {
		w.s.settle(k, at)
	}
	if next == absent {
		delete(v.reals, at)
	} else {
		v.reals[at] = realState{weight, next}
	}
	return nil
}

// bind gives the dummy device the addresses that an item is to have.
func (w *work) bind(it *item) error {
	for _, a := range it.plan.bind {
		if slices.Contains(it.state.bound, a) {
			continue
		}
		if _, there := w.s.bound[a]; !there {
			if err := w.b.device.bind(a); err != nil {
				return err
			}
			if a.Is6() {
				w.s.unsettled = append(w.s.unsettled, a)
			}
		}
		w.s.bound[a]++
		it.state.bound = append(it.state.bound, a)
	}
	return nil
}

// settle waits for addresses that were bound, by this work or by one that did not
// come to its end. One that does not become local has been taken away.
func (w *work) settle(ctx context.Context) error {
	w.s.unsettled = slices.DeleteFunc(w.s.unsettled, func(a netip.Addr) bool {
		_, ok := w.s.bound[a]
		return !ok
	})
	if err := w.b.device.settle(ctx, w.s.unsettled); err != nil {
		return err
	}
	w.s.unsettled = nil
	return nil
}

// giveUp takes back an item's claims to addresses that it has no more.
func (w *work) giveUp(it *item) error {
	for _, a := range missing(it.state.bound, it.plan.bind) {
		w.s.bound[a]--
		w.s.free = append(w.s.free, a)
		it.state.bound = slices.DeleteFunc(it.state.bound, func(x netip.Addr) bool { return x == a })
	}
	return nil
}

// releaseTaken ends the leaving of virtual servers that are a Service's again.
func (w *work) releaseTaken() error {
	for k := range w.s.leaving {
		if v := w.s.virtuals[k]; v != nil && v.owner != (tracker.Key{}) {
			if err := w.release(k); err != nil {
				return err
			}
		}
	}
	return nil
}

// dropVirtuals removes an item's virtual servers that it has no more, but for those
// that another one has now.
func (w *work) dropVirtuals(it *item) error {
	var keep []virtualKey
	for i := range it.plan.virtuals {
		keep = append(keep, it.plan.virtuals[i].key)
	}
	for _, k := range missing(it.state.virtuals, keep) {
		if v := w.s.virtuals[k]; v != nil && v.owner == it.key {
			if err := w.leave(k, v); err != nil {
				return err
			}
		}
		it.state.virtuals = slices.DeleteFunc(it.state.virtuals, func(x virtualKey) bool { return x == k })
	}
	return nil
}

// leave removes a virtual server that no Service port has any more, at once or, if
// its protocol drains and there are connections, when those have ended. Meanwhile
// new ones meet what they would without it: a closed port of a cluster IP or of the
// node, which refuses them, or an address that nobody has, which gives no answer.
func (w *work) leave(k virtualKey, v *virtualState) error {
	if w.b.config.Drain.rule(v.proto).counts {
		busy := false
		err := w.b.kernel.reals(k, func(r real) { busy = busy || r.active != 0 || r.inactive != 0 })
		if err != nil {
			return err
		}
		if busy {
			return w.linger(k, v)
		}
	}
	return w.dropVirtual(k)
}

func (w *work) linger(k virtualKey, v *virtualState) error {
	for at := range v.reals {
		if err := w.step(k, v, at, unwanted, 0); err != nil {
			return err
		}
	}
	v.owner = tracker.Key{}
	if _, already := w.s.leaving[k]; already {
		return nil
	}
	var l leaving
	if k.mark == 0 {
		if e, ok := w.s.identity(k); ok {
			l.entries = append(l.entries, e)
		}
		a := k.at.Addr()
		refs, bound := w.s.bound[a]
		for _, other := range w.s.leaving {
			if other.bound == a {
				refs--
			}
		}
		if bound {
			l.bound = a
			w.s.bound[a]++
			l.entries = append(l.entries, entry{set: setIPs, family: k.family, addr: a})
		}
		cluster := len(l.entries) != 0 && l.entries[0].set == setClusterIP
		if bound && refs == 0 {
			l.entries = append(l.entries, entry{set: setBoundExternal, family: k.family, addr: a})
		}
		if bound && (refs == 0 || !cluster) {
			l.entries = append(l.entries, entry{set: setNoLocal, family: k.family, addr: a, proto: k.proto, port: k.at.Port()})
		}
	}
	for _, e := range l.entries {
		es, there := w.s.entries[e]
		if !there {
			if err := w.b.sets.change(nl.IPSET_CMD_ADD, e.set, k.family, []entry{e}, nil); err != nil {
				return err
			}
		}
		es.refs++
		w.s.entries[e] = es
	}
	w.s.leaving[k] = l
	return nil
}

// release gives up what a virtual server held on to that has drained, or is a
// Service's again.
func (w *work) release(k virtualKey) error {
	l, ok := w.s.leaving[k]
	if !ok {
		return nil
	}
	delete(w.s.leaving, k)
	var lists [setCount][]entry
	for _, e := range l.entries {
		es := w.s.entries[e]
		if es.refs--; es.refs <= 0 {
			lists[e.set] = append(lists[e.set], e)
		}
		w.s.entries[e] = es
	}
	if l.bound.IsValid() {
		if w.s.bound[l.bound]--; w.s.bound[l.bound] <= 0 {
			if err := w.b.device.unbind(l.bound); err != nil {
				return err
			}
			delete(w.s.bound, l.bound)
		}
	}
	return w.delete(lists)
}

func (w *work) dropVirtual(k virtualKey) error {
	if err := w.b.kernel.delVirtual(k); err != nil {
		return err
	}
	delete(w.s.virtuals, k)
	delete(w.s.draining, k)
	delete(w.s.marks, k.mark)
	return w.release(k)
}

// dropEntries removes the elements that items have no more and nobody else has:
// those that lead connections from near, or all others.
func (w *work) dropEntries(near bool) error {
	var lists [setCount][]entry
	for _, it := range w.items {
		if w.failed[it.key] != nil {
			continue
		}
		wanted := it.plan.entries
		if near {
			wanted = it.plan.near
		}
		var mine []entry
		for _, e := range it.state.entries {
			if (e.set == setShortCircuit) == near {
				mine = append(mine, e)
			}
		}
		gone := missing(mine, wanted)
		if len(gone) == 0 {
			continue
		}
		it.state.entries = missing(it.state.entries, gone)
		for _, e := range gone {
			es := w.s.entries[e]
			if es.refs--; es.refs <= 0 {
				lists[e.set] = append(lists[e.set], e)
			}
			w.s.entries[e] = es
		}
	}
	return w.delete(lists)
}

func (w *work) delete(lists [setCount][]entry) error {
	for id, list := range lists {
		if len(list) == 0 {
			continue
		}
		if err := w.b.sets.change(nl.IPSET_CMD_DEL, setID(id), w.s.family, list, nil); err != nil {
			// Whose they were is forgotten.
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
		for _, e := range list {
			delete(w.s.entries, e)
		}
	}
	return nil
}

// prune removes what was found in the kernel and no Service asks for.
func (w *work) prune() error {
	w.keepFailed()
	var lists [setCount][]entry
	for e, es := range w.s.entries {
		if es.refs == 0 && e.set == setShortCircuit {
			lists[e.set] = append(lists[e.set], e)
		}
	}
	if err := w.delete(lists); err != nil {
		return err
	}
	for k, v := range w.s.virtuals {
		if v.owner != (tracker.Key{}) {
			continue
		}
		if !w.s.recognised(w.b.config, k) {
			delete(w.s.virtuals, k)
			delete(w.s.draining, k)
			continue
		}
		if err := w.leave(k, v); err != nil {
			return err
		}
	}
	for a, refs := range w.s.bound {
		if refs == 0 {
			w.s.free = append(w.s.free, a)
		}
	}
	lists = [setCount][]entry{}
	for e, es := range w.s.entries {
		if es.refs == 0 {
			lists[e.set] = append(lists[e.set], e)
		}
	}
	return w.delete(lists)
}

// keepFailed claims what there is of what failed items are to have: it stays as it
// was found.
func (w *work) keepFailed() {
	for _, it := range w.items {
		if w.failed[it.key] == nil {
			continue
		}
		for i := range it.plan.virtuals {
			p := &it.plan.virtuals[i]
			if v := w.s.virtuals[p.key]; v != nil && v.owner == (tracker.Key{}) {
				v.owner, v.proto = it.key, p.proto
				it.state.virtuals = append(it.state.virtuals, p.key)
			}
		}
		for _, a := range it.plan.bind {
			if _, ok := w.s.bound[a]; ok && !slices.Contains(it.state.bound, a) {
				w.s.bound[a]++
				it.state.bound = append(it.state.bound, a)
			}
		}
		for _, e := range slices.Concat(it.plan.entries, it.plan.near) {
			if es, ok := w.s.entries[e]; ok && !slices.Contains(it.state.entries, e) {
				es.refs++
				w.s.entries[e] = es
				it.state.entries = append(it.state.entries, e)
			}
		}
	}
}

// unbind takes from the dummy device the addresses that nobody has any more.
func (w *work) unbind() error {
	for len(w.s.free) > 0 {
		a := w.s.free[0]
		if refs, ok := w.s.bound[a]; ok && refs <= 0 {
			if err := w.b.device.unbind(a); err != nil {
				return err
			}
			delete(w.s.bound, a)
		}
		w.s.free = w.s.free[1:]
	}
	w.s.free = nil
	return nil
}

// finish forgets Service ports that are gone, and marks that nobody has.
func (w *work) finish() {
	w.s.stale = false
	for _, it := range w.items {
		if w.failed[it.key] != nil {
			// It may not be among those that are offered again.
			w.s.stale = true
			continue
		}
		if len(it.plan.near) == 0 || it.plan.mark == w.b.config.Marks.Value {
			if w.s.virtuals[virtualKey{family: w.s.family, mark: it.state.mark}] == nil {
				delete(w.s.marks, it.state.mark)
			}
			it.state.mark = 0
		}
		if it.service == nil {
			delete(w.s.services, it.key)
		}
		if len(it.refused) != 0 {
			w.failed[it.key] = errors.Join(it.refused...)
		}
	}
}
