//go:build linux

package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// update brings one family into agreement with a delta.
type update struct {
	b *Backend
	s *state
	// failed holds the error of each Service port that failed.
	failed map[tracker.Key]error
	items  []*item
	now    time.Time
}

// item is one Service port that an update changes.
type item struct {
	key     tracker.Key
	service *ruleset.Service // nil if the Service port was deleted
	state   *serviceState
	plan    plan
	// refused holds the kernel's errors about single real servers. The others are in
	// place.
	refused []error
}

// steps returns the steps of an update in order. Each step is done for all items before
// the next. Everything new is complete before anything old is removed, so that a packet to
// a Service meets either all of its old state or all of its new state.
func (u *update) steps(full bool) []step {
	return []step{
		{"add set elements", func(context.Context) error { return u.insert(false) }},
		{"add and change virtual servers", u.each(u.upsertVirtuals)},
		{"add set elements of internal traffic", func(context.Context) error { return u.insert(true) }},
		{"bind addresses", u.each(u.bind)},
		{"wait until the addresses are local", u.waitLocal},
		{"delete set elements of internal traffic", func(context.Context) error { return u.dropUnplanned(true) }},
		{"keep virtual servers that have an owner again", u.releaseOwned},
		{"abandon addresses", u.each(u.abandon)},
		{"delete virtual servers", u.each(u.dropVirtuals)},
		{"prune", func(context.Context) error {
			if !full {
				return nil
			}
			return u.prune()
		}},
		{"unbind addresses", u.unbind},
		{"delete set elements", func(context.Context) error { return u.dropUnplanned(false) }},
	}
}

// step is one step of an update. An error ends the update.
type step struct {
	name string
	do   func(context.Context) error
}

func newUpdate(b *Backend, s *state, failed map[tracker.Key]error) *update {
	return &update{b: b, s: s, failed: failed, now: time.Now()}
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
			u.add(c.Key, c.New)
		}
	}
	if u.s.stale && !d.Full {
		u.addExternal()
	}
	return u.run(ctx, d.Full)
}

// add adds a Service port to the items. It must not be among them yet.
func (u *update) add(k tracker.Key, svc *ruleset.Service) {
	st := u.s.services[k]
	if st == nil {
		if svc == nil {
			return
		}
		st = &serviceState{}
		u.s.services[k] = st
	}
	st.service = svc
	u.items = append(u.items, &item{key: k, service: svc, state: st})
}

// addExternal adds all other Service ports that depend on the node's addresses to the
// items.
func (u *update) addExternal() {
	already := make(map[tracker.Key]bool, len(u.items))
	for _, it := range u.items {
		already[it.key] = true
	}
	for k, st := range u.s.services {
		if !already[k] && st.service != nil && st.service.Port.ExternallyAccessible() {
			u.add(k, st.service)
		}
	}
}

// run makes the changes of all items. An item that fails keeps its previous objects.
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

// each returns a step that calls do for each item that has not failed.
func (u *update) each(do func(*item) error) func(context.Context) error {
	return func(ctx context.Context) error {
		for i, it := range u.items {
			if u.failed[it.key] != nil {
				continue
			}
			if i%256 == 255 {
				if err := ctx.Err(); err != nil {
					return err
				}
			}
			if err := do(it); errors.Is(err, ruleset.ErrNeedFull) || errors.Is(err, os.ErrClosed) {
				return err
			} else if err != nil {
				u.failed[it.key] = err
			}
		}
		return nil
	}
}

// makePlans makes the plan of each item and allocates packet marks.
func (u *update) makePlans(full bool) {
	l := u.local()
	makePlan := func(it *item) {
		if it.service == nil {
			return
		}
		if inet.Protocol(it.key.Protocol) == 0 {
			u.failed[it.key] = fmt.Errorf("IPVS has no protocol %q", it.key.Protocol)
		} else {
			it.plan = u.b.config.makePlan(it.service, l, it.state.mark)
		}
	}
	for _, it := range u.items {
		makePlan(it)
		if full && len(it.plan.internal) != 0 {
			// Reuse the mark that an earlier process allocated.
			m := u.s.entries[it.plan.internal[0]].value
			if _, used := u.s.marks[m]; u.b.config.Marks.contains(m) && !used {
				u.s.marks[m], it.state.mark = it.key, m
			}
		}
	}
	// After a restart, new marks go to the oldest Services first.
	byAge := slices.SortedStableFunc(slices.Values(u.items), func(a, b *item) int { return cmp.Compare(a.age(), b.age()) })
	for _, it := range byAge {
		switch {
		case len(it.plan.internal) == 0 || u.failed[it.key] != nil:
			continue
		case u.b.config.internalDrops(it.service):
			it.plan.mark = u.b.config.Marks.Value
			continue
		}
		m := u.s.allocate(u.b.config.Marks, it.key, it.state.mark)
		if m == 0 {
			// Internal traffic is then treated like external traffic.
			backendconf.Complain(u.b.complaints, slog.LevelWarn, it.key, "ipvs: no packet mark left, internal traffic is treated as external", nil)
			it.plan.internal = nil
			continue
		}
		it.state.mark = m
		makePlan(it)
	}
}

// age returns a number that is lower for an older Service.
func (it *item) age() uint64 {
	if it.service == nil {
		return math.MaxUint64
	}
	return uint64(it.service.Port.Created) - 1 // 0 means unknown
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

// finish removes the state of deleted Service ports, and frees packet marks that have no
// owner any more.
func (u *update) finish() {
	u.s.stale = false
	for _, it := range u.items {
		if u.failed[it.key] != nil {
			// The next delta may not contain this Service port.
			u.s.stale = true
			continue
		}
		if len(it.plan.internal) == 0 || it.plan.mark == u.b.config.Marks.Value {
			if u.s.virtuals[virtualKey{family: u.s.family, mark: it.state.mark}] == nil {
				delete(u.s.marks, it.state.mark)
			}
			it.state.mark = 0
		}
		if it.service == nil {
			delete(u.s.services, it.key)
		}
		if len(it.refused) != 0 {
			u.failed[it.key] = errors.Join(it.refused...)
		}
	}
}
