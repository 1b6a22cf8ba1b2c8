package ruleset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// ErrDetached is returned by [Cursor.Sync] after [Cursor.Detach].
var ErrDetached = errors.New("ruleset: cursor is detached")

// ErrNotSynced is what a [*NotSyncedError] is.
var ErrNotSynced = errors.New("ruleset: tracker is not synced")

// NotSyncedError is returned by a [Cursor.Sync] that offers nothing because the
// tracker still lacks some of its sources. It is [ErrNotSynced].
type NotSyncedError struct {
	// Missing is the sources that [tracker.Tracker.MarkSynced] has yet to be called
	// for, at least one.
	Missing []tracker.Source
}

// Error names the sources that are missing.
func (e *NotSyncedError) Error() string {
	return fmt.Sprintf("%v: MarkSynced has not been called for %v", ErrNotSynced, e.Missing)
}

// Unwrap returns [ErrNotSynced].
func (e *NotSyncedError) Unwrap() error { return ErrNotSynced }

// errUnfinished stands for the result of an Apply that did not return.
var errUnfinished = errors.New("ruleset: Apply did not return")

const (
	// maxAttempts is how many different failed attempts are remembered for one
	// Service before the backend is given the whole state instead.
	maxAttempts = 64
	// maxTriggers is how many triggers are remembered while a backend fails.
	maxTriggers = 8192
)

// Cursor is one backend's position in the changes of an [Engine]: what it last
// accepted, and so what it has yet to be told. Its methods are safe for
// concurrent use.
type Cursor struct {
	name    string
	engine  *Engine
	backend Backend

	// syncing is held for the whole of a Sync. It is taken before engine.mu, which
	// guards everything below and is never held during Apply.
	syncing sync.Mutex

	onSync   func(SyncInfo)
	limits   [2]Limits // of the backend, by familyIndex
	early    bool      // a Sync has returned a NotSyncedError
	detached bool
	full     bool  // the next delta is Full
	node     *Node // as acknowledged
	states   []state
	dirty    []uint32
	// tried has an entry for each ID whose last attempt failed: what was offered
	// since states[id].acked, perhaps nothing but its removal.
	tried    map[uint32][]*Service
	triggers []Trigger
	effect   effect
}

// state is what a Cursor knows of one ID.
type state struct {
	acked *Service
	// held: the backend may have something of the ID.
	held bool
	// dirty: the ID is in Cursor.dirty.
	dirty bool
	// over is the limits that were reported as exceeded.
	over excess
}

// SyncInfo is what one [Cursor.Sync] came to.
type SyncInfo struct {
	// Name is the cursor's, from [Engine.Attach].
	Name string
	// Gen is the ruleset's generation that was offered.
	Gen uint64
	// Applied reports whether there was anything to offer to the backend. If not,
	// what the backend has is up to date as it is.
	Applied bool
	// Full reports whether the (last) delta was full.
	Full bool
	// Changes is the number of changes in the (last) delta, Failed how many of them
	// were not acknowledged.
	Changes, Failed int
	// Triggers is the causes of the changes that were acknowledged.
	Triggers []Trigger
	// Services is how many Services have anything compiled, Ports how many
	// [Service] values that makes (one for each port and family), Endpoints how
	// many endpoints they can reach in all.
	Services, Ports, Endpoints int
	// IPv4 and IPv6 are the numbers of each family. A Service of both families
	// counts in both.
	IPv4, IPv6 FamilyInfo
	// Start is when the Sync began, and Took how long it was until the backend's
	// Apply returned.
	Start time.Time
	Took  time.Duration
	// Err is what Sync returns.
	Err error
}

// FamilyInfo is the part of a [SyncInfo] that concerns one address family. Its
// fields are parts of those in SyncInfo.
type FamilyInfo struct {
	// Changes is the number of changes, Failed how many were not acknowledged.
	Changes, Failed int
	// Services is how many Services have a port of the family, Ports the number of
	// [Service] values, Endpoints the number of endpoints they can reach.
	Services, Ports, Endpoints int
}

// Family returns IPv4 or IPv6, the zero value for no family.
func (i *SyncInfo) Family(f tracker.Family) FamilyInfo {
	switch f {
	case tracker.IPv4:
		return i.IPv4
	case tracker.IPv6:
		return i.IPv6
	}
	return FamilyInfo{}
}

// familyIndex is where arrays by family have f.
func familyIndex(f tracker.Family) int {
	if f == tracker.IPv6 {
		return 1
	}
	return 0
}

// Attach adds a backend, to be brought up to date by [Cursor.Sync]. The name is
// for errors, reports and [SyncInfo]. b must not be nil; it may be a [Limiter].
func (e *Engine) Attach(name string, b Backend) *Cursor {
	c := &Cursor{name: name, engine: e, backend: b, full: true, tried: map[uint32][]*Service{}}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		c.limits[familyIndex(f)] = LimitsOf(b, f)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cursors = append(e.cursors, c)
	return c
}

// OnSync has f called at the end of each Sync that got as far as asking what
// there is to do, on its goroutine and before the next Sync begins; f must not
// call Sync. It replaces the function set before; nil removes it.
func (c *Cursor) OnSync(f func(SyncInfo)) {
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	c.onSync = f
}

// Resync makes the next Sync offer the whole state: a Full delta, by which the
// backend also removes what should not be there. A cursor begins so.
func (c *Cursor) Resync() {
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	c.full = true
}

// Detach ends the cursor: Sync does nothing from now on, and the Engine forgets
// what the backend has. It does not wait for a Sync under way.
func (c *Cursor) Detach() {
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.detached {
		return
	}
	c.detached = true
	e.cursors = slices.DeleteFunc(e.cursors, func(o *Cursor) bool { return o == c })
	for id := range c.states {
		if c.states[id].held {
			e.drop(uint32(id))
		}
	}
	c.states, c.dirty, c.tried, c.triggers, c.node, c.effect = nil, nil, nil, nil, nil, effect{}
}

// Sync brings the backend up to date: it takes what changed in the tracker,
// compiles it, offers the backend what differs from what it last accepted, and
// notes what it accepts now. It does not call the backend if there is nothing to
// tell it.
//
// While the tracker is not Synced, Sync does nothing. The first time it returns a
// [*NotSyncedError] that names the missing sources, and after that nil, so that a
// loop that syncs too early neither fails over and over nor waits forever for a
// source that nothing marks without a word. [tracker.Tracker.Missing] returns the
// same at any time.
//
// The error is the backend's, wrapped with the cursor's name; whatever was not
// accepted is offered again by the next Sync, so all there is to do about an
// error is to call Sync again after a while. A backend that asks for the full
// state with [ErrNeedFull] gets it once within the same Sync. One Sync of a
// Cursor runs at a time; those of different Cursors run side by side.
//
// The work is proportional to what changed, except for a Full delta.
func (c *Cursor) Sync(ctx context.Context) error {
	c.syncing.Lock()
	defer c.syncing.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if missing := c.engine.tracker.Missing(); missing != nil {
		if c.early {
			return nil
		}
		c.early = true
		return fmt.Errorf("ruleset: sync %s: %w", c.name, &NotSyncedError{missing})
	}
	info := SyncInfo{Name: c.name, Start: time.Now()}
	err := c.round(ctx, &info)
	if errors.Is(err, ErrNeedFull) {
		c.Resync()
		err = c.round(ctx, &info)
	}
	if errors.Is(err, ErrDetached) {
		return err
	}
	if err != nil {
		err = fmt.Errorf("ruleset: sync %s: %w", c.name, err)
	}
	info.Took, info.Err = time.Since(info.Start), err
	c.engine.mu.Lock()
	hook := c.onSync
	c.engine.mu.Unlock()
	if hook != nil {
		hook(info)
	}
	return err
}

// round makes one delta and has it applied.
func (c *Cursor) round(ctx context.Context, info *SyncInfo) (err error) {
	d, err := c.offer(info)
	if d == nil || err != nil {
		return err
	}
	// A backend that panics has failed, and the panic goes on.
	err = errUnfinished
	defer func() { c.acknowledge(d, err, info) }()
	err = c.backend.Apply(ctx, d)
	return err
}

// offer returns what the backend must be told, nil if nothing.
func (c *Cursor) offer(info *SyncInfo) (*Delta, error) {
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.detached {
		return nil, ErrDetached
	}
	e.pull()
	d := &Delta{Full: c.full, Gen: e.gen, Node: e.node, OldNode: c.node, Triggers: c.triggers}
	c.full = false
	c.grow(len(e.slots))
	if d.Full {
		d.Changes = make([]Change, 0, e.totals[0].Ports+e.totals[1].Ports+len(e.gone))
		for id := range c.states {
			c.add(d, uint32(id))
		}
	} else {
		for _, id := range c.dirty {
			c.add(d, id)
		}
		slices.SortFunc(d.Changes, func(a, b Change) int { return a.Key.Compare(b.Key) })
	}
	link(d.Changes)
	for _, id := range c.dirty {
		c.states[id].dirty = false
	}
	c.dirty = c.dirty[:0]
	if cap(c.dirty) > 1024 {
		c.dirty = nil
	}

	info.Gen, info.Full, info.Changes = d.Gen, d.Full, len(d.Changes)
	info.Failed, info.IPv4, info.IPv6 = 0, e.totals[0], e.totals[1]
	info.Services, info.Ports, info.Endpoints = len(e.names), info.IPv4.Ports+info.IPv6.Ports, info.IPv4.Endpoints+info.IPv6.Endpoints
	for i := range d.Changes {
		info.of(d.Changes[i].Key.Family).Changes++
	}
	if !d.Full && len(d.Changes) == 0 && d.Node == d.OldNode {
		// Whatever the triggers stood for is in effect without a change.
		info.Triggers, c.triggers = c.triggers, nil
		return nil, nil
	}
	info.Applied = true
	return d, nil
}

// add puts what there is to say of id into d, if anything, and notes that the
// backend may have it from now on.
func (c *Cursor) add(d *Delta, id uint32) {
	s, now := &c.states[id], c.engine.desired(id)
	tried, failed := c.tried[id]
	if now == nil && s.acked == nil && !failed {
		return
	}
	what := FieldAll
	if !failed {
		what = diff(s.acked, now)
	}
	if what == 0 && !d.Full {
		s.acked = now // changed and changed back
		return
	}
	ch := Change{Old: s.acked, New: now, What: what, Attempted: tried}
	switch {
	case now != nil:
		ch.Key = now.Key
	case s.acked != nil:
		ch.Key = s.acked.Key
	default:
		ch.Key = tried[0].Key
	}
	for at := range ch.dropped() {
		if o, owned := c.engine.ownership.owner[at]; owned {
			ch.lost = append(ch.lost, move{at, c.engine.ownership.key(o.id)})
		}
	}
	if !s.held {
		s.held = true
		c.engine.slots[id].holders++
	}
	if now != nil {
		s.over = c.limited(now, s.over)
	}
	d.Changes = append(d.Changes, ch)
}

// of returns the part that concerns a family.
func (i *SyncInfo) of(f tracker.Family) *FamilyInfo {
	if f == tracker.IPv6 {
		return &i.IPv6
	}
	return &i.IPv4
}

// acknowledge records how an Apply of d ended, and in info what that acknowledges.
func (c *Cursor) acknowledge(d *Delta, err error, info *SyncInfo) {
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.detached {
		return
	}
	info.Triggers = nil
	var partial *PartialError
	all := err == nil
	some := !all && !errors.Is(err, ErrNeedFull) && errors.As(err, &partial) && partial != nil
	if !all && !some && d.Full {
		c.full = true
	}
	if all || some {
		c.node = d.Node
	}
	failedNames := map[types.NamespacedName]bool{}
	for i := range d.Changes {
		ch := &d.Changes[i]
		failed := !all && !some
		if some {
			_, failed = partial.Failed[ch.Key]
			// The data plane may still serve a frontend by this Service that a failed one
			// is to take over. Its ID must not be given to another Service meanwhile.
			for _, m := range ch.lost {
				if _, waits := partial.Failed[m.key]; waits {
					failed = true
				}
			}
		}
		if failed {
			failedNames[ch.Key.NamespacedName] = true
			info.Failed++
			info.of(ch.Key.Family).Failed++
			c.fail(ch, d.Full && !some)
		} else {
			c.ack(ch)
		}
	}
	if !all && !some {
		return
	}
	// What came in during Apply is behind what was offered.
	later := c.triggers[min(len(d.Triggers), len(c.triggers)):]
	var kept []Trigger
	for _, t := range d.Triggers {
		if failedNames[t.Service] {
			kept = append(kept, t)
		} else {
			info.Triggers = append(info.Triggers, t)
		}
	}
	c.triggers = append(kept, later...)
}

// ack notes that the backend accepted ch.
func (c *Cursor) ack(ch *Change) {
	id := ch.ID()
	s := &c.states[id]
	c.effect.set(id, s.acked, ch.New)
	s.acked = ch.New
	delete(c.tried, id)
	if ch.New == nil {
		s.held, s.over = false, 0
		c.engine.drop(id)
	}
}

// fail notes that ch may be in effect in part. After a Full delta failed as a
// whole another is to come, so there it is enough to remember what was new.
func (c *Cursor) fail(ch *Change, again bool) {
	id := ch.ID()
	tried, ok := c.tried[id]
	if again && !ok && ch.New == ch.Old {
		return
	}
	if n := ch.New; n != nil && n != ch.Old && !slices.Contains(tried, n) {
		if len(tried) >= maxAttempts {
			c.full, tried = true, nil
		}
		// Deltas handed out before hold the old slice.
		tried = append(slices.Clip(tried), n)
	}
	c.tried[id] = tried
	c.mark(id)
}

// drop notes that one cursor's backend has nothing of id any more.
func (e *Engine) drop(id uint32) {
	s := &e.slots[id]
	if s.holders--; s.holders == 0 && !s.live {
		e.release(id)
	}
}

// mark notes that there may be something to say of id.
func (c *Cursor) mark(id uint32) {
	if c.full {
		return // as of everything
	}
	c.grow(int(id) + 1)
	if s := &c.states[id]; !s.dirty {
		s.dirty = true
		c.dirty = append(c.dirty, id)
	}
}

// grow makes room for n IDs.
func (c *Cursor) grow(n int) {
	if more := n - len(c.states); more > 0 {
		c.states = append(c.states, make([]state, more)...)
	}
}

// trigger remembers a cause.
func (c *Cursor) trigger(t Trigger) {
	if len(c.triggers) < maxTriggers {
		c.triggers = append(c.triggers, t)
	}
}
