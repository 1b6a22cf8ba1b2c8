package tracker

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/byname"
)

// ServicePortMap is Service ports by key.
type ServicePortMap map[Key]*ServicePort

// ServiceChange is what happened to one Service.
type ServiceChange struct {
	// Name is the Service's.
	Name types.NamespacedName
	// Old is the ports the Service had at the Take before, New those it has,
	// sorted by key. A port that did not change is the same pointer in both.
	Old, New []*ServicePort
}

// ServiceChangeTracker turns Services into [ServicePort] values and says which
// have changed. It is a part of [Tracker] that can be used alone; all its methods
// are safe for concurrent use.
//
// Those who know kube-proxy's type of this name will find these differences:
// there is one tracker for both families; [ServiceChangeTracker.Update] reports
// whether this call changed something, where kube-proxy's reports whether anything
// at all is pending, because "should I schedule a sync" is answered by either and
// "did this matter" only by ours; what is compared is the ports a Service leads
// to, so that a change of labels is none; changes are taken from the tracker with
// old and new values, in place of a map that has to be updated and may not be
// kept; and the objects before a change are not needed.
type ServiceChangeTracker struct {
	mu       sync.Mutex
	selector Selector
	builder  builder
	services byname.Map[*trackedService]
	pending  []*trackedService               // in the order they came, but for removals
	health   map[types.NamespacedName]uint16 // as of the last Take
}

// trackedService is a Service that has ports, or had at the last Take.
type trackedService struct {
	// taken is as of the last Take, current as of now. They are the same, as
	// pointers, unless the Service is pending.
	taken, current []*ServicePort
	pending        int // 1 + the index in ServiceChangeTracker.pending, or 0
}

// Name is for [byname.Map].
func (s *trackedService) Name() types.NamespacedName {
	if len(s.current) > 0 {
		return s.current[0].Key.NamespacedName
	}
	return s.taken[0].Key.NamespacedName
}

// NewServiceChangeTracker returns a tracker that knows no Services. It fails only
// with [ErrConfig].
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
		builder:  builder{families: c.Families, noExternalIPs: c.IgnoreExternalIPs, hook: c.OnService, reporter: reporter{c.Log, c.Events}},
		services: byname.New[*trackedService](),
		health:   map[types.NamespacedName]uint16{},
	}
}

// Update is [ServiceChangeTracker.Set] of current, and Delete of previous if that
// is another Service or current is nil, for callers that are given both.
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

// Set takes note of a Service as it is now, new or not, and reports whether that
// changes any of its ports. s is not kept.
func (t *ServiceChangeTracker) Set(s *v1.Service) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s == nil {
		t.builder.reporter.service(&v1.Service{}, ReasonInvalid, errors.New("nil Service"))
		return false
	}
	if s.Namespace == "" || s.Name == "" {
		t.builder.reporter.service(s, ReasonInvalid, fmt.Errorf("name %q in namespace %q", s.Name, s.Namespace))
		return false
	}
	var ports []*ServicePort
	if t.selector.MatchesService(s) {
		ports = t.builder.build(s)
	}
	return t.set(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, ports)
}

// Delete forgets a Service and reports whether it had ports.
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
		t.mark(s)
		return true
	}
	for i, p := range ports {
		ports[i] = known(known(p, s.current), s.taken)
	}
	if slices.Equal(ports, s.current) {
		return false
	}
	if !slices.Equal(ports, s.taken) {
		s.current = ports
		t.mark(s)
		return true
	}
	// Changed and changed back.
	if len(s.taken) == 0 {
		t.services.Delete(s)
	}
	s.current = s.taken // one array will do
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

// mark notes that the next Take will have s.
func (t *ServiceChangeTracker) mark(s *trackedService) {
	if s.pending == 0 {
		t.pending = append(t.pending, s)
		s.pending = len(t.pending)
	}
}

// known returns the port of ports that says the same as p, else p.
func known(p *ServicePort, ports []*ServicePort) *ServicePort {
	i, ok := slices.BinarySearchFunc(ports, p.Key, func(p *ServicePort, k Key) int { return p.Key.Compare(k) })
	if ok && ports[i].Equal(p) {
		return ports[i]
	}
	return p
}

// PendingChanges returns the names of the Services that the next Take will have.
func (t *ServiceChangeTracker) PendingChanges() []types.NamespacedName {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]types.NamespacedName, 0, len(t.pending))
	for _, s := range t.pending {
		out = append(out, s.Name())
	}
	slices.SortFunc(out, compareNames)
	return out
}

// Take returns what has changed since the last Take, sorted by name. What was
// changed and changed back is not in it.
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
	slices.SortFunc(out, func(a, b ServiceChange) int { return compareNames(a.Name, b.Name) })
	return out
}

// take makes what a pending Service is now what it was at the last Take. It stays
// in t.pending, which is the caller's to empty.
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

// Get returns a Service's ports as of the last Take, sorted by key. The slice
// must not be written to.
func (t *ServiceChangeTracker) Get(name types.NamespacedName) []*ServicePort {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.services.Get(name); s != nil {
		return s.taken
	}
	return nil
}

// Map returns all ports as of the last Take, in a new map. It costs a step for
// each.
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

// all returns every Service that had ports at the last Take, in no order.
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

// healthCheckNodePort returns the one that all of a Service's ports share, unless
// a hook took it from some.
func healthCheckNodePort(ports []*ServicePort) uint16 {
	for _, p := range ports {
		if p.HealthCheckNodePort != 0 {
			return p.HealthCheckNodePort
		}
	}
	return 0
}

func compareNames(a, b types.NamespacedName) int {
	if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}

// emptied returns an empty list, without keeping the room that very many elements
// once took.
func emptied[T any](list []T) []T {
	if cap(list) > 1024 {
		return nil
	}
	clear(list)
	return list[:0]
}
