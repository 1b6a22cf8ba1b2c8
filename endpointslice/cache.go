package endpointslice

import (
	"iter"
	"net/netip"
	"slices"
	"strings"
	"unsafe"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/byname"
	"github.com/go-proxier/proxier/internal/complaint"
)

// Config configures a [Cache] for endpoints of type E. [Plain] returns a complete
// Config for [Endpoint].
type Config[E any] struct {
	// Make sets *e, which is zero, to the value to store for one endpoint in one port, with the address of from, the
	// parsed endpoint. It must neither modify the slice or the endpoint, nor keep them, from or e. If it returns an
	// error, the cache skips the endpoint and reports the error. Make is required.
	Make func(s *discovery.EndpointSlice, ep *discovery.Endpoint, from *Endpoint, e *E) error
	// Equal reports whether a and b are equal. It is required.
	Equal func(a, b *E) bool
	// Key returns e's address and port, those of Endpoint.Addr, and its rank among endpoints with the same address
	// and port. It is required.
	Key func(e *E) (netip.AddrPort, Rank)
	// Report, if not nil, is called once by a Set that leaves out a slice or parts of it. The slice is nil if Set was
	// called with nil.
	Report func(*discovery.EndpointSlice, []LeftOut)
}

// Port holds the endpoints of one port of one Service in one family.
type Port[E any] struct {
	// Name is the port's name, which may be "".
	Name string
	// Protocol is TCP, UDP or SCTP.
	Protocol v1.Protocol
	// Type is [discovery.AddressTypeIPv4] or [discovery.AddressTypeIPv6].
	Type discovery.AddressType
	// Endpoints is sorted by address and never empty. It must not be modified.
	Endpoints []*E
}

func (p *Port[E]) compare(o *Port[E]) int {
	if c := strings.Compare(p.Name, o.Name); c != 0 {
		return c
	}
	if c := strings.Compare(string(p.Protocol), string(o.Protocol)); c != 0 {
		return c
	}
	return strings.Compare(string(p.Type), string(o.Type))
}

// Change describes the change of one Service's endpoints.
type Change[E any] struct {
	// Service is the name of the Service, from the slices' label.
	Service types.NamespacedName
	// Old holds the endpoints at the previous Take and New the current ones, sorted
	// by port name, protocol and type. Ports without endpoints are left out.
	// Unchanged lists share their memory.
	Old, New []Port[E]
}

// Cache holds the endpoints of all Services. It is not safe for concurrent use. [New]
// returns a Cache; the zero value is not usable.
type Cache[E any] struct {
	config   Config[E]
	slices   byname.Map[*slice[E]]
	services byname.Map[*service[E]]
	pending  []*service[E] // in order of arrival, except after removals
	interned interned

	// Scratch space, empty between calls.
	numbers []parsedPort
	parsed  []parsedEndpoint
	values  []E
	list    []*E
	lists   []*Port[E]
	left    []LeftOut
}

// slice holds an EndpointSlice that has endpoints. The cache does not store others.
type slice[E any] struct {
	name    types.NamespacedName
	service *service[E]
	ports   []Port[E] // sorted; never modified once set
}

type service[E any] struct {
	name    types.NamespacedName
	slices  []*slice[E]  // sorted by name
	one     [1]*slice[E] // memory for slices; usually sufficient
	taken   []Port[E]    // at the last Take
	pending int          // 1 + the index in Cache.pending, or 0
	edit    *edit[E]     // nil if not pending, or if other slices changed too
}

// Name implements the element type of [byname.Map].
func (s *slice[E]) Name() types.NamespacedName { return s.name }

// Name implements the element type of [byname.Map].
func (s *service[E]) Name() types.NamespacedName { return s.name }

// New returns an empty cache. It panics if a required function is missing.
func New[E any](c Config[E]) *Cache[E] {
	if c.Make == nil || c.Equal == nil || c.Key == nil {
		panic("endpointslice: incomplete Config")
	}
	return &Cache[E]{
		config:   c,
		slices:   byname.New[*slice[E]](),
		services: byname.New[*service[E]](),
		interned: interned{one: recent[string]{limit: shared}, many: recent[[]string]{limit: shared}},
	}
}

// Set stores the current state of a slice and reports whether a Service's endpoints
// changed.
func (c *Cache[E]) Set(s *discovery.EndpointSlice) (changed bool) {
	defer c.report(s)
	if s == nil {
		c.leave(LeftOut{Reason: ReasonInvalid, Whole: true}, "nil EndpointSlice")
		return false
	}
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	if name.Namespace == "" || name.Name == "" {
		c.leave(LeftOut{Reason: ReasonInvalid, Whole: true}, "missing name or namespace (name %q, namespace %q)", complaint.Value(name.Name), complaint.Value(name.Namespace))
		return false
	}
	owner := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discovery.LabelServiceName]}
	switch {
	case s.AddressType != discovery.AddressTypeIPv4 && s.AddressType != discovery.AddressTypeIPv6:
		c.leave(LeftOut{Reason: ReasonAddressType, Whole: true}, "address type %q is not supported", complaint.Value(s.AddressType))
		return c.Delete(name)
	case owner.Name == "":
		c.leave(LeftOut{Reason: ReasonNoService, Whole: true}, "no label %s", discovery.LabelServiceName)
		return c.Delete(name)
	}

	old := c.slices.Get(name)
	var was []Port[E]
	if old != nil {
		was = old.ports
	}
	ports, changed := c.parse(s, was)
	if old != nil && old.service.name == owner {
		if !changed {
			return false
		}
		if len(ports) > 0 {
			c.edit(old, ports)
			return true
		}
	}
	if old != nil {
		c.remove(old)
	}
	if len(ports) > 0 {
		c.add(name, owner, ports)
	}
	return old != nil || len(ports) > 0
}

// Delete removes a slice and reports whether a Service's endpoints changed.
func (c *Cache[E]) Delete(name types.NamespacedName) (changed bool) {
	old := c.slices.Get(name)
	if old == nil {
		return false
	}
	c.remove(old)
	return true
}

// Owner returns the Service of the named slice. ok is false if the slice has no
// endpoints in the cache.
func (c *Cache[E]) Owner(slice types.NamespacedName) (service types.NamespacedName, ok bool) {
	if s := c.slices.Get(slice); s != nil {
		return s.service.name, true
	}
	return types.NamespacedName{}, false
}

// Take returns the changes since the previous Take, sorted by Service. A Service that
// changed and changed back is left out.
func (c *Cache[E]) Take() []Change[E] {
	var out []Change[E]
	c.TakeFunc(func(ch Change[E]) { out = append(out, ch) })
	slices.SortFunc(out, func(a, b Change[E]) int { return byname.Compare(a.Service, b.Service) })
	return out
}

// TakeFunc does the work of [Cache.Take], but calls f for each change, in no
// particular order, instead of returning a list. f must not change the cache.
func (c *Cache[E]) TakeFunc(f func(Change[E])) {
	for _, s := range c.pending {
		was := s.taken
		ports, changed := c.merged(s)
		s.pending, s.edit = 0, nil
		if changed {
			s.taken = ports
			f(Change[E]{s.name, was, ports})
		}
		c.drop(s)
	}
	c.pending = tidied(c.pending)
}

// Ports returns a Service's endpoints at the last [Cache.Take], as in [Change].New.
func (c *Cache[E]) Ports(service types.NamespacedName) []Port[E] {
	if s := c.services.Get(service); s != nil {
		return s.taken
	}
	return nil
}

// All returns every Service that had endpoints at the last [Cache.Take], in no
// particular order. The cache must not be changed during the iteration.
func (c *Cache[E]) All() iter.Seq2[types.NamespacedName, []Port[E]] {
	return func(yield func(types.NamespacedName, []Port[E]) bool) {
		for s := range c.services.All() {
			if len(s.taken) > 0 && !yield(s.name, s.taken) {
				return
			}
		}
	}
}

func (c *Cache[E]) add(name, owner types.NamespacedName, ports []Port[E]) {
	// Copy the names: the caller's strings may keep a larger buffer alive. A slice's name usually starts with the
	// name of its Service, so one copy serves both.
	name = types.NamespacedName{Namespace: c.interned.name(name.Namespace), Name: strings.Clone(name.Name)}
	svc := c.services.Get(owner)
	if svc == nil {
		owner.Namespace = name.Namespace
		if strings.HasPrefix(name.Name, owner.Name) {
			owner.Name = name.Name[:len(owner.Name)]
		} else {
			owner.Name = strings.Clone(owner.Name)
		}
		svc = &service[E]{name: owner}
		svc.slices = svc.one[:0]
		c.services.Put(svc)
	}
	s := &slice[E]{name, svc, ports}
	c.slices.Put(s)
	i, _ := svc.find(s)
	svc.slices = slices.Insert(svc.slices, i, s)
	if len(svc.slices) > 1 {
		svc.one[0] = nil // no longer in use
	}
	c.addPending(svc)
}

func (c *Cache[E]) remove(s *slice[E]) {
	c.slices.Delete(s)
	svc := s.service
	i, _ := svc.find(s)
	svc.slices = slices.Delete(svc.slices, i, i+1)
	if c.drop(svc) {
		c.removePending(svc)
	} else {
		c.addPending(svc)
	}
}

func (c *Cache[E]) edit(s *slice[E], ports []Port[E]) {
	svc := s.service
	e := svc.edit
	if svc.pending == 0 && len(svc.slices) > 1 {
		e = &edit[E]{s, s.ports}
	} else if e != nil && e.slice != s {
		e = nil
	}
	s.ports = ports
	c.addPending(svc)
	svc.edit = e
}

// addPending adds the Service to those that the next Take examines.
func (c *Cache[E]) addPending(svc *service[E]) {
	svc.edit = nil
	if svc.pending == 0 {
		c.pending = append(c.pending, svc)
		svc.pending = len(c.pending)
	}
}

func (c *Cache[E]) removePending(svc *service[E]) {
	if svc.pending == 0 {
		return
	}
	last := len(c.pending) - 1
	c.pending[svc.pending-1] = c.pending[last]
	c.pending[last].pending = svc.pending
	c.pending[last] = nil
	c.pending = c.pending[:last]
	svc.pending = 0
}

// drop removes a Service that has no slices now and had no endpoints at the last Take, and reports whether it did.
func (c *Cache[E]) drop(svc *service[E]) bool {
	if len(svc.slices) > 0 || len(svc.taken) > 0 {
		return false
	}
	c.services.Delete(svc)
	return true
}

func (svc *service[E]) find(s *slice[E]) (int, bool) {
	return slices.BinarySearchFunc(svc.slices, s, func(a, b *slice[E]) int {
		return strings.Compare(a.name.Name, b.name.Name)
	})
}

// parse returns the slice's ports and whether they differ from was, its previous
// ports. It reuses unchanged endpoints of was.
func (c *Cache[E]) parse(s *discovery.EndpointSlice, was []Port[E]) (ports []Port[E], changed bool) {
	numbers := c.parsePorts(s)
	var eps []parsedEndpoint
	if len(numbers) > 0 {
		eps = c.parseEndpoints(s)
	}
	defer c.tidy()
	if len(eps) == 0 {
		return nil, len(was) > 0
	}
	if most := max(1, maxEndpoints/len(eps)); len(numbers) > most {
		c.leave(LeftOut{Reason: ReasonLimitExceeded}, "%d ports with %d endpoints each are more than %d endpoints: only %d ports are used", len(numbers), len(eps), maxEndpoints, most)
		numbers = numbers[:most]
	}
	var zero E
	for i := 0; i < len(numbers); {
		p := numbers[i]
		n := 1
		for i+n < len(numbers) && numbers[i+n].name == p.name && numbers[i+n].protocol == p.protocol {
			n++ // one port with several numbers
		}
		c.values = slices.Grow(c.values, n*len(eps))
		for j := range eps {
			for _, p := range numbers[i : i+n] {
				from := &eps[j].Endpoint
				from.Addr = netip.AddrPortFrom(from.Addr.Addr(), p.number)
				c.values = append(c.values, zero)
				if err := c.config.Make(s, &s.Endpoints[eps[j].index], from, &c.values[len(c.values)-1]); err != nil {
					c.values[len(c.values)-1] = zero
					c.values = c.values[:len(c.values)-1]
					c.leave(LeftOut{Reason: ReasonHookFailed}, "endpoint %s: %w", from.Addr, err)
				}
			}
		}
		i += n
		if len(c.values) == 0 {
			continue
		}
		port := Port[E]{Name: p.name, Protocol: p.protocol, Type: s.AddressType}
		var old []*E
		if k, ok := findPort(was, &port); ok {
			old = was[k].Endpoints
		}
		port.Type = addressType(s.AddressType)
		port.Endpoints = c.keep(old)
		c.values = tidied(c.values)
		if len(old) == 0 || &port.Endpoints[0] != &old[0] {
			changed = true
		}
		if ports == nil {
			ports = make([]Port[E], 0, len(numbers)-i+n)
		}
		ports = append(ports, port)
	}
	changed = changed || len(ports) != len(was)
	if !changed {
		return was, false
	}
	return ports, true
}

// addressType returns the constant equal to t, so that the object's string is not
// kept.
func addressType(t discovery.AddressType) discovery.AddressType {
	if t == discovery.AddressTypeIPv6 {
		return discovery.AddressTypeIPv6
	}
	return discovery.AddressTypeIPv4
}

// keep returns c.values as a list of pointers. It reuses the pointers in old for
// equal values, and old itself if all are equal.
func (c *Cache[E]) keep(old []*E) []*E {
	fresh := 0
	list := c.list
	j := 0
	for i := range c.values {
		v := &c.values[i]
		addr, _ := c.config.Key(v)
		var kept *E
		for j < len(old) {
			a, _ := c.config.Key(old[j])
			d := a.Compare(addr)
			if d > 0 {
				break
			}
			if d == 0 && c.config.Equal(old[j], v) {
				kept = old[j]
			}
			j++
		}
		if kept == nil {
			fresh++
		}
		list = append(list, kept)
	}
	defer func() { c.list = tidied(list) }()
	if fresh == 0 && len(list) == len(old) {
		return old
	}
	if len(list) == 1 && fresh == 1 {
		// Most lists have one element: use one allocation.
		one := &struct {
			value E
			list  [1]*E
		}{value: c.values[0]}
		one.list[0] = &one.value
		return one.list[:]
	}
	out := slices.Clone(list)
	most := blockLen[E]()
	if fresh < len(list) {
		// If a slice changed a few endpoints at a time, each block would in the end hold one live endpoint.
		most = 1
	}
	var block []E
	for i := range out {
		if out[i] != nil {
			continue
		}
		if len(block) == 0 {
			block = make([]E, min(fresh, most))
			fresh -= len(block)
		}
		block[0] = c.values[i]
		out[i] = &block[0]
		block = block[1:]
	}
	return out
}

// blockLen returns the number of new endpoints to allocate together, which saves the allocator's overhead. Blocks are
// small because one live endpoint keeps the whole block in memory.
func blockLen[E any]() int {
	var e E
	return max(1, 2048/max(1, int(unsafe.Sizeof(e))))
}

// tidy clears the scratch space, so that it keeps no parts of an object.
func (c *Cache[E]) tidy() {
	c.numbers = tidied(c.numbers)
	c.parsed = tidied(c.parsed)
	c.values = tidied(c.values)
}

// tidied returns s with length 0, or nil if its capacity is large, to free the
// memory.
func tidied[T any](s []T) []T {
	if cap(s) > 4096 {
		return nil
	}
	clear(s)
	return s[:0]
}
