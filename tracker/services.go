package tracker

import (
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/byname"
	"github.com/go-proxier/proxier/internal/complaint"
)

// ServicePortMap maps keys to Service ports.
type ServicePortMap map[Key]*ServicePort

// ServiceChange describes the change of one Service.
type ServiceChange struct {
	// Name is the name of the Service.
	Name types.NamespacedName
	// Old holds the Service's ports at the previous Take and New the current ones,
	// sorted by key. An unchanged port is the same pointer in both.
	Old, New []*ServicePort
}

// ServiceChangeTracker turns Services into [ServicePort] values and reports which changed. It is the Service half of
// [Tracker]. All methods are safe for concurrent use. Unlike kube-proxy's, one tracker handles both families,
// [ServiceChangeTracker.Update] reports whether this call changed a port (kube-proxy's: whether any change is
// pending), and Take returns old and new values; there is no map to update.
//
// [NewServiceChangeTracker] makes one; the zero value must not be used.
type ServiceChangeTracker struct {
	mu       sync.Mutex
	selector Selector
	builder  builder
	services byname.Map[*trackedService]
	pending  []*trackedService               // in order of arrival, except after removals
	health   map[types.NamespacedName]uint16 // at the last Take
}

// trackedService is a Service that has ports, or had some at the last Take.
type trackedService struct {
	// taken holds the ports at the last Take and current the ports now: the same pointers unless the Service is
	// pending.
	taken, current []*ServicePort
	pending        int       // 1 + the index in ServiceChangeTracker.pending, or 0
	uid            types.UID // of the object, if there is an EventSink
}

// Name implements the element type of [byname.Map].
func (s *trackedService) Name() types.NamespacedName {
	if len(s.current) > 0 {
		return s.current[0].Key.NamespacedName
	}
	return s.taken[0].Key.NamespacedName
}

// NewServiceChangeTracker returns an empty tracker. The error is about c.
func NewServiceChangeTracker(c Config) (*ServiceChangeTracker, error) {
	c, err := c.complete()
	if err != nil {
		return nil, err
	}
	return newServices(c), nil
}

func newServices(c Config) *ServiceChangeTracker {
	return &ServiceChangeTracker{
		selector: c.Selector,
		builder:  builder{families: c.Families, noExternalIPs: c.IgnoreExternalIPs, hook: c.OnService, reporter: newReporter(c)},
		services: byname.New[*trackedService](),
		health:   map[types.NamespacedName]uint16{},
	}
}

// Update stores current as [ServiceChangeTracker.Set] does. It deletes previous if
// current is nil or has another name. Either may be nil.
func (t *ServiceChangeTracker) Update(previous, current *v1.Service) (changed bool) {
	if previous != nil {
		name := types.NamespacedName{Namespace: previous.Namespace, Name: previous.Name}
		if current == nil || current.Namespace != name.Namespace || current.Name != name.Name {
			changed = t.Delete(name)
		}
	}
	if current != nil {
		changed = t.Set(current) || changed
	}
	return changed
}

// Set stores the current state of a Service and reports whether any of its ports
// changed. Set does not keep s.
func (t *ServiceChangeTracker) Set(s *v1.Service) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := &t.builder
	if s == nil {
		b.leave(LeftOut{Reason: ReasonInvalid, Whole: true}, "nil Service")
		b.reporter.service(&v1.Service{}, &b.left)
		return false
	}
	defer b.reporter.service(s, &b.left)
	if s.Namespace == "" || s.Name == "" {
		b.leave(LeftOut{Reason: ReasonInvalid, Whole: true}, "missing name or namespace (name %q, namespace %q)", complaint.Value(s.Name), complaint.Value(s.Namespace))
		return false
	}
	var ports []*ServicePort
	if reason, why := t.selector.rejects(s); reason != "" {
		b.leave(LeftOut{Reason: reason, Whole: true, Expected: true}, "%s", why)
	} else {
		ports = b.build(s)
	}
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	changed = t.set(name, ports)
	if t.builder.reporter.events != nil {
		if known := t.services.Get(name); known != nil && known.uid != s.UID {
			known.uid = types.UID(strings.Clone(string(s.UID)))
		}
	}
	return changed
}

func (t *ServiceChangeTracker) reference(name types.NamespacedName) v1.ObjectReference {
	ref := v1.ObjectReference{Kind: "Service", APIVersion: "v1", Namespace: name.Namespace, Name: name.Name}
	if s := t.services.Get(name); s != nil {
		ref.UID = s.uid
	}
	return ref
}

// Delete removes a Service and reports whether it had ports.
func (t *ServiceChangeTracker) Delete(name types.NamespacedName) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.set(name, nil)
}

func (t *ServiceChangeTracker) set(name types.NamespacedName, ports []*ServicePort) (changed bool) {
	s := t.services.Get(name)
	if s == nil {
		if len(ports) == 0 {
			return false
		}
		s = &trackedService{current: ports}
		t.services.Put(s)
		t.addPending(s)
		return true
	}
	for i, p := range ports {
		ports[i] = reuse(reuse(p, s.current), s.taken)
	}
	if slices.Equal(ports, s.current) {
		return false
	}
	if !slices.Equal(ports, s.taken) {
		s.current = ports
		t.addPending(s)
		return true
	}
	// The Service changed and changed back.
	if len(s.taken) == 0 {
		t.services.Delete(s)
	}
	s.current = s.taken // free the second array
	if s.pending != 0 {
		last := len(t.pending) - 1
		t.pending[s.pending-1] = t.pending[last]
		t.pending[last].pending = s.pending
		t.pending[last] = nil
		t.pending = t.pending[:last]
		s.pending = 0
	}
	return true
}

func (t *ServiceChangeTracker) addPending(s *trackedService) {
	if s.pending == 0 {
		t.pending = append(t.pending, s)
		s.pending = len(t.pending)
	}
}

// reuse returns the element of ports that equals p, or p if no element does.
func reuse(p *ServicePort, ports []*ServicePort) *ServicePort {
	i, ok := slices.BinarySearchFunc(ports, p.Key, func(p *ServicePort, k Key) int { return p.Key.Compare(k) })
	if ok && ports[i].Equal(p) {
		return ports[i]
	}
	return p
}

// Take returns the changes since the previous Take, sorted by name. A Service that
// changed and changed back is left out.
func (t *ServiceChangeTracker) Take() []ServiceChange {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.pending) == 0 {
		return nil
	}
	out := make([]ServiceChange, 0, len(t.pending))
	for _, s := range t.pending {
		out = append(out, ServiceChange{s.Name(), s.taken, s.current})
		t.take(s)
	}
	t.pending = emptied(t.pending)
	slices.SortFunc(out, func(a, b ServiceChange) int { return byname.Compare(a.Name, b.Name) })
	return out
}

// take makes the current ports of a pending Service those of the last Take. The
// caller removes the Service from t.pending.
func (t *ServiceChangeTracker) take(s *trackedService) {
	name := s.Name()
	if len(s.current) == 0 {
		t.services.Delete(s)
	}
	s.taken, s.pending = s.current, 0
	if n := healthCheckNodePort(s.taken); n != 0 {
		t.health[name] = n
	} else {
		delete(t.health, name)
	}
}

// Get returns a Service's ports at the last Take, sorted by key. The slice must not
// be modified.
func (t *ServiceChangeTracker) Get(name types.NamespacedName) []*ServicePort {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.services.Get(name); s != nil {
		return s.taken
	}
	return nil
}

// Map returns all ports at the last Take in a new map. Its cost is proportional to
// the number of ports.
func (t *ServiceChangeTracker) Map() ServicePortMap {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make(ServicePortMap, t.services.Len())
	for s := range t.services.All() {
		for _, p := range s.taken {
			out[p.Key] = p
		}
	}
	return out
}

// all returns every Service that had ports at the last Take, in no particular order.
func (t *ServiceChangeTracker) all() iter.Seq2[types.NamespacedName, []*ServicePort] {
	return func(yield func(types.NamespacedName, []*ServicePort) bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		for s := range t.services.All() {
			if len(s.taken) > 0 && !yield(s.Name(), s.taken) {
				return
			}
		}
	}
}

// HealthCheckNodePorts returns the health-check node port of every Service that
// had one at the last Take, in a new map.
func (t *ServiceChangeTracker) HealthCheckNodePorts() map[types.NamespacedName]uint16 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.health)
}

// healthCheckNodePort returns the first non-zero health-check node port. All ports of
// a Service have the same one unless a hook removed it from some.
func healthCheckNodePort(ports []*ServicePort) uint16 {
	for _, p := range ports {
		if p.HealthCheckNodePort != 0 {
			return p.HealthCheckNodePort
		}
	}
	return 0
}

// emptied returns list with length 0, or nil if its capacity is large, to free the
// memory.
func emptied[T any](list []T) []T {
	if cap(list) > 1024 {
		return nil
	}
	clear(list)
	return list[:0]
}
