package endpointslice

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"unsafe"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/byname"
)

// Config says what a [Cache] makes of endpoints. [Plain] returns a complete one.
type Config[E any] struct {
	// Make sets *e, which is zero, to what is kept of one endpoint in one port.
	// The slice and the endpoint are the caller's own and must not be written to;
	// neither they nor from nor e may be kept. An error skips the endpoint and is
	// reported. It must not change the address. Required.
	Make func(s *discovery.EndpointSlice, ep *discovery.Endpoint, from *Endpoint, e *E) error
	// Equal reports whether a and b say the same. Required.
	Equal func(a, b *E) bool
	// Key returns e's address and port, as in Endpoint.Addr, and its rank among
	// endpoints that have the same. Required.
	Key func(e *E) (netip.AddrPort, Rank)
	// Report, if not nil, is told of what was skipped: an error that is
	// [ErrInvalid] if the object is at fault, else one that wraps Make's. The slice
	// is nil if it was nil that was handed in.
	Report func(*discovery.EndpointSlice, error)
}

// Port is the endpoints of one port of one Service in one family.
type Port[E any] struct {
	// Name is the port's name; "" is a name.
	Name string
	// Protocol is TCP, UDP or SCTP.
	Protocol v1.Protocol
	// Type is [discovery.AddressTypeIPv4] or [discovery.AddressTypeIPv6].
	Type discovery.AddressType
	// Endpoints is sorted by address and never empty. It must not be written to.
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

// Change is what happened to one Service's endpoints.
type Change[E any] struct {
	// Service is the Service's name, from the slices' label.
	Service types.NamespacedName
	// Old is what the Service had at the Take before, New what it has. They are
	// sorted by name, protocol and type, and have no port without endpoints. Lists
	// that are the same in both share their memory.
	Old, New []Port[E]
}

// Cache holds the endpoints of all Services. It is not safe for concurrent use.
// Make one with [New].
type Cache[E any] struct {
	config   Config[E]
	slices   byname.Map[*slice[E]]
	services byname.Map[*service[E]]
	pending  []*service[E] // in the order they came, but for removals
	interned interned

	// What follows is scratch space, empty between calls.
	numbers []parsedPort
	parsed  []parsedEndpoint
	values  []E
	list    []*E
	lists   []*Port[E]
}

// slice is what is kept of an EndpointSlice: only those that hold endpoints are.
type slice[E any] struct {
	name    types.NamespacedName
	service *service[E]
	ports   []Port[E] // sorted; never written to once it is set
}

type service[E any] struct {
	name    types.NamespacedName
	slices  []*slice[E]  // sorted by name
	one     [1]*slice[E] // room for slices, which is most often enough
	taken   []Port[E]    // as of the last Take
	pending int          // 1 + the index in Cache.pending, or 0
	edit    *edit[E]     // nil if not pending, or for more than an edit
}

// Name is for [byname.Map].
func (s *slice[E]) Name() types.NamespacedName { return s.name }

// Name is for [byname.Map].
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

// Set takes note of a slice as it is now, new or not, and reports whether that
// changes the endpoints of a Service.
func (c *Cache[E]) Set(s *discovery.EndpointSlice) (changed bool) {
	if s == nil {
		c.fail(nil, fmt.Errorf("%w: nil EndpointSlice", ErrInvalid))
		return false
	}
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	if name.Namespace == "" || name.Name == "" {
		c.fail(s, fmt.Errorf("%w: name %q in namespace %q", ErrInvalid, name.Name, name.Namespace))
		return false
	}
	owner := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discovery.LabelServiceName]}
	switch {
	case s.AddressType == discovery.AddressTypeFQDN:
		return c.Delete(name)
	case s.AddressType != discovery.AddressTypeIPv4 && s.AddressType != discovery.AddressTypeIPv6:
		c.fail(s, fmt.Errorf("%w: unknown address type %q", ErrInvalid, s.AddressType))
		return c.Delete(name)
	case owner.Name == "":
		c.fail(s, fmt.Errorf("%w: no label %s", ErrInvalid, discovery.LabelServiceName))
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

// Delete forgets a slice and reports whether that changes the endpoints of a
// Service.
func (c *Cache[E]) Delete(name types.NamespacedName) (changed bool) {
	old := c.slices.Get(name)
	if old == nil {
		return false
	}
	c.remove(old)
	return true
}

// Owner returns the Service that the named slice's endpoints are counted to. It
// is false for a slice that has none.
func (c *Cache[E]) Owner(slice types.NamespacedName) (service types.NamespacedName, ok bool) {
	if s := c.slices.Get(slice); s != nil {
		return s.service.name, true
	}
	return types.NamespacedName{}, false
}

// Pending returns the Services that may differ from what they were at the last
// [Cache.Take], in no order.
func (c *Cache[E]) Pending() iter.Seq[types.NamespacedName] {
	return func(yield func(types.NamespacedName) bool) {
		for _, s := range c.pending {
			if !yield(s.name) {
				return
			}
		}
	}
}

// Take returns what has changed since the last Take, sorted by Service. What was
// changed and changed back is not in it.
func (c *Cache[E]) Take() []Change[E] {
	var out []Change[E]
	c.TakeFunc(func(ch Change[E]) { out = append(out, ch) })
	slices.SortFunc(out, func(a, b Change[E]) int { return compareNames(a.Service, b.Service) })
	return out
}

// TakeFunc is [Cache.Take] without a list: it calls f for each change, in no
// particular order. f must not change the cache.
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

// Ports returns a Service's endpoints as of the last [Cache.Take], as in
// [Change.New].
func (c *Cache[E]) Ports(service types.NamespacedName) []Port[E] {
	if s := c.services.Get(service); s != nil {
		return s.taken
	}
	return nil
}

// All returns every Service that had endpoints at the last [Cache.Take], in no
// order. The cache must not be changed while it is read.
func (c *Cache[E]) All() iter.Seq2[types.NamespacedName, []Port[E]] {
	return func(yield func(types.NamespacedName, []Port[E]) bool) {
		for s := range c.services.All() {
			if len(s.taken) > 0 && !yield(s.name, s.taken) {
				return
			}
		}
	}
}

// add puts in a slice that is not there.
func (c *Cache[E]) add(name, owner types.NamespacedName, ports []Port[E]) {
	// Names are copied: the caller's may be a part of something bigger. The
	// EndpointSlice controller has a slice's name begin with its Service's, so one
	// copy most often does for both.
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
	c.mark(svc)
}

// remove takes out a slice that is there.
func (c *Cache[E]) remove(s *slice[E]) {
	c.slices.Delete(s)
	svc := s.service
	i, _ := svc.find(s)
	svc.slices = slices.Delete(svc.slices, i, i+1)
	if c.drop(svc) {
		c.unmark(svc)
	} else {
		c.mark(svc)
	}
}

// edit gives a slice other ports.
func (c *Cache[E]) edit(s *slice[E], ports []Port[E]) {
	svc := s.service
	e := svc.edit
	if svc.pending == 0 && len(svc.slices) > 1 {
		e = &edit[E]{s, s.ports}
	} else if e != nil && e.slice != s {
		e = nil
	}
	s.ports = ports
	c.mark(svc)
	svc.edit = e
}

// mark notes that the Service is to be looked at by the next Take.
func (c *Cache[E]) mark(svc *service[E]) {
	svc.edit = nil
	if svc.pending == 0 {
		c.pending = append(c.pending, svc)
		svc.pending = len(c.pending)
	}
}

// unmark takes that back.
func (c *Cache[E]) unmark(svc *service[E]) {
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

// drop forgets a Service that has nothing, and had nothing at the last Take.
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

// parse returns the slice's ports and whether they differ from what it had
// before. Endpoints that do not differ are those of before.
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
	var bad problems
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
					bad.add(fmt.Errorf("endpoint %s: %w", from.Addr, err))
				}
			}
		}
		i += n
		if len(c.values) == 0 {
			continue
		}
		port := Port[E]{Name: p.name, Protocol: p.protocol, Type: s.AddressType}
		var old []*E
		if k, ok := slices.BinarySearchFunc(was, &port, func(a Port[E], b *Port[E]) int { return a.compare(b) }); ok {
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
	c.report(s, bad)
	changed = changed || len(ports) != len(was)
	if !changed {
		return was, false
	}
	return ports, true
}

// addressType returns a constant equal to t, so as not to keep the object's
// string.
func addressType(t discovery.AddressType) discovery.AddressType {
	if t == discovery.AddressTypeIPv6 {
		return discovery.AddressTypeIPv6
	}
	return discovery.AddressTypeIPv4
}

// keep returns c.values as a list of pointers: the one in old for each value
// that is there, and old itself if all are.
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
		// By far the most common length costs one allocation.
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
		// In a slice that changes in part, again and again, each block would end up
		// with one endpoint that is still there.
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

// blockLen is how many endpoints are allocated at once. The new ones of a slice
// are, to save what the allocator adds to each; but not too many, since all of a
// block stays for as long as one of its endpoints is in use.
func blockLen[E any]() int {
	var e E
	return max(1, 2048/max(1, int(unsafe.Sizeof(e))))
}

// tidy clears the scratch space, so that nothing of an object is kept in it.
func (c *Cache[E]) tidy() {
	c.numbers = tidied(c.numbers)
	c.parsed = tidied(c.parsed)
	c.values = tidied(c.values)
}

// tidied returns an empty slice with s's room, unless that is uncommonly much.
func tidied[T any](s []T) []T {
	if cap(s) > 4096 {
		return nil
	}
	clear(s)
	return s[:0]
}

func (c *Cache[E]) report(s *discovery.EndpointSlice, p problems) {
	if p.first != nil {
		c.fail(s, p.err())
	}
}

func (c *Cache[E]) fail(s *discovery.EndpointSlice, err error) {
	if c.config.Report != nil {
		c.config.Report(s, err)
	}
}

func compareNames(a, b types.NamespacedName) int {
	if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}
