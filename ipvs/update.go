package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// update brings one family into agreement with a delta.
type update struct {
	b *Backend
	s *state
	// failed holds the errors of the Service ports that are not in effect, or only in part.
	failed map[tracker.Key]error
	items  []*item
	now    time.Time
	// old holds the source ranges in effect before the update.
	old sources
}

// item is one Service port that an update changes.
type item struct {
	key     tracker.Key
	owner   owner
	service *ruleset.Port // nil if the Service port was deleted
	plan    plan
	// errs holds the kernel's errors about parts of the item, the first few of each update. The other parts are in
	// place.
	errs []error
	// failed is set by an error that leaves open what the kernel has. The update then removes
	// nothing of the item, except real servers whose endpoints are gone.
	failed bool
	// lacks holds the elements that the kernel refuses and that frontends need.
	lacks []entry
}

func (it *item) note(err error) {
	const most = 10 // a Service may have thousands of endpoints
	if len(it.errs) < most {
		it.errs = append(it.errs, err)
	}
}

// fail records that a write for an item failed, unless err is nil or ends the update. It returns
// the error that ends the update.
func (it *item) fail(err error) error {
	if err == nil || errors.Is(err, ruleset.ErrNeedFull) {
		return err
	}
	it.failed = true
	it.note(err)
	return nil
}

// steps returns the steps of an update in their order. Each is done for all items before the next. So a packet meets all
// parts of a Service at every step: what is new is complete before what is old is removed.
func (u *update) steps(full bool) []step {
	ifFull := func(do func(context.Context) error) func(context.Context) error {
		if !full {
			return func(context.Context) error { return nil }
		}
		return do
	}
	return []step{
		{"read source ranges", u.readSources},
		// The rules recognize a virtual server by its elements. A source range comes before it becomes effective.
		{"add set elements", u.insertEntries(u.early)},
		{"leave out frontends that lack set elements", u.each(u.withhold)},
		// A client that only the old ranges admit must not reach new endpoints.
		{"delete source ranges", u.deleteSources},
		// Elements lead internal traffic to its virtual server, so that has its real servers before. An earlier process
		// may have given the mark to another Service port, whose real servers drain before, too.
		{"add and change virtual servers of internal traffic", u.each(u.upsert(virtualKey.internal))},
		{"drain real servers of an earlier process", ifFull(u.unlessFailed(u.quiesceReals(virtualKey.internal)))},
		{"add set elements of internal traffic", u.insertInternal},
		{"add and change virtual servers", u.each(u.upsert(virtualKey.external))},
		// Dropping is for external traffic alone: it begins when internal traffic has its elements, and ends while it
		// still has them.
		{"add set elements that drop", u.insertEntries(isDrop)},
		{"keep frontends of failed Services", u.keepFailed},
		{"delete set elements that drop", u.deleteEntries(isDrop)},
		{"delete set elements of internal traffic", u.deleteEntries(isInternal)},
		// Every virtual server has its new real servers, so the old ones get no more connections. A client that only
		// the new source ranges admit must not reach the old ones.
		{"drain real servers", u.each(u.quiesceReals(func(virtualKey) bool { return true }))},
		{"add late source ranges", u.insertEntries(u.lateSource)},
		// A bound address attracts packets, so what handles them is there before.
		{"bind addresses", u.each(u.bind)},
		{"wait until the addresses are local", u.waitLocal},
		// What is deleted from here on has no packets, unless the writes of a Service failed: it needs what it had.
		{"keep frontends of Services that failed since", u.keepFailed},
		{"keep virtual servers that are needed again", u.releaseOwned},
		{"abandon addresses", u.unlessFailed(u.abandon)},
		{"delete virtual servers", u.unlessFailed(u.dropVirtuals)},
		{"prune", ifFull(u.prune)},
		{"unbind addresses", u.unbind},
		{"delete set elements", u.deleteEntries(isAny)},
	}
}

// step is one step of an update. An error ends the update.
type step struct {
	name string
	do   func(context.Context) error
}

func newUpdate(b *Backend, s *state, failed map[tracker.Key]error) *update {
	return &update{b: b, s: s, failed: failed, now: b.now()}
}

// apply makes a delta's changes to Services of the family.
func (u *update) apply(ctx context.Context, d *ruleset.Delta) error {
	if d.Node != u.s.node {
		if err := u.b.writeRules(ctx, u.s, d.Node, false); err != nil {
			return err
		}
	}
	if err := u.b.followAddresses(); err != nil {
		return err
	}
	if old := d.OldNode; old != nil && old != d.Node {
		was, is := old.NodePorts(u.s.family), d.Node.NodePorts(u.s.family)
		u.s.stale = u.s.stale || was.All != is.All || !slices.Equal(was.Prefixes, is.Prefixes)
	}
	// Without a Watch, this removes real servers whose limit has passed.
	if err := u.b.drain(u.s, u.now, true); err != nil {
		return err
	}
	for i := range d.Changes {
		if c := &d.Changes[i]; c.Key.Family == u.s.family {
			u.add(c.Key, owner(c.ID()), c.New)
		}
	}
	if u.s.stale && !d.Full {
		u.addStale()
	}
	return u.run(ctx, d.Full)
}

// add adds a Service port to the items. It must not be among them yet.
func (u *update) add(k tracker.Key, o owner, svc *ruleset.Port) {
	if u.s.services[k] = svc; svc == nil {
		delete(u.s.services, k)
	}
	u.items = append(u.items, &item{key: k, owner: o, service: svc})
}

// addStale adds all other Service ports whose plans depend on addresses that have changed to the items.
func (u *update) addStale() {
	already := make(map[tracker.Key]bool, len(u.items))
	for _, it := range u.items {
		already[it.key] = true
	}
	for k, svc := range u.s.services {
		if !already[k] && u.s.follows(svc) {
			u.add(k, owner(svc.ID), svc)
		}
	}
}

func (u *update) remaining(yield func(*item) bool) {
	for _, it := range u.items {
		if !it.failed && !yield(it) {
			return
		}
	}
}

func (u *update) run(ctx context.Context, full bool) error {
	u.makePlans(full)
	for _, s := range u.steps(full) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	u.finish()
	return nil
}

func (u *update) each(do func(*item) error) func(context.Context) error {
	return func(ctx context.Context) error {
		for i, it := range u.items {
			if i%256 == 255 {
				if err := ctx.Err(); err != nil {
					return err
				}
			}
			if err := it.fail(do(it)); err != nil {
				return err
			}
		}
		return nil
	}
}

func (u *update) unlessFailed(do func(*item) error) func(context.Context) error {
	return u.each(func(it *item) error {
		if it.failed {
			return nil
		}
		return do(it)
	})
}

// makePlans makes the plan of each item and allocates packet marks.
func (u *update) makePlans(full bool) {
	l := u.local()
	elements := map[uint32]int{}
	if full {
		for _, m := range u.s.entryMarks {
			elements[m]++
		}
	}
	for _, it := range u.items {
		if it.service != nil {
			it.plan = u.b.config.makePlan(it.service, l, 0)
			if err := u.b.config.ignored(it.service); err != nil {
				backendconf.Complain(u.b.complaints, slog.LevelWarn, it.key, "ipvs: ignored a property of a service", err)
			}
		}
		if full {
			u.s.adoptMark(it.key, it.plan.internal, elements)
		}
	}
	if full {
		u.s.reserveMarks()
	}
	// After a restart, packet marks and the room in sets go to the oldest Services first.
	slices.SortStableFunc(u.items, (*item).compareAge)
	for _, it := range u.items {
		switch {
		case len(it.plan.internal) == 0:
			continue
		case u.b.config.internalDrops(it.service):
			it.plan.mark = markDrop
			continue
		}
		n, err := u.s.marks.Get(it.key)
		if err != nil {
			// Internal traffic is then treated like external traffic.
			backendconf.Complain(u.b.complaints, slog.LevelWarn, it.key, "ipvs: no packet mark left, internal traffic is treated as external", nil)
			it.plan.internal = nil
			continue
		}
		it.plan = u.b.config.makePlan(it.service, l, markDrop+n)
	}
}

// compareAge orders items by the age of their Services, the oldest first. Items without one come last.
func (it *item) compareAge(o *item) int {
	switch {
	case it.service != nil && o.service != nil:
		return it.service.Spec.CompareAge(o.service.Spec)
	case it.service != nil:
		return -1
	case o.service != nil:
		return 1
	}
	return 0
}

// local returns the information about the node that plans depend on.
func (u *update) local() local {
	l := local{node: u.s.node.Info.Name, own: func(a netip.Addr) bool { return u.s.own[a] }}
	np := u.s.node.NodePorts(u.s.family)
	for a := range u.s.own {
		// Each pod's interface may have an IPv6 link-local address.
		if np.Allows(a) && !a.IsLinkLocalUnicast() {
			l.nodePorts = append(l.nodePorts, a)
		}
	}
	slices.SortFunc(l.nodePorts, netip.Addr.Compare)
	return l
}

// finish frees packet marks that no Service port needs any more, and reports errors.
func (u *update) finish() {
	u.s.stale = false
	for _, it := range u.items {
		if len(it.errs) != 0 {
			u.failed[it.key] = errors.Join(it.errs...)
		}
		switch {
		case it.failed:
			// The next delta may not contain this Service port.
			u.s.stale = true
		case len(it.plan.internal) == 0 || it.plan.mark == markDrop:
			u.s.freeMark(it.key)
		}
	}
	if !u.s.stale {
		clear(u.s.moved)
	}
}
