package tracker

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/endpointslice"
)

// Source is a kind of object that must have been listed before anything that a
// tracker knows can be relied on.
type Source uint8

// The sources.
const (
	Services Source = iota
	Slices
	Nodes
)

const allSynced = 1<<Services | 1<<Slices | 1<<Nodes

// Tracker joins Services, their endpoints and the node. It is fed with objects as
// they are, and yields what has changed, Service by Service, to one consumer.
//
// Nothing is yielded before [Tracker.MarkSynced] was called for every [Source]:
// a proxy that acted on half of what exists would remove what the other half
// needs.
//
// All methods are safe for concurrent use.
type Tracker struct {
	mu        sync.Mutex
	services  *ServiceChangeTracker
	endpoints *EndpointsChangeTracker
	topology  TopologyOptions
	node      NodeInfo
	takenNode NodeInfo                          // as of the last Take
	affected  map[types.NamespacedName]struct{} // by changes of the node, nil if none
	synced    uint8                             // a bit for each Source
	notify    []func()                          // only ever appended to
}

// New returns a tracker that knows nothing but c.Node. It fails only with
// [ErrConfig].
func New(c Config) (*Tracker, error) {
	c, err := c.complete()
	if err != nil {
		return nil, err
	}
	c.Node.Addresses = slices.Clone(c.Node.Addresses)
	return &Tracker{
		services:  newServices(c),
		endpoints: newEndpoints(c),
		topology:  c.Topology,
		node:      c.Node,
	}, nil
}

// SetService takes note of a Service as it is now, new or not, and reports
// whether that changes anything. s is not kept. What is wrong with s costs only
// what it is about, and is reported to [Config.Log] and [Config.Events].
func (t *Tracker) SetService(s *v1.Service) (changed bool) {
	return t.change(func() bool { return t.services.Set(s) })
}

// DeleteService forgets a Service and reports whether that changes anything.
func (t *Tracker) DeleteService(name types.NamespacedName) (changed bool) {
	return t.change(func() bool { return t.services.Delete(name) })
}

// SetSlice takes note of an EndpointSlice as it is now, new or not, and reports
// whether that changes the endpoints of a Service. It may come before its Service,
// and is kept whether that is selected or not. s is not kept. What is wrong with
// it is treated as by SetService.
func (t *Tracker) SetSlice(s *discovery.EndpointSlice) (changed bool) {
	return t.change(func() bool { return t.endpoints.Set(s) })
}

// DeleteSlice forgets an EndpointSlice and reports whether that changes the
// endpoints of a Service.
func (t *Tracker) DeleteSlice(name types.NamespacedName) (changed bool) {
	return t.change(func() bool { return t.endpoints.Delete(name) })
}

// SetNode takes note of the node as it is now and reports whether that is news.
//
// The tracker does not lose its node by accident. If n.Name is empty, the tracker
// keeps the name that it has. If n is the zero value, which [NodeInfoOf] returns
// for a Node object that was deleted, SetNode changes nothing: without its object
// the machine still has its endpoints, its addresses and its zone. To remove the
// zone and the addresses, pass a NodeInfo that has a Name and nothing else.
//
// Services come up again only if what [Select] chooses for the node may change by
// it. To find them, every endpoint is looked at if the name or zone changes, which
// is when a node is first known and hardly ever after.
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

// Node returns the node as it is now.
func (t *Tracker) Node() NodeInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.node
}

// MarkSynced says that everything there is of the sources has been handed in.
// Other values than the constants are ignored.
func (t *Tracker) MarkSynced(sources ...Source) {
	t.change(func() bool {
		was := t.synced
		for _, s := range sources {
			t.synced |= 1 << s & allSynced
		}
		return t.synced == allSynced && was != allSynced
	})
}

// Synced reports whether all sources have been marked.
func (t *Tracker) Synced() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced == allSynced
}

// Notify has f called after each change from now on, once all sources are synced,
// and when that becomes so. f is called by the goroutine that made the change,
// without the tracker's lock, perhaps by several at once; it should return soon,
// as the runner's Trigger does. Several may be registered; there is no way back.
func (t *Tracker) Notify(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.notify = append(t.notify, f)
}

// change calls f with the lock held, and tells if it changed something.
func (t *Tracker) change(f func() bool) (changed bool) {
	notify := func() []func() {
		t.mu.Lock()
		defer t.mu.Unlock() // also if a hook panics
		changed = f()
		if !changed || t.synced != allSynced {
			return nil
		}
		return t.notify
	}()
	for _, f := range notify {
		f()
	}
	return changed
}

// Take returns what has changed since the last Take. It is for one consumer: what
// it returns is not returned again. Before all sources are synced only
// [Changes.Node] is set, and everything is kept for later.
//
// Its cost depends on the Services that have changed and their endpoints alone.
func (t *Tracker) Take() Changes {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := Changes{Node: t.node}
	if t.synced != allSynced {
		return c
	}
	c.NodeChanged = !t.node.Equal(t.takenNode)
	t.takenNode = t.node

	services, endpoints := t.services, t.endpoints
	services.mu.Lock()
	defer services.mu.Unlock()
	endpoints.mu.Lock()
	defer endpoints.mu.Unlock()
	if n := len(services.pending); n > 0 {
		c.Updates = make([]Update, 0, n)
	}
	var room []PortState // for some updates at once
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
		c.Updates = append(c.Updates, u)
	}
	// A Service that has changed as well comes with its endpoints, so that its name
	// is looked up once. Endpoints of one that nothing is forwarded for concern
	// nobody.
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

// join puts a Service's ports and endpoints together. Both are sorted alike.
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

// comparePort is [Key.Compare] for a port of the Service that k is of.
func comparePort(p *PortEndpoints, k *Key) int {
	if c := strings.Compare(p.Name, k.Port); c != 0 {
		return c
	}
	if c := strings.Compare(string(p.Protocol), string(k.Protocol)); c != 0 {
		return c
	}
	return cmp.Compare(familyOf(p.Type), k.Family)
}

// affectedBy notes the Services of the last Take that are served otherwise on one
// node than on the other. The others, and what is still to be taken, come up in
// any case.
func (t *Tracker) affectedBy(a, b NodeInfo) {
	if a.Name == b.Name && a.Zone == b.Zone {
		return
	}
	for name, ports := range t.services.all() {
		states := make([]PortState, len(ports))
		join(states, ports, t.endpoints.Get(name))
		for _, s := range states {
			x := Select(s.Port, s.Endpoints, a, t.topology)
			y := Select(s.Port, s.Endpoints, b, t.topology)
			if x.Mode != y.Mode || !slices.Equal(x.Cluster, y.Cluster) || !slices.Equal(x.Local, y.Local) {
				if t.affected == nil {
					t.affected = map[types.NamespacedName]struct{}{}
				}
				t.affected[name] = struct{}{}
				break
			}
		}
	}
}
