package endpointslice_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"unsafe"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/endpointslice"
)

// model is a simple, slow cache: it keeps all objects and computes everything from
// them.
type model map[types.NamespacedName]*discovery.EndpointSlice

type portKey struct {
	name     string
	protocol v1.Protocol
	kind     discovery.AddressType
}

type state map[types.NamespacedName]map[portKey]map[netip.AddrPort]endpointslice.Endpoint

func (m model) state() state {
	type candidate struct {
		endpointslice.Endpoint
		slice string
	}
	byAddr := map[types.NamespacedName]map[portKey]map[netip.AddrPort][]candidate{}
	for name, s := range m {
		owner := types.NamespacedName{Namespace: name.Namespace, Name: s.Labels[discovery.LabelServiceName]}
		if owner.Name == "" || s.AddressType != discovery.AddressTypeIPv4 && s.AddressType != discovery.AddressTypeIPv6 {
			continue
		}
		for _, p := range s.Ports {
			if p.Name == nil || p.Port == nil || *p.Port <= 0 || *p.Port > 65535 {
				continue
			}
			k := portKey{*p.Name, v1.ProtocolTCP, s.AddressType}
			if p.Protocol != nil {
				k.protocol = *p.Protocol
			}
			for _, e := range s.Endpoints {
				if len(e.Addresses) == 0 {
					continue
				}
				a, err := netip.ParseAddr(e.Addresses[0])
				if err != nil || a.Is4() != (s.AddressType == discovery.AddressTypeIPv4) {
					continue
				}
				c := candidate{slice: name.Name, Endpoint: endpointslice.Endpoint{
					Addr: netip.AddrPortFrom(a, uint16(*p.Port)), Ready: true, Serving: true,
				}}
				for to, from := range map[*bool]*bool{&c.Ready: e.Conditions.Ready, &c.Serving: e.Conditions.Serving, &c.Terminating: e.Conditions.Terminating} {
					if from != nil {
						*to = *from
					}
				}
				if e.NodeName != nil {
					c.Node = *e.NodeName
				}
				if e.Hints != nil {
					for _, z := range e.Hints.ForZones {
						c.ForZones = append(c.ForZones, z.Name)
					}
				}
				if byAddr[owner] == nil {
					byAddr[owner] = map[portKey]map[netip.AddrPort][]candidate{}
				}
				if byAddr[owner][k] == nil {
					byAddr[owner][k] = map[netip.AddrPort][]candidate{}
				}
				byAddr[owner][k][c.Addr] = append(byAddr[owner][k][c.Addr], c)
			}
		}
	}
	out := state{}
	no := func(b bool) int {
		if b {
			return 0
		}
		return 1
	}
	for owner, ports := range byAddr {
		out[owner] = map[portKey]map[netip.AddrPort]endpointslice.Endpoint{}
		for k, addrs := range ports {
			out[owner][k] = map[netip.AddrPort]endpointslice.Endpoint{}
			for a, all := range addrs {
				// Within one slice the first endpoint wins.
				slices.SortStableFunc(all, func(x, y candidate) int {
					return cmp.Or(
						cmp.Compare(no(!x.Terminating), no(!y.Terminating)),
						cmp.Compare(no(x.Ready), no(y.Ready)),
						cmp.Compare(no(x.Node != ""), no(y.Node != "")),
						cmp.Compare(x.slice, y.slice),
						cmp.Compare(x.Node, y.Node),
					)
				})
				out[owner][k][a] = all[0].Endpoint
			}
		}
	}
	return out
}

func stateOf(t *testing.T, c *cache) state {
	out := state{}
	for service, ports := range c.All() {
		out[service] = portsState(t, ports)
	}
	return out
}

func portsState(t *testing.T, ports []endpointslice.Port[endpointslice.Endpoint]) map[portKey]map[netip.AddrPort]endpointslice.Endpoint {
	out := map[portKey]map[netip.AddrPort]endpointslice.Endpoint{}
	for _, p := range ports {
		k := portKey{p.Name, p.Protocol, p.Type}
		if out[k] != nil || len(p.Endpoints) == 0 {
			t.Fatalf("port %v twice, or empty", k)
		}
		out[k] = map[netip.AddrPort]endpointslice.Endpoint{}
		for i, e := range p.Endpoints {
			if i > 0 && p.Endpoints[i-1].Addr.Compare(e.Addr) >= 0 {
				t.Fatalf("%v after %v", e.Addr, p.Endpoints[i-1].Addr)
			}
			out[k][e.Addr] = *e
		}
	}
	return out
}

func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

func randomSlice(r *rand.Rand, name types.NamespacedName) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: name.Namespace, Name: name.Name,
			Labels: map[string]string{discovery.LabelServiceName: pick(r, "x", "x", "x", "y", "")},
		},
		AddressType: pick(r, discovery.AddressTypeIPv4, discovery.AddressTypeIPv4, discovery.AddressTypeIPv6, discovery.AddressTypeFQDN),
	}
	for range r.IntN(4) {
		s.Ports = append(s.Ports, discovery.EndpointPort{
			Name:     pick(r, ptr("a"), ptr("a"), ptr(""), nil),
			Protocol: pick(r, nil, ptr(v1.ProtocolTCP), ptr(v1.ProtocolUDP)),
			Port:     pick(r, ptr(int32(80)), ptr(int32(80)), ptr(int32(81)), ptr(int32(0)), ptr(int32(70000)), nil),
		})
	}
	for range r.IntN(6) {
		e := discovery.Endpoint{
			Addresses: pick(r, nil, []string{"bad"}, []string{fmt.Sprintf("10.0.0.%d", r.IntN(6))}, []string{fmt.Sprintf("10.0.0.%d", r.IntN(6))}, []string{fmt.Sprintf("fd00::%d", r.IntN(6))}),
			NodeName:  pick(r, nil, ptr("n1"), ptr("n2")),
			Conditions: discovery.EndpointConditions{
				Ready:       pick(r, nil, ptr(true), ptr(false)),
				Serving:     pick(r, nil, ptr(true), ptr(false)),
				Terminating: pick(r, nil, ptr(true), ptr(false)),
			},
		}
		if r.IntN(3) == 0 {
			e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: pick(r, "z1", "z2")}}}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// divided returns a random slice of Service x. Nearly all of its addresses are in no other slice.
func divided(r *rand.Rand, name types.NamespacedName) *discovery.EndpointSlice {
	s := slice(name.Name, "x")
	s.Namespace = name.Namespace
	if r.IntN(20) > 0 {
		s.Ports = append(s.Ports, port("metrics", 81))
	}
	for i := range 9 {
		e := conditions(ep(fmt.Sprintf("10.0.%d.%s", i, name.Name)), ptr(r.IntN(3) > 0), nil, nil)
		if i == 0 && r.IntN(4) == 0 {
			e.Addresses[0] = "10.0.0.99"
		}
		if r.IntN(4) > 0 {
			s.Endpoints = append(s.Endpoints, e)
		}
	}
	return s
}

// TestCacheMatchesModel sets random slices. In every other world they divide the endpoints of a Service. After every Take it checks that the cache
// equals the model, that the changes are real and lead to the model's state, that
// unchanged values keep their memory, and that neither objects nor returned values
// are modified.
func TestCacheMatchesModel(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		c, _ := newCache()
		objects := model{}
		followed := state{}
		pointers := map[string]*endpointslice.Endpoint{}
		kept := map[*endpointslice.Endpoint]endpointslice.Endpoint{}
		lists := map[*endpointslice.Port[endpointslice.Endpoint]][]endpointslice.Port[endpointslice.Endpoint]{}
		for step := range 300 {
			name := types.NamespacedName{Namespace: pick(r, "n", "m"), Name: fmt.Sprint(r.IntN(5))}
			if r.IntN(4) == 0 {
				c.Delete(name)
				delete(objects, name)
			} else {
				random := []func(*rand.Rand, types.NamespacedName) *discovery.EndpointSlice{randomSlice, divided}[seed%2]
				s := random(r, name)
				if old := objects[name]; old != nil && r.IntN(2) == 0 {
					// A small change of an existing slice.
					s = old.DeepCopy()
					if n := len(s.Endpoints); n > 0 {
						i := r.IntN(n)
						if s.Endpoints[i].Conditions.Ready = ptr(r.IntN(2) == 0); r.IntN(3) == 0 {
							s.Endpoints = slices.Delete(s.Endpoints, i, i+1)
						}
					}
				}
				objects[name] = s.DeepCopy()
				before := s.DeepCopy()
				c.Set(s)
				if !reflect.DeepEqual(s, before) {
					t.Fatal("the slice was modified")
				}
				scramble(s)
			}
			if r.IntN(3) > 0 {
				continue
			}
			for name, s := range objects {
				want := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discovery.LabelServiceName]}
				if owner, ok := c.Owner(name); ok && owner != want {
					t.Fatalf("seed %d step %d: %v belongs to %v, want %v", seed, step, name, owner, want)
				}
			}
			want := objects.state()
			before := map[types.NamespacedName][]endpointslice.Port[endpointslice.Endpoint]{}
			for service, ports := range c.All() {
				before[service] = ports
			}
			for range c.All() { // an iteration may stop early
				break
			}
			changes := c.Take()
			for i, change := range changes {
				if i > 0 && changes[i-1].Service.String() >= change.Service.String() {
					t.Fatal("not sorted")
				}
				old := portsState(t, change.Old)
				if !reflect.DeepEqual(old, followed[change.Service]) && len(old)+len(followed[change.Service]) > 0 {
					t.Fatalf("seed %d step %d: Old of %v is %v, was %v", seed, step, change.Service, old, followed[change.Service])
				}
				now := portsState(t, change.New)
				if reflect.DeepEqual(old, now) {
					t.Fatalf("seed %d step %d: no change of %v", seed, step, change.Service)
				}
				followed[change.Service] = now
				if len(now) == 0 {
					delete(followed, change.Service)
				}
			}
			for what, got := range map[string]state{"changes lead to": followed, "cache has": stateOf(t, c)} {
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("seed %d step %d: %s\n%v, want\n%v", seed, step, what, got, want)
				}
			}
			now := map[string]*endpointslice.Endpoint{}
			for service, ports := range c.All() {
				checkLists(t, before[service], ports)
				if lists[&ports[0]] == nil {
					lists[&ports[0]] = slices.Clone(ports)
					for i := range ports {
						lists[&ports[0]][i].Endpoints = slices.Clone(ports[i].Endpoints)
					}
				}
				for _, p := range ports {
					for _, e := range p.Endpoints {
						id := fmt.Sprint(service, p.Name, p.Protocol, e.Addr)
						if was := pointers[id]; was != nil && was.Equal(e) && was != e {
							t.Fatalf("seed %d step %d: %s got a new pointer", seed, step, id)
						}
						now[id] = e
						if _, ok := kept[e]; !ok {
							kept[e] = clone(e)
						}
					}
				}
			}
			pointers = now
			for e, was := range kept {
				if !reflect.DeepEqual(*e, was) {
					t.Fatalf("seed %d step %d: an endpoint was changed from %+v to %+v", seed, step, was, *e)
				}
			}
		}
		for first, was := range lists {
			now := unsafe.Slice(first, len(was))
			for i := range was {
				if now[i].Name != was[i].Name || !slices.Equal(now[i].Endpoints, was[i].Endpoints) {
					t.Fatalf("seed %d: a list was changed from %v to %v", seed, was[i], now[i])
				}
			}
		}
		rebuilt, _ := newCache()
		for _, name := range slices.SortedFunc(maps.Keys(objects), func(a, b types.NamespacedName) int { return cmp.Compare(b.String(), a.String()) }) {
			rebuilt.Set(objects[name])
		}
		rebuilt.Take()
		c.Take()
		if !reflect.DeepEqual(stateOf(t, rebuilt), stateOf(t, c)) {
			t.Fatalf("seed %d: the result differs from that of a new cache", seed)
		}
		for name := range objects {
			c.Delete(name)
		}
		c.Take()
		if len(stateOf(t, c)) != 0 {
			t.Fatalf("seed %d: the cache is not empty", seed)
		}
	}
}

// checkLists checks that unchanged lists have the same memory.
func checkLists(t *testing.T, before, now []endpointslice.Port[endpointslice.Endpoint]) {
	t.Helper()
	equal := 0
	for _, p := range now {
		for _, was := range before {
			if was.Name != p.Name || was.Protocol != p.Protocol || was.Type != p.Type || !slices.EqualFunc(was.Endpoints, p.Endpoints, (*endpointslice.Endpoint).Equal) {
				continue
			}
			if equal++; &was.Endpoints[0] != &p.Endpoints[0] {
				t.Fatalf("the endpoints of %s got new memory", p.Name)
			}
		}
	}
	if len(now) == len(before) && equal == len(now) && &before[0] != &now[0] {
		t.Fatal("unchanged ports got new memory")
	}
}

func clone(e *endpointslice.Endpoint) endpointslice.Endpoint {
	c := *e
	c.ForNodes, c.ForZones = slices.Clone(e.ForNodes), slices.Clone(e.ForZones)
	return c
}

// scramble overwrites every field that a caller could write to.
func scramble(s *discovery.EndpointSlice) {
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		for j := range e.Addresses {
			e.Addresses[j] = "overwritten"
		}
		for _, p := range []*bool{e.Conditions.Ready, e.Conditions.Serving, e.Conditions.Terminating} {
			if p != nil {
				*p = !*p
			}
		}
		if e.NodeName != nil {
			*e.NodeName = "overwritten"
		}
		if e.Hints != nil {
			for j := range e.Hints.ForZones {
				e.Hints.ForZones[j].Name = "overwritten"
			}
		}
	}
	for i := range s.Ports {
		if s.Ports[i].Name != nil {
			*s.Ports[i].Name = "overwritten"
		}
		if s.Ports[i].Port != nil {
			*s.Ports[i].Port = 9
		}
	}
	clear(s.Labels)
}
