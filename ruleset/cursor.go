package ruleset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// ErrDetached is returned by [Cursor.Sync] after [Cursor.Detach].
var ErrDetached = errors.New("ruleset: cursor is detached")

// ErrNotSynced is wrapped by the error of a [Cursor.Sync] that did nothing because some sources of the tracker, which
// the error names, are not synced. Package runner takes such a Sync neither for a success nor for a failure.
var ErrNotSynced error = notSynced{}

type notSynced struct{}

// Error implements error.
func (notSynced) Error() string { return "ruleset: tracker is not synced" }

// NotReady reports, to package runner, that this is no failure.
func (notSynced) NotReady() bool { return true }

var errUnfinished = errors.New("ruleset: Apply did not return")

// maxTriggers bounds the triggers stored while a backend fails.
const maxTriggers = 8192

// Cursor is one backend's position in the changes of an [Engine]: it records what the backend acknowledged. Its
// methods are safe for concurrent use.
type Cursor struct {
	name    string
	engine  *Engine
	backend Backend
	start   time.Time
	// leader, if not nil, is the Cursor whose effect this one follows.
	leader *Cursor
	// part, if not nil, is the part of the ruleset that the backend is offered.
	part func(*Port) bool

	// syncing has room for one value, which a Sync puts there for its duration, before engine.mu is locked. engine.mu
	// guards the fields below and is never held during Apply.
	syncing chan struct{}

	onSync   func(SyncInfo)
	limits   [2]Limits // of the backend, by familyIndex
	detached bool

	// What the backend has. Between two deltas, for each ID:
	//
	//	held                == acked != nil || failures has the ID
	//	slots[id].holders   == number of Cursors with held
	//	node == nil         => acked == nil: nothing was acknowledged yet
	//	f in acked.Frontends => no other acked has a frontend at that address and port
	//
	// followers holds the Cursors that follow this one; their unlimited(id) == acked.
	states    []state
	node      *Node  // of the last delta that was acknowledged, nil before
	gen       uint64 // the same
	failures  map[uint32]failure
	effect    effect
	followers []*Cursor

	// What the backend should get:
	//
	//	full                => the next delta is Full: it has each ID that is wanted or held
	//	!full               => dirty lists each ID with state.dirty, once
	//	!full && !dirty[id] => diff(acked, desired(id)) == 0, and failures lacks the ID
	//	since               == marks when the ID became dirty last, so since <= marks
	//	cut has the ID      => its wanted version may exceed the limits: see Cursor.hold
	//
	// desired(id) counts as changed when the Engine has compiled it.
	full     bool
	dirty    []uint32
	cut      map[uint32]cut
	triggers []Trigger // not acknowledged, at most maxTriggers
	// marks is the increasing time, in nanoseconds since start, at which an ID last became dirty.
	marks uint64
	// until is the last mark that the Sync in progress must offer, and 0 until it has taken the changes from the
	// tracker. Guarded by syncing.
	until uint64
	// unfinished holds the IDs of which the current delta adds or removes only a part of the endpoints.
	unfinished []uint32
}

// state is the state of one ID in a Cursor.
type state struct {
	// acked is the version that the backend acknowledged last, without frontends acknowledged for other Services
	// since; nil for none.
	acked *Port
	// at is when acked was acknowledged, since Cursor.start.
	at time.Duration
	// since is the value of Cursor.marks when the ID became dirty for the last time.
	since uint64
	// over holds the limits that were reported as exceeded.
	over excess
	// held reports whether the backend may have parts of the ID.
	held bool
	// in reports whether the live Service is in Cursor.part.
	in bool
	// dirty reports whether the next delta that is not Full examines the ID.
	dirty bool
}

// failure is the last failure of an ID that the backend has not acknowledged since.
type failure struct {
	err   error
	since uint64 // as state.since, before the first failure
}

// SyncInfo describes the result of one [Cursor.Sync].
type SyncInfo struct {
	// Applied reports whether Sync called the backend. If not, the backend was up to
	// date.
	Applied bool
	// Full reports whether the last delta was full.
	Full bool
	// Changes is the number of changes in all deltas, and Failed the number of them that were not acknowledged.
	// Deltas that were answered with [ErrNeedFull] do not count.
	Changes, Failed int
	// Triggers holds the triggers of the acknowledged changes.
	Triggers []Trigger
	// Services is the number of compiled Services, and Ports that of their [Port] values.
	// Endpoints is the number of endpoints that these can reach.
	Services, Ports, Endpoints int
	// Start is the time at which the Sync began. Took is the time until the backend's
	// Apply returned.
	Start time.Time
	Took  time.Duration
	// Err is the result of Sync.
	Err error
}

func familyIndex(f tracker.Family) int {
	if f == tracker.IPv6 {
		return 1
	}
	return 0
}

// Attach adds a backend and returns its Cursor. [Cursor.Sync] brings the backend up
// to date. The name appears in errors and logs. b must not be nil. It may
// be a [Limiter].
func (e *Engine) Attach(name string, b Backend) *Cursor { return e.AttachPart(name, b, nil) }

func (e *Engine) newCursor(name string, b Backend) *Cursor {
	c := &Cursor{name: name, engine: e, backend: b, start: time.Now(), syncing: make(chan struct{}, 1), full: true, failures: map[uint32]failure{}}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		c.limits[familyIndex(f)] = LimitsOf(b, f)
	}
	return c
}

// Follow adds a backend whose wanted state is what c's backend acknowledged. So a health check, a metric or an
// address that is announced is never ahead of the rules. The follower is synced after c, for example by [SyncAll]. It
// has deltas and failures of its own and may be followed itself. Before c has a first result, its Sync does nothing
// and returns an error that wraps [ErrNotSynced]. [Cursor.Detach] of c detaches it, too. It costs a pointer for each
// Service. b must not be nil.
func (c *Cursor) Follow(name string, b Backend) *Cursor {
	f := c.engine.newCursor(name, b)
	f.leader = c
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	f.detached = c.detached
	c.followers = append(c.followers, f)
	return f
}

// OnSync sets the function f to be called at the end of each Sync that compared the ruleset with what the backend
// has, in the goroutine of Sync. f must not call Sync. It replaces the previous function; nil removes it.
func (c *Cursor) OnSync(f func(SyncInfo)) {
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	c.onSync = f
}

// Resync makes the next Sync offer the whole state in a Full delta, so that the
// backend also removes stale entries. The first delta of a Cursor is Full too.
func (c *Cursor) Resync() {
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	c.full = true
}

// Detach removes the cursor and those that follow it from its Engine. Later calls of Sync return
// [ErrDetached]. Detach does not wait for a Sync in progress.
func (c *Cursor) Detach() {
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	c.detach()
}

func (c *Cursor) detach() {
	if c.detached {
		return
	}
	for _, f := range slices.Clone(c.followers) {
		f.detach()
	}
	c.detached = true
	e, same := c.engine, func(o *Cursor) bool { return o == c }
	if e.cursors = slices.DeleteFunc(e.cursors, same); c.leader != nil {
		c.leader.followers = slices.DeleteFunc(c.leader.followers, same)
	}
	for id := range c.states {
		if c.states[id].held {
			e.drop(uint32(id))
		}
	}
	c.states, c.dirty, c.triggers, c.node, c.effect, c.part, c.failures, c.cut = nil, nil, nil, nil, effect{}, nil, nil, nil
}

// Sync brings the backend up to date. It takes the changes from the tracker, compiles them, and offers the backend
// the difference to what it last acknowledged, if there is any.
//
// While the tracker is not Synced, Sync does nothing and returns an error that wraps [ErrNotSynced].
//
// Sync returns the error of the backend, wrapped with the name of the cursor. The next Sync offers again what was not
// acknowledged. If the backend returns [ErrNeedFull], the same Sync offers the full state once. Only one Sync of a
// Cursor runs at a time; others wait until it returns or their context ends. An Apply must not call its own Cursor's
// Sync.
//
// If the changes cost more than [Budget].Delta, Sync offers them in several deltas, unless the delta is Full. It
// returns when it has offered all changes that existed when it began, or a delta fails. If newer changes are left
// then, it calls the functions that [Engine.Notify] registered.
func (c *Cursor) Sync(ctx context.Context) error {
	select {
	case c.syncing <- struct{}{}:
		defer func() { <-c.syncing }()
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if missing := c.engine.tracker.Missing(); missing != nil {
		return fmt.Errorf("ruleset: sync %s: %w: not all of these are listed yet: %v", c.name, ErrNotSynced, missing)
	}
	if c.waits() {
		return fmt.Errorf("ruleset: sync %s: %w: %s has nothing in effect", c.name, ErrNotSynced, c.leader.name)
	}
	info := SyncInfo{Start: time.Now()}
	left, err := c.rounds(ctx, &info)
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
	if left {
		c.engine.callNotify()
	}
	return err
}

// waits reports whether the Cursor that c follows has no result yet.
func (c *Cursor) waits() bool {
	if c.leader == nil {
		return false
	}
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	return c.leader.node == nil && !c.detached
}

// rounds offers deltas until it has offered all changes that existed when it began, or one fails. left reports that
// newer ones exist.
func (c *Cursor) rounds(ctx context.Context, info *SyncInfo) (left bool, err error) {
	c.until = 0
	for {
		oldest, err := c.round(ctx, info)
		if errors.Is(err, ErrNeedFull) {
			c.Resync()
			info.Changes, info.Failed = 0, 0
			oldest, err = c.round(ctx, info)
		}
		switch {
		case err != nil || !c.more(oldest):
			return oldest != 0, err
		case ctx.Err() != nil:
			return true, ctx.Err()
		}
	}
}

// more reports whether the Sync in progress offers another delta. oldest is as in round.
func (c *Cursor) more(oldest uint64) bool { return oldest != 0 && oldest <= c.until }

// round builds one delta and applies it. oldest is the mark of the oldest change that is left for another delta, or
// 0.
func (c *Cursor) round(ctx context.Context, info *SyncInfo) (oldest uint64, err error) {
	d, oldest, err := c.offer(info)
	if d == nil || err != nil {
		return oldest, err
	}
	// If Apply panics, record a failure and let the panic continue.
	err = errUnfinished
	defer func() { c.acknowledge(d, err, info) }()
	err = c.backend.Apply(ctx, d)
	return oldest, err
}

// offer returns the delta for the backend, or nil if nothing changed, and the oldest as in
// round.
func (c *Cursor) offer(info *SyncInfo) (d *Delta, oldest uint64, err error) {
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.detached {
		return nil, 0, ErrDetached
	}
	d = &Delta{Full: c.full, OldNode: c.node}
	if c.leader == nil {
		e.pull()
		d.Gen, d.Node = e.gen, e.node
	} else {
		d.Gen, d.Node = c.leader.gen, c.leader.node
	}
	c.full = false
	c.grow(len(e.slots))
	c.unfinished = c.unfinished[:0]
	if d.Full {
		d.Changes = make([]Change, 0, e.ports+len(e.gone))
		for id := range c.states {
			c.states[id].dirty = false
			c.add(d, uint32(id))
		}
		e.budget.cheapFirst(d.Changes)
	} else {
		for _, id := range c.dirty {
			c.add(d, id)
		}
		slices.SortFunc(d.Changes, func(a, b Change) int { return a.Key.Compare(b.Key) })
	}
	link(d.Changes)
	var later []Change
	if !d.Full {
		d.Changes, later = c.divide(d.Changes)
	}
	d.Triggers = c.splitTriggers(later)
	if c.until == 0 {
		c.until = c.marks
	}
	oldest = c.keepDirty(d.Changes, later)
	d.More = c.more(oldest)
	c.offered(d.Changes)

	info.Full = d.Full
	info.Changes += len(d.Changes)
	info.Services, info.Ports, info.Endpoints = len(e.names), e.ports, e.endpoints
	if !d.Full && len(d.Changes) == 0 && d.Node == d.OldNode {
		// The triggers' changes needed no update of the backend.
		c.inEffect(info, c.triggers...)
		c.triggers = nil
		return nil, 0, nil
	}
	info.Applied = true
	return d, oldest, nil
}

// keepDirty leaves in c.dirty only the changes in later and the unfinished changes in now, and returns
// their oldest mark, or 0.
func (c *Cursor) keepDirty(now, later []Change) (oldest uint64) {
	keep := make([]uint32, 0, len(later))
	for i := range later {
		keep = append(keep, later[i].ID())
	}
	if len(c.unfinished) != 0 {
		for i := range now {
			if id := now[i].ID(); slices.Contains(c.unfinished, id) {
				keep = append(keep, id)
			}
		}
	}
	for _, id := range c.dirty {
		c.states[id].dirty = false
	}
	c.dirty = c.dirty[:0]
	if cap(c.dirty) > 1024 {
		c.dirty = nil
	}
	for _, id := range keep {
		s := &c.states[id]
		s.dirty = true
		c.dirty = append(c.dirty, id)
		if oldest == 0 || s.since < oldest {
			oldest = s.since
		}
	}
	return oldest
}

// offered records that the backend may have parts of the Services of changes from now on.
func (c *Cursor) offered(changes []Change) {
	for i := range changes {
		id := changes[i].ID()
		s := &c.states[id]
		if !s.held {
			s.held = true
			c.engine.slots[id].holders++
		}
	}
}

func (c *Cursor) add(d *Delta, id uint32) {
	s, now := &c.states[id], c.unlimited(id)
	if now != nil {
		s.over = c.limited(now, s.over)
	}
	now = c.hold(id, now)
	_, failed := c.failures[id]
	if now == nil && s.acked == nil && !failed {
		return
	}
	if most := c.deltaSize(); most != 0 && !d.Full {
		part := now
		if now != nil {
			part = grown(s.acked, now, most)
		} else if s.acked != nil && !failed {
			part = shrunk(s.acked, most)
		}
		if part != now {
			now = part
			c.unfinished = append(c.unfinished, id)
		}
	}
	what := FieldAll
	if !failed && !d.Full {
		what = diff(s.acked, now)
	}
	if what == 0 {
		s.acked = now // equal to what the backend has
		return
	}
	ch := Change{Key: c.engine.slots[id].svc.Key, Old: s.acked, New: now, Fields: what, id: id}
	for at := range ch.dropped() {
		if o, key := c.owner(at); o != 0 && o != id {
			ch.lost = append(ch.lost, move{at, key})
		}
	}
	d.Changes = append(d.Changes, ch)
}

// owner returns the ID and the key of the Service for which the backend should have a frontend, or 0.
func (c *Cursor) owner(at l4Key) (uint32, tracker.Key) {
	if c.leader != nil {
		if id := c.leader.index().holder(at); id != 0 {
			return id, c.leader.acked(id).Key
		}
	} else if o, owned := c.engine.ownership.owner[at]; owned && c.has(o.id) && c.engine.serves(o.id, at) {
		return o.id, c.engine.ownership.port(o.id).Key
	}
	return 0, tracker.Key{}
}

// desired returns the Service that the backend should have for id, or nil.
func (c *Cursor) desired(id uint32) *Port { return c.hold(id, c.unlimited(id)) }

// unlimited returns what desired returns without the limits of the backend: the live Service, or what
// the leader has in effect.
func (c *Cursor) unlimited(id uint32) *Port {
	if c.leader != nil {
		return c.leader.acked(id)
	}
	if !c.has(id) {
		return nil
	}
	return c.engine.desired(id)
}

// acknowledge records the result of Apply for d, and stores the acknowledged parts in
// info.
func (c *Cursor) acknowledge(d *Delta, err error, info *SyncInfo) {
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.detached {
		return
	}
	partly := err != nil && errors.As(err, new(*PartialError)) && !errors.Is(err, ErrNeedFull)
	if err == nil || partly {
		c.node, c.gen = d.Node, d.Gen
	} else if d.Full {
		c.full = true
	}
	var failedNames map[types.NamespacedName]bool
	var failed map[tracker.Key]*Change
	for i := range d.Changes {
		ch := &d.Changes[i]
		if ch.Acknowledged(err) {
			c.ack(ch)
			continue
		}
		if info.Failed++; failed == nil {
			failedNames, failed = map[types.NamespacedName]bool{}, map[tracker.Key]*Change{}
		}
		failed[ch.Key], failedNames[ch.Key.NamespacedName] = ch, true
		if _, again := c.failures[ch.ID()]; !again && !partly && d.Full && ch.New == ch.Old {
			continue // nothing of it was to change, and the next delta is Full, too
		}
		c.fail(ch, err)
	}
	if err != nil && !partly {
		return
	}
	c.removeTakenFrontends(failed)
	later := c.triggers[min(len(d.Triggers), len(c.triggers)):]
	var kept []Trigger
	for _, t := range d.Triggers {
		if failedNames[t.Service] {
			kept = append(kept, t)
		} else {
			c.inEffect(info, t)
		}
	}
	c.triggers = append(kept, later...)
}

func (c *Cursor) ack(ch *Change) {
	id := ch.ID()
	if ch.Fields == FieldAll && diff(ch.Old, ch.New) == 0 { // it was written again
		c.states[id].acked = ch.New
	} else {
		c.setInEffect(id, ch.New)
	}
	delete(c.failures, id)
	if s := &c.states[id]; ch.New == nil {
		s.held, s.over = false, 0
		c.engine.drop(id)
	}
}

// setInEffect records what is in effect of an ID, and notifies the followers if that changed.
func (c *Cursor) setInEffect(id uint32, now *Port) {
	s := &c.states[id]
	c.effect.set(id, s.acked, now)
	if s.acked == now {
		return
	}
	s.acked, s.at = now, time.Since(c.start)
	for _, f := range c.followers {
		f.markDirty(id)
	}
}

// fail records that ch, which may be partly in effect, must be offered again. err is the result of Apply.
func (c *Cursor) fail(ch *Change, err error) {
	id := ch.ID()
	f, again := c.failures[id]
	if !again {
		f.since = c.states[id].since
	}
	f.err = ch.reason(err)
	c.failures[id] = f
	c.markDirty(id)
}

// removeTakenFrontends removes from failed Services the frontends that the backend acknowledged for others.
func (c *Cursor) removeTakenFrontends(failed map[tracker.Key]*Change) {
	for _, ch := range failed {
		if now := ch.without(func(k tracker.Key) bool { return failed[k] != nil }).New; now != ch.Old {
			c.setInEffect(ch.ID(), now)
		}
	}
}

// inEffect records that the changes of triggers are in effect.
func (c *Cursor) inEffect(info *SyncInfo, triggers ...Trigger) {
	info.Triggers = append(info.Triggers, triggers...)
	for _, f := range c.followers {
		for _, t := range triggers {
			f.trigger(t)
		}
	}
}

// drop records that one backend has nothing of id any more.
func (e *Engine) drop(id uint32) {
	s := &e.slots[id]
	s.holders--
	if s.holders == 0 && s.port == nil {
		e.release(id)
	}
}

func (c *Cursor) markDirty(id uint32) {
	c.grow(int(id) + 1)
	if s := &c.states[id]; !s.dirty {
		s.dirty = true
		c.marks = max(c.marks+1, uint64(time.Since(c.start)))
		s.since = c.marks
		if !c.full { // the next delta has all IDs
			c.dirty = append(c.dirty, id)
		}
	}
}

func (c *Cursor) grow(n int) {
	if more := n - len(c.states); more > 0 {
		c.states = append(c.states, make([]state, more)...)
	}
}

func (c *Cursor) trigger(t Trigger) {
	if len(c.triggers) < maxTriggers {
		c.triggers = append(c.triggers, t)
	}
}
