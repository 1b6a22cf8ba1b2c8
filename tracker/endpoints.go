package tracker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/endpointslice"
	"github.com/go-proxier/proxier/internal/complaint"
)

// EndpointsMap maps each Service port to its endpoints.
type EndpointsMap map[Key][]*Endpoint

// PortEndpoints holds the endpoints of one port of a Service in one family.
type PortEndpoints = endpointslice.Port[Endpoint]

// EndpointsChange describes the change of one Service's endpoints.
type EndpointsChange struct {
	// Name is the name of the Service.
	Name types.NamespacedName
	// Old holds the endpoints at the previous Take and New the current ones, sorted by port name, protocol and
	// family, without empty ports. They share unchanged endpoints, and the memory of unchanged lists.
	Old, New []PortEndpoints
	// Triggers holds the times at which the changes were caused, where the slices
	// have the annotation; see [Update].
	Triggers []time.Time
}

// EndpointsChangeTracker turns EndpointSlices into [Endpoint] values for each Service port, as package endpointslice
// describes, and reports which Services' endpoints changed. It is the endpoints half of [Tracker] and needs no
// Services. All methods are safe for concurrent use. Unlike kube-proxy's, one tracker handles both families, and Take
// returns old and new values; there is no map to update.
//
// [NewEndpointsChangeTracker] makes one; the zero value must not be used.
type EndpointsChangeTracker struct {
	mu       sync.Mutex
	selector Selector
	families []Family
	reporter reporter
	cache    *endpointslice.Cache[Endpoint]
	triggers map[types.NamespacedName][]time.Time
	start    time.Time
	left     leftOuts
}

var (
	errHeadlessLabel = errors.New("it has the label " + v1.IsHeadlessService)
	errFamily        = errors.New("the proxy does not serve its address family")
)

// maxTriggers bounds the trigger times kept for one Service between calls of Take: the earliest, which show the
// longest delay.
const maxTriggers = 256

// NewEndpointsChangeTracker returns an empty tracker. The error is about c.
func NewEndpointsChangeTracker(c Config) (*EndpointsChangeTracker, error) {
	c, err := c.complete()
	if err != nil {
		return nil, err
	}
	return newEndpoints(c), nil
}

func newEndpoints(c Config) *EndpointsChangeTracker {
	t := &EndpointsChangeTracker{
		selector: c.Selector,
		families: c.Families,
		reporter: newReporter(c),
		triggers: map[types.NamespacedName][]time.Time{},
		start:    time.Now(),
	}
	hook := c.OnEndpoint
	t.cache = endpointslice.New(endpointslice.Config[Endpoint]{
		Make: func(s *discovery.EndpointSlice, ep *discovery.Endpoint, from *endpointslice.Endpoint, e *Endpoint) error {
			e.Addr = from.Addr
			e.Node, e.Zone = from.Node, from.Zone
			e.ForNodes, e.ForZones = from.ForNodes, from.ForZones
			e.Ready, e.Serving, e.Terminating = from.Ready, from.Serving, from.Terminating
			e.Weight = 1
			if hook == nil {
				return nil
			}
			err := hook(s, ep, e)
			e.Addr = from.Addr
			if err != nil && hookReason(err) == ReasonHookWarning {
				t.left.add(LeftOut{Reason: ReasonHookWarning, Err: fmt.Errorf("endpoint %s: %w", from.Addr, err)})
				return nil
			}
			return err
		},
		Equal: (*Endpoint).Equal,
		Key: func(e *Endpoint) (netip.AddrPort, endpointslice.Rank) {
			return e.Addr, endpointslice.Conditions{Ready: e.Ready, Terminating: e.Terminating, OnNode: e.Node != ""}.Rank()
		},
		Report: func(_ *discovery.EndpointSlice, left []LeftOut) {
			for _, l := range left {
				t.leave(l)
			}
		},
	})
	return t
}

// EndpointSliceUpdate calls [EndpointsChangeTracker.Delete] for the slice if remove
// is true, and [EndpointsChangeTracker.Set] otherwise.
func (t *EndpointsChangeTracker) EndpointSliceUpdate(s *discovery.EndpointSlice, remove bool) (changed bool) {
	if s != nil && remove {
		return t.Delete(types.NamespacedName{Namespace: s.Namespace, Name: s.Name})
	}
	return t.Set(s)
}

// Set stores the current state of a slice and reports whether a Service's endpoints
// changed. Set does not keep s. A slice of an untracked family, or one that is not
// selected, counts as empty.
func (t *EndpointsChangeTracker) Set(s *discovery.EndpointSlice) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s == nil {
		t.cache.Set(nil)
		t.reporter.slice(&discovery.EndpointSlice{}, &t.left)
		return false
	}
	defer t.reporter.slice(s, &t.left)
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	switch {
	case !t.selector.matchesSlice(s):
		t.leave(LeftOut{Reason: ReasonHeadlessLabel, Whole: true, Expected: true, Err: errHeadlessLabel})
		return t.delete(name)
	case !t.tracks(s.AddressType):
		t.leave(LeftOut{Reason: ReasonFamily, Whole: true, Expected: true, Err: errFamily})
		return t.delete(name)
	}
	owner := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discovery.LabelServiceName]}
	var was types.NamespacedName
	had := false
	if len(t.triggers) > 0 { // rare; a look-up for every slice would slow the start
		was, had = t.cache.Owner(name)
	}
	changed = t.cache.Set(s)
	if !changed {
		return false
	}
	if had && was != owner {
		delete(t.triggers, was)
	}
	if at, ok := t.trigger(s); ok && owner.Name != "" && len(t.triggers[owner]) < maxTriggers {
		t.triggers[owner] = append(t.triggers[owner], at)
	}
	return true
}

func (t *EndpointsChangeTracker) leave(l LeftOut) {
	if !l.Expected || t.reporter.hook != nil {
		t.left.add(l)
	}
}

// tracks reports whether the tracker handles slices of this type. It returns true for
// types that are not IP families, so that the cache reports them.
func (t *EndpointsChangeTracker) tracks(a discovery.AddressType) bool {
	switch a {
	case discovery.AddressTypeIPv4:
		return slices.Contains(t.families, IPv4)
	case discovery.AddressTypeIPv6:
		return slices.Contains(t.families, IPv6)
	}
	return true
}

// trigger returns the time in the slice's trigger annotation, and whether to use it: not a time from before the
// tracker started.
func (t *EndpointsChangeTracker) trigger(s *discovery.EndpointSlice) (time.Time, bool) {
	text, ok := s.Annotations[v1.EndpointsLastChangeTriggerTime]
	if !ok {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.left.add(LeftOut{Reason: ReasonInvalid, Err: fmt.Errorf("annotation %s: %q is not a time", v1.EndpointsLastChangeTriggerTime, complaint.Value(text))})
		return time.Time{}, false
	}
	return at, at.After(t.start)
}

// Delete removes a slice and reports whether a Service's endpoints changed. It discards the Service's pending trigger
// times, because a removal has none.
func (t *EndpointsChangeTracker) Delete(name types.NamespacedName) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.delete(name)
}

func (t *EndpointsChangeTracker) delete(name types.NamespacedName) bool {
	owner, ok := t.cache.Owner(name)
	if ok {
		delete(t.triggers, owner)
	}
	return t.cache.Delete(name)
}

// Take returns the changes since the previous Take, sorted by name. A Service that
// changed and changed back is left out.
func (t *EndpointsChangeTracker) Take() []EndpointsChange {
	t.mu.Lock()
	defer t.mu.Unlock()
	changes := t.cache.Take()
	out := make([]EndpointsChange, len(changes))
	for i, c := range changes {
		out[i] = EndpointsChange{c.Service, c.Old, c.New, t.triggers[c.Service]}
	}
	t.forgetTriggers()
	return out
}

func (t *EndpointsChangeTracker) forgetTriggers() {
	if len(t.triggers) > 1024 {
		t.triggers = map[types.NamespacedName][]time.Time{}
	} else {
		clear(t.triggers)
	}
}

// Get returns a Service's endpoints at the last Take, as in [EndpointsChange].New.
// They must not be modified.
func (t *EndpointsChangeTracker) Get(service types.NamespacedName) []PortEndpoints {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.cache.Ports(service)
}

// Map returns all endpoints at the last Take in a new map. Its cost is proportional
// to the number of ports.
func (t *EndpointsChangeTracker) Map() EndpointsMap {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := EndpointsMap{}
	for service, ports := range t.cache.All() {
		for i := range ports {
			out[KeyOf(service, &ports[i])] = ports[i].Endpoints
		}
	}
	return out
}

// KeyOf returns the key of port p of a Service, which is also the key of the matching
// [ServicePort]. p must not be nil.
func KeyOf(service types.NamespacedName, p *PortEndpoints) Key {
	return Key{ServicePortName{service, p.Name, p.Protocol}, familyOf(p.Type)}
}

func familyOf(a discovery.AddressType) Family {
	if a == discovery.AddressTypeIPv6 {
		return IPv6
	}
	return IPv4
}

// LocalReadyEndpoints returns the number of ready endpoints on the named node for every Service that has one, at the
// last Take, counted by distinct address. If the tracker has both families, it counts the family with more endpoints.
// A health-check node port responds per family, so a caller needs one tracker per family for it ([Config.Families]),
// or package runner/health. The cost is proportional to the number of endpoints on all nodes.
func (t *EndpointsChangeTracker) LocalReadyEndpoints(node string) map[types.NamespacedName]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[types.NamespacedName]int{}
	for service, ports := range t.cache.All() {
		if n := localReady(ports, node); n > 0 {
			out[service] = n
		}
	}
	return out
}

func localReady(ports []PortEndpoints, node string) int {
	var seen map[netip.Addr]struct{}
	count := map[Family]int{}
	for i := range ports {
		for _, e := range ports[i].Endpoints {
			if !e.Ready || !e.IsLocal(node) {
				continue
			}
			a := e.Addr.Addr()
			if _, ok := seen[a]; !ok {
				if seen == nil {
					seen = map[netip.Addr]struct{}{}
				}
				seen[a] = struct{}{}
				count[FamilyOf(a)]++
			}
		}
	}
	return max(count[IPv4], count[IPv6])
}
