package tracker

import (
	"container/list"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// Fanout gives the changes of one Tracker to several consumers, each for a node of its own,
// such as one ruleset.Engine per node. They share the Tracker's memory, which is most of what
// a Tracker and an Engine take. Its methods are safe for concurrent use.
//
// The hooks run once for all consumers, and [Tracker.Recompute] reaches all of them. The node of
// the Tracker should be the zero NodeInfo, which the consumers do not see.
// Package ruleset/placement computes many nodes with one Engine, and takes far less still.
//
// [NewFanout] makes one; the zero value must not be used.
type Fanout struct {
	tracker *Tracker

	mu  sync.Mutex
	seq uint64
	// log holds a *logged for each Service, the latest change last. A deleted Service stays
	// until every view has taken it; deleted counts these.
	log     *list.List
	byName  map[types.NamespacedName]*list.Element
	deleted int
	views   map[*View]struct{}
	// events holds the last message of each reason about a Service, because every consumer
	// sends it.
	events map[types.NamespacedName]map[Reason]string
}

// logged is the last change of a Service.
type logged struct {
	update Update
	// seq is the number of the change.
	seq uint64
}

// NewFanout returns a Fanout, which becomes the only consumer of t.
func NewFanout(t *Tracker) *Fanout {
	return &Fanout{
		tracker: t, log: list.New(), byName: map[types.NamespacedName]*list.Element{},
		views: map[*View]struct{}{}, events: map[types.NamespacedName]map[Reason]string{},
	}
}

// View returns the changes as a consumer on node n takes them. Its first Take returns every
// Service. Until [View.End], the Fanout remembers deleted Services for a view that lags.
func (f *Fanout) View(n NodeInfo) *View {
	v := &View{fanout: f, node: cloneNode(n)}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.views[v] = struct{}{}
	return v
}

func cloneNode(n NodeInfo) NodeInfo {
	n.Addresses = slices.Clone(n.Addresses)
	return n
}

// pull takes the changes of the Tracker. The caller holds f.mu.
func (f *Fanout) pull() {
	for _, u := range f.tracker.Take().Updates {
		f.seq++
		e, known := f.byName[u.Name], true
		if e == nil {
			if known = false; len(u.Ports) == 0 {
				continue
			}
			e = f.log.PushBack(&logged{})
			f.byName[u.Name] = e
		}
		l := e.Value.(*logged)
		if was := known && len(l.update.Ports) == 0; was != (len(u.Ports) == 0) {
			if was {
				f.deleted--
			} else {
				f.deleted++
				delete(f.events, u.Name)
			}
		}
		l.update, l.seq = u, f.seq
		f.log.MoveToBack(e)
	}
}

// prune removes deleted Services that every view has taken. It does so when they are as many
// as the others, so that a change pays for a bounded part of it.
func (f *Fanout) prune() {
	if f.deleted < 64 || f.deleted < f.log.Len()/2 {
		return
	}
	taken := f.seq
	for v := range f.views {
		taken = min(taken, v.taken)
	}
	for e := f.log.Front(); e != nil; {
		next, l := e.Next(), e.Value.(*logged)
		if l.seq > taken {
			return
		}
		if len(l.update.Ports) == 0 {
			f.log.Remove(e)
			delete(f.byName, l.update.Name)
			f.deleted--
		}
		e = next
	}
}

// View is one consumer's part of a [Fanout]. It has the methods that a ruleset.Engine needs of
// a [Tracker]. They are safe for concurrent use. [Fanout.View] makes one.
type View struct {
	fanout *Fanout

	// Guarded by fanout.mu.
	node   NodeInfo
	taken  uint64        // the number of the last change that was taken
	notify []*viewNotify // replaced, never modified
	ended  bool
}

// viewNotify is a function that View.Notify registered.
type viewNotify struct {
	call, endTracker func()
}

// SetNode replaces the node and reports whether it changed. If its name or zone changed, the
// next Take returns every Service.
func (v *View) SetNode(n NodeInfo) (changed bool) {
	f := v.fanout
	f.mu.Lock()
	if v.node.Equal(n) {
		f.mu.Unlock()
		return false
	}
	if n.Name != v.node.Name || n.Zone != v.node.Zone {
		v.taken = 0
	}
	v.node = cloneNode(n)
	calls := v.notify
	f.mu.Unlock()
	if f.tracker.Synced() {
		for _, call := range calls {
			call.call()
		}
	}
	return true
}

// Node returns the current node.
func (v *View) Node() NodeInfo {
	v.fanout.mu.Lock()
	defer v.fanout.mu.Unlock()
	return v.node
}

// Missing returns what [Tracker.Missing] returns.
func (v *View) Missing() []Kind { return v.fanout.tracker.Missing() }

// Take returns the changes since the previous Take of this view, as [Tracker.Take] does, and
// none after End. Its cost is proportional to the Services that changed since. Triggers holds
// only those of a Service's latest change, and none in the first Take.
func (v *View) Take() Changes {
	f := v.fanout
	f.mu.Lock()
	defer f.mu.Unlock()
	c := Changes{Node: v.node}
	if v.ended || !f.tracker.Synced() {
		return c
	}
	f.pull()
	for e := f.log.Back(); e != nil; e = e.Prev() {
		l := e.Value.(*logged)
		if l.seq <= v.taken {
			break
		}
		u := l.update
		if v.taken == 0 {
			u.Triggers = nil
		}
		c.Updates = append(c.Updates, u)
	}
	v.taken = f.seq
	f.prune()
	return c
}

// Notify registers f as [Tracker.Notify] does. It is also called after [View.SetNode]. End
// removes it.
func (v *View) Notify(f func()) (end func()) {
	if f == nil {
		return func() {}
	}
	v.fanout.mu.Lock()
	defer v.fanout.mu.Unlock()
	if v.ended {
		return func() {}
	}
	own := &viewNotify{f, v.fanout.tracker.Notify(f)}
	v.notify = append(slices.Clone(v.notify), own)
	return func() {
		own.endTracker()
		v.fanout.mu.Lock()
		defer v.fanout.mu.Unlock()
		v.notify = slices.DeleteFunc(slices.Clone(v.notify), func(o *viewNotify) bool { return o == own })
	}
}

// Event calls [Tracker.Event], unless the last message of any view with the same reason about
// the Service was the same.
func (v *View) Event(service types.NamespacedName, warning bool, reason Reason, message string) {
	f := v.fanout
	f.mu.Lock()
	last := f.events[service]
	repeated := last[reason] == message
	if !repeated && f.byName[service] != nil {
		if last == nil {
			last = map[Reason]string{}
			f.events[service] = last
		}
		last[reason] = message
	}
	f.mu.Unlock()
	if !repeated {
		f.tracker.Event(service, warning, reason, message)
	}
}

// End removes the view and the functions that Notify registered. Ending it again does nothing.
func (v *View) End() {
	f := v.fanout
	f.mu.Lock()
	v.ended = true
	delete(f.views, v)
	all := v.notify
	v.notify = nil
	f.mu.Unlock()
	for _, n := range all {
		n.endTracker()
	}
}
