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
)

// EndpointsMap is endpoints by the port they are behind.
type EndpointsMap map[Key][]*Endpoint

// PortEndpoints is the endpoints of one port of a Service in one family.
type PortEndpoints = endpointslice.Port[Endpoint]

// EndpointsChange is what happened to one Service's endpoints.
type EndpointsChange struct {
	// Name is the Service's.
	Name types.NamespacedName
	// Old is what the Service had at the Take before, New what it has, sorted by
	// port name, protocol and family. A port without endpoints is not in it, a
	// list that did not change shares its memory, and so does an endpoint.
	Old, New []PortEndpoints
	// Triggers is when the changes were caused, as far as their slices say; see
	// [Update].
	Triggers []time.Time
}

// EndpointsChangeTracker turns EndpointSlices into [Endpoint] values by Service
// port and says which Services' endpoints have changed. It is a part of [Tracker]
// that can be used alone, with no Services at all; all its methods are safe for
// concurrent use.
//
// Those who know kube-proxy's type of this name will find these differences:
// there is one tracker for both families; what is compared is what a slice says of
// endpoints, not the whole object; a slice that changes its owner moves; an
// endpoint named twice always gives the same result; changes are taken with old
// and new values and their trigger times, in place of a map that has to be updated
// and may not be kept; whether conntrack entries need cleaning is left to those
// who look at the changes; and which endpoints are local is asked of the endpoint,
// by node name.
type EndpointsChangeTracker struct {
	mu       sync.Mutex
	selector Selector
	families []Family
	reporter reporter
	cache    *endpointslice.Cache[Endpoint]
	triggers map[types.NamespacedName][]time.Time
	start    time.Time
}

// maxTriggers bounds the trigger times kept for one Service while nobody takes
// them. The first are kept: they are those who waited longest.
const maxTriggers = 256

// NewEndpointsChangeTracker returns a tracker that knows no endpoints. It fails
// only with [ErrConfig].
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
		reporter: reporter{c.Log, c.Events},
		triggers: map[types.NamespacedName][]time.Time{},
		start:    c.Now(),
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
			return err
		},
		Equal: (*Endpoint).Equal,
		Key: func(e *Endpoint) (netip.AddrPort, endpointslice.Rank) {
			return e.Addr, endpointslice.RankOf(e.Ready, e.Terminating)
		},
		Report: func(s *discovery.EndpointSlice, err error) {
			if s == nil {
				s = &discovery.EndpointSlice{}
			}
			reason := ReasonHookFailed
			if errors.Is(err, endpointslice.ErrInvalid) {
				reason = ReasonInvalid
			}
			t.reporter.slice(s, reason, err)
		},
	})
	return t
}

// EndpointSliceUpdate is [EndpointsChangeTracker.Set] of the slice, or Delete of
// it if remove is true.
func (t *EndpointsChangeTracker) EndpointSliceUpdate(s *discovery.EndpointSlice, remove bool) (changed bool) {
	if s != nil && remove {
		return t.Delete(types.NamespacedName{Namespace: s.Namespace, Name: s.Name})
	}
	return t.Set(s)
}

// Set takes note of a slice as it is now, new or not, and reports whether that
// changes the endpoints of a Service. s is not kept. A slice of a family that is
// not tracked, or that is not selected, holds nothing.
func (t *EndpointsChangeTracker) Set(s *discovery.EndpointSlice) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s == nil {
		return t.cache.Set(nil)
	}
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	if !t.selector.MatchesSlice(s) || !t.tracks(s.AddressType) {
		return t.delete(name)
	}
	owner := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discovery.LabelServiceName]}
	var was types.NamespacedName
	had := false
	if len(t.triggers) > 0 { // seldom so, and a look-up shows at the start
		was, had = t.cache.Owner(name)
	}
	if !t.cache.Set(s) {
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

// tracks reports whether slices of the type are looked at. Types that are no
// family are, for the cache to report.
func (t *EndpointsChangeTracker) tracks(a discovery.AddressType) bool {
	switch a {
	case discovery.AddressTypeIPv4:
		return slices.Contains(t.families, IPv4)
	case discovery.AddressTypeIPv6:
		return slices.Contains(t.families, IPv6)
	}
	return true
}

// trigger returns the time a slice says its change was caused, unless that is
// older than the tracker: then it says how long the tracker was not there.
func (t *EndpointsChangeTracker) trigger(s *discovery.EndpointSlice) (time.Time, bool) {
	text, ok := s.Annotations[v1.EndpointsLastChangeTriggerTime]
	if !ok {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.reporter.slice(s, ReasonInvalid, fmt.Errorf("annotation %s: %w", v1.EndpointsLastChangeTriggerTime, err))
		return time.Time{}, false
	}
	return at, at.After(t.start)
}

// Delete forgets a slice and reports whether that changes the endpoints of a
// Service. It forgets the Service's trigger times too: nothing tells when the
// removal was caused, and what they belong to can no longer be told from it.
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

// PendingChanges returns the names of the Services that the next Take may have.
func (t *EndpointsChangeTracker) PendingChanges() []types.NamespacedName {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.SortedFunc(t.cache.Pending(), compareNames)
}

// Take returns what has changed since the last Take, sorted by name. What was
// changed and changed back is not in it.
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

// forgetTriggers does so without keeping the room that very many once took.
func (t *EndpointsChangeTracker) forgetTriggers() {
	if len(t.triggers) > 1024 {
		t.triggers = map[types.NamespacedName][]time.Time{}
	} else {
		clear(t.triggers)
	}
}

// Get returns a Service's endpoints as of the last Take, as in
// [EndpointsChange.New]. They must not be written to.
func (t *EndpointsChangeTracker) Get(service types.NamespacedName) []PortEndpoints {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.cache.Ports(service)
}

// Map returns all endpoints as of the last Take, in a new map. It costs a step
// for each port.
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

// KeyOf returns the key under which a Service's port meets its endpoints.
func KeyOf(service types.NamespacedName, p *PortEndpoints) Key {
	return Key{ServicePortName{service, p.Name, p.Protocol}, familyOf(p.Type)}
}

func familyOf(a discovery.AddressType) Family {
	if a == discovery.AddressTypeIPv6 {
		return IPv6
	}
	return IPv4
}

// LocalReadyEndpoints returns, for every Service that has one, how many distinct
// addresses of ready endpoints it had on the named node at the last Take: what a
// health-check node port answers with. An endpoint behind several ports counts
// once. If the tracker has both families, the one with more is counted; a
// health-check node port answers by family, so a caller that answers with this
// count needs a tracker for each family ([Config.Families]), or package
// runner/health. It costs a step for each endpoint there is, on any node.
func (t *EndpointsChangeTracker) LocalReadyEndpoints(node string) map[types.NamespacedName]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[types.NamespacedName]int{}
	for service, ports := range t.cache.All() {
		if n := LocalReady(ports, node); n > 0 {
			out[service] = n
		}
	}
	return out
}

// LocalReady is [EndpointsChangeTracker.LocalReadyEndpoints] for one Service.
func LocalReady(ports []PortEndpoints, node string) int {
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
