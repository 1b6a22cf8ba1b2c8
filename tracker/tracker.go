package tracker

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/endpointslice"
)

// Kind is a kind of object that the caller must have listed completely before the
// tracker's results are reliable.
type Kind uint8

// The kinds of objects.
const (
	KindServices Kind = iota
	KindSlices
	KindNodes
)

// String returns "Services", "Slices" or "Nodes".
func (k Kind) String() string {
	switch k {
	case KindServices:
		return "Services"
	case KindSlices:
		return "Slices"
	case KindNodes:
		return "Nodes"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Tracker joins Services, their endpoints and the node. The caller passes the current state of objects. One consumer
// calls [Tracker.Take], which returns the Services that changed, but none before [Tracker.MarkSynced] was called for
// every [Kind] of [Config.Kinds]: a proxy that acted on an incomplete view would remove rules that are still needed.
//
// All methods are safe for concurrent use. [New] makes one; the zero value must not be used.
type Tracker struct {
	mu        sync.Mutex
	services  *ServiceChangeTracker
	endpoints *EndpointsChangeTracker
	node      NodeInfo
	affected  map[types.NamespacedName]struct{} // Services affected by node changes; nil if none
	synced    uint8                             // a bit for each Source
	sources   uint8                             // the bits of Config.Kinds
	hook      func(*ServicePort, *Endpoint) error
	completed map[types.NamespacedName][]completed // by hook, nil without it
	notify    []*func()                            // replaced, never modified
}

// New returns a tracker that holds c.Node and no other objects. The error is about c.
func New(c Config) (*Tracker, error) {
	c, err := c.complete()
	if err != nil {
		return nil, err
	}
	c.Node.Addresses = slices.Clone(c.Node.Addresses)
	t := &Tracker{
		services:  newServices(c),
		endpoints: newEndpoints(c),
		node:      c.Node,
		hook:      c.OnServiceEndpoint,
	}
	for _, s := range c.Kinds {
		t.sources |= 1 << s
	}
	if t.hook != nil {
		t.completed = map[types.NamespacedName][]completed{}
	}
	return t, nil
}

// SetService stores the current state of a Service and reports whether anything changed. It does not keep s. Unusable
// parts of s are skipped and reported to [Config.Log] and [Config.Events].
func (t *Tracker) SetService(s *v1.Service) (changed bool) {
	return t.change(func() bool { return t.services.Set(s) })
}

// DeleteService removes a Service and reports whether anything changed.
func (t *Tracker) DeleteService(name types.NamespacedName) (changed bool) {
	return t.change(func() bool { return t.services.Delete(name) })
}

// SetSlice stores the current state of an EndpointSlice and reports whether a Service's endpoints changed. The slice
// may arrive before its Service, and is kept even if the Service is not selected. SetSlice does not keep s. Unusable
// parts are reported as by SetService.
func (t *Tracker) SetSlice(s *discovery.EndpointSlice) (changed bool) {
	return t.change(func() bool { return t.endpoints.Set(s) })
}

// DeleteSlice removes an EndpointSlice and reports whether a Service's endpoints
// changed.
func (t *Tracker) DeleteSlice(name types.NamespacedName) (changed bool) {
	return t.change(func() bool { return t.endpoints.Delete(name) })
}

// SetNode stores the current node information and reports whether it changed.
//
// If n.Name is empty, the tracker keeps the name that it has. If n is the zero value, which [NodeInfoOf] returns for
// a deleted Node object, SetNode changes nothing: the machine still has its endpoints, addresses and zone.
// (kube-proxy exits.) To remove the zone and the addresses, pass a NodeInfo with a Name only.
//
// The next Take returns a Service again only if the result of [Select] for it may differ. SetNode visits every
// endpoint if the name or zone changed.
func (t *Tracker) SetNode(n NodeInfo) (changed bool) {
	if n.Equal(NodeInfo{}) {
		return false
	}
	n.Addresses = slices.Clone(n.Addresses)
	return t.change(func() bool {
		if n.Name == "" {
			n.Name = t.node.Name
		}
		if t.node.Equal(n) {
			return false
		}
		t.affectedBy(t.node, n)
		t.node = n
		return true
	})
}

// Node returns the current node information.
func (t *Tracker) Node() NodeInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.node
}

// MarkSynced declares that the caller has passed all existing objects of the sources.
// It ignores sources that are not in [Config.Kinds].
func (t *Tracker) MarkSynced(sources ...Kind) {
	t.change(func() bool {
		was := t.synced
		for _, s := range sources {
			t.synced |= 1 << s & t.sources
		}
		return t.synced == t.sources && was != t.sources
	})
}

// Missing returns the sources for which [Tracker.MarkSynced] has not been called yet, in the order of the constants,
// or nil.
func (t *Tracker) Missing() []Kind {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []Kind
	for s := KindServices; s <= KindNodes; s++ {
		if t.sources&^t.synced&(1<<s) != 0 {
			out = append(out, s)
		}
	}
	return out
}

// Synced reports whether MarkSynced was called for all of [Config.Kinds].
func (t *Tracker) Synced() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced == t.sources
}

// Notify registers f to be called after each later change once all sources are synced, and when the last source is
// synced. The goroutine that made the change calls f without the tracker's lock, so calls may be concurrent. f should
// return quickly, as the runner's Trigger does. Notify ignores a nil f. end removes f, and may be called several
// times; a call of f that has begun may still be running when end returns.
func (t *Tracker) Notify(f func()) (end func()) {
	if f == nil {
		return func() {}
	}
	own := &f
	t.mu.Lock()
	defer t.mu.Unlock()
	t.notify = append(slices.Clone(t.notify), own)
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.notify = slices.DeleteFunc(slices.Clone(t.notify), func(o *func()) bool { return o == own })
	}
}

// change calls f with the lock held and calls the notify functions if f returns true.
func (t *Tracker) change(f func() bool) (changed bool) {
	notify := func() []*func() {
		t.mu.Lock()
		defer t.mu.Unlock() // even if a hook panics
		changed = f()
		if !changed || t.synced != t.sources {
			return nil
		}
		return t.notify
	}()
	for _, f := range notify {
		(*f)()
	}
	return changed
}

// Take returns the changes since the previous Take, to one consumer. Before all sources are synced it sets only
// [Changes].Node, and keeps all changes for later. Its cost is proportional to the changed Services and their
// endpoints.
func (t *Tracker) Take() Changes {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := Changes{Node: t.node}
	if t.synced != t.sources {
		return c
	}
	services, endpoints := t.services, t.endpoints
	services.mu.Lock()
	defer services.mu.Unlock()
	endpoints.mu.Lock()
	defer endpoints.mu.Unlock()
	if n := len(services.pending); n > 0 {
		c.Updates = make([]Update, 0, n)
	}
	var room []PortState // one allocation for several updates
	add := func(s *trackedService, eps []PortEndpoints, triggers []time.Time) {
		u := Update{Name: s.Name(), Triggers: triggers}
		if s.pending != 0 {
			services.take(s)
		}
		if n := len(s.taken); n > 0 {
			if len(room) < n {
				room = make([]PortState, max(n, min(cap(c.Updates)-len(c.Updates), 256)))
			}
			u.Ports, room = room[:n:n], room[n:]
			join(u.Ports, s.taken, eps)
		}
		delete(t.affected, u.Name)
		if t.hook != nil {
			t.complete(u)
		}
		c.Updates = append(c.Updates, u)
	}
	// A Service that changed as well is added here together with its endpoints, so that its name is looked up once.
	endpoints.cache.TakeFunc(func(ch endpointslice.Change[Endpoint]) {
		if s := services.services.Get(ch.Service); s != nil {
			add(s, ch.New, endpoints.triggers[ch.Service])
		}
	})
	endpoints.forgetTriggers()
	for _, s := range services.pending {
		if s.pending != 0 {
			add(s, endpoints.cache.Ports(s.Name()), nil)
		}
	}
	services.pending = emptied(services.pending)
	for name := range t.affected {
		if s := services.services.Get(name); s != nil {
			add(s, endpoints.cache.Ports(name), nil)
		}
	}
	t.affected = nil
	return c
}

// join combines a Service's ports and endpoints. Both have the same order.
func join(out []PortState, ports []*ServicePort, endpoints []PortEndpoints) {
	for i, p := range ports {
		out[i].Port = p
		for len(endpoints) > 0 {
			d := comparePort(&endpoints[0], &p.Key)
			if d > 0 {
				break
			}
			if d == 0 {
				out[i].Endpoints = endpoints[0].Endpoints
			}
			endpoints = endpoints[1:]
		}
	}
}

func comparePort(p *PortEndpoints, k *Key) int {
	if c := strings.Compare(p.Name, k.Port); c != 0 {
		return c
	}
	if c := strings.Compare(string(p.Protocol), string(k.Protocol)); c != 0 {
		return c
	}
	return cmp.Compare(familyOf(p.Type), k.Family)
}

// affectedBy records the Services of the last Take whose selected endpoints differ between the nodes a and b, except
// pending ones.
func (t *Tracker) affectedBy(a, b NodeInfo) {
	if a.Name == b.Name && a.Zone == b.Zone {
		return
	}
	for name, ports := range t.services.all() {
		states := make([]PortState, len(ports))
		join(states, ports, t.endpoints.Get(name))
		for i, done := range t.completed[name] { // of the last Take, like ports
			states[i].Endpoints = done.out
		}
		for _, s := range states {
			x := Select(s.Port, s.Endpoints, a)
			y := Select(s.Port, s.Endpoints, b)
			if !slices.Equal(x.Cluster, y.Cluster) || !slices.Equal(x.Local, y.Local) {
				if t.affected == nil {
					t.affected = map[types.NamespacedName]struct{}{}
				}
				t.affected[name] = struct{}{}
				break
			}
		}
	}
}

// Changes is the result of [Tracker.Take]: what changed since the previous Take.
type Changes struct {
	// Updates has one entry for each Service that may differ, in no particular order.
	Updates []Update
	// Node is the current node. Updates includes the Services whose endpoint selection its change affects.
	Node NodeInfo
}

// Update is the current state of one Service, in every family.
type Update struct {
	// Name is the name of the Service.
	Name types.NamespacedName
	// Ports is empty if the Service was deleted or has no usable port.
	Ports []PortState
	// Triggers holds the times at which the endpoint changes in this update were caused (annotation
	// endpoints.kubernetes.io/last-change-trigger-time), to measure how long a change takes to reach the kernel.
	Triggers []time.Time
}

// PortState is one Service port with its endpoints.
type PortState struct {
	// Port is never nil in the result of Take.
	Port *ServicePort
	// Endpoints holds every known endpoint of the port, whatever its conditions,
	// sorted by address. It must not be modified.
	Endpoints []*Endpoint
}
